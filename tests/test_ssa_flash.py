"""Attention, plain and fast: the plain one against loops over heads and queries, then every path against the plain one."""

import copy
from itertools import combinations

import pytest
import torch

from ssa import SCORERS, attention, make_scorer
from ssa_flash import PATHS, attend, pick_path, why_not

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
FROM_SCORES = [name for name in SCORERS if name != "cosformer"]
# What the fast paths can compute; everything else is refused. (Triton needs a GPU or its interpreter: test_flash_kernels.py.)
FUSED = [("softmax", "sdpa"), ("temperature", "sdpa"), ("ssa", "blockwise")]
TOLERANCE = {F32: 4e-6, BF16: 5e-2, F16: 4e-3}  # sums of a few roundings, relative to the largest entry


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def qkv(B=2, H=4, Hkv=2, Q=3, K=5, D=4, dtype=F64):
    tensors = randn(B, H, Q, D, seed=1), randn(B, Hkv, K, D, seed=2), randn(B, Hkv, K, D, seed=3)
    return [x.to(dtype).requires_grad_() for x in tensors]


def padding(B=2, K=5):
    """(B, 1, 1, K): the first sequence is whole, the second has two keys of padding."""
    mask = torch.ones(B, 1, 1, K, dtype=torch.bool)
    mask[1, ..., -2:] = False
    return mask


def scorer_with_varied_heads(name, H=4):
    """Every head has other values of the scorer's parameters, so that mixing up heads shows."""
    scorer = make_scorer(name, H)
    for i, parameter in enumerate(scorer.parameters()):
        parameter.data += 0.5 * randn(H, seed=i, dtype=F32)
    return scorer


def output_and_gradients(inputs, scorer, **options):
    out = attend(*inputs, scorer, **options)
    wanted = [*inputs, *scorer.parameters()]
    return [out, *torch.autograd.grad(out, wanted, randn(*out.shape, seed=8, dtype=out.dtype))]


def assert_same(got, want, tolerance):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.isfinite().all()
        torch.testing.assert_close(a.double(), b.double(), rtol=0, atol=tolerance * max(1, b.abs().max().item()))


# ---------------------------------------------------------------------------------- attention(), plain and complete

def slow_attention(q, k, v, b, n, scale, causal, mask):
    """SSA attention by loops over batch, head and query, with the power form: grouped heads share in consecutive order."""
    (B, H, Q, _), (_, Hkv, K, _), out = q.shape, k.shape, torch.zeros(*q.shape[:3], v.size(-1), dtype=F64)
    for s in range(B):
        for h in range(H):
            group = h * Hkv // H
            for i in range(Q):
                seen = [j for j in range(K) if mask[s, 0, 0, j] and (not causal or j <= i + K - Q)]
                z = torch.einsum("d,kd->k", q[s, h, i], k[s, group, seen]) * scale
                power = (1 + b[h] * z.abs()) ** (z.sign() * n[h])
                out[s, h, i] = torch.einsum("k,kd->d", power / power.sum(), v[s, group, seen])
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("H, Hkv, Q", [(4, 4, 5), (4, 2, 3), (6, 2, 1), (4, 1, 5)])
@pytest.mark.parametrize("scale", [None, 2.0])
def test_attention_equals_loops_over_heads_and_queries(causal, H, Hkv, Q, scale):
    (q, k, v), scorer = qkv(H=H, Hkv=Hkv, Q=Q), make_scorer("ssa", H).double()
    for i, parameter in enumerate(scorer.parameters()):
        parameter.data += randn(H, seed=i)
    out = attention(q, k, v, scorer, causal=causal, mask=padding(), scale=scale)
    slow = slow_attention(q, k, v, scorer.b, scorer.n, 0.5 if scale is None else scale, causal, padding())  # 1/sqrt(4)
    torch.testing.assert_close(out, slow)


@pytest.mark.parametrize("name", SCORERS)
def test_decoding_key_by_key_equals_the_whole_sequence(name):
    (q, k, v), scorer = qkv(Q=5), make_scorer(name, 4)
    steps = [attention(q[:, :, i:i + 1], k[:, :, :i + 1], v[:, :, :i + 1], scorer, causal=True) for i in range(5)]
    torch.testing.assert_close(torch.cat(steps, 2), attention(q, k, v, scorer, causal=True))


def test_dropout_keeps_the_expectation_and_returns_the_weights_before_it():
    torch.manual_seed(0)
    q, k, v = (x.expand(20_000, -1, -1, -1) for x in qkv(B=1, H=1, Hkv=1, Q=1, dtype=F32))
    scorer = make_scorer("ssa", 1)
    whole, weights = attention(q, k, v, scorer, return_weights=True)
    out, returned = attention(q, k, v, scorer, dropout_p=0.3, return_weights=True)
    assert torch.equal(returned, weights) and (out != whole).any()
    torch.testing.assert_close(out.mean(0), whole[0], rtol=0, atol=0.02)
    none = attention(q, k, torch.ones_like(v), scorer, dropout_p=0.3) == 0  # all five weights dropped: 0.3^5 of the rows
    assert none.float().mean().item() == pytest.approx(0.3**5, abs=0.001)


def test_half_precision_scores_are_scaled_before_they_can_overflow():
    q, k, v = 60 + randn(1, 1, 3, 64), 60 + randn(1, 1, 5, 64), randn(1, 1, 5, 64)
    for dtype in (F16, BF16):  # q . k is about 230,000; float16 ends at 65,504
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attention(*inputs, make_scorer("ssa", 1), causal=True)
        out.sum().backward()
        assert out.dtype == dtype and all(x.isfinite().all() for x in (out, *(i.grad for i in inputs)))


# ------------------------------------------------------------------------------------ attention() with every scorer

@pytest.mark.parametrize("dtype", [F64, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("name", SCORERS)
def test_weights_keep_shape_sign_mask_and_sum_in_at_least_float32(name, dtype):
    q, k, v = qkv(dtype=dtype)
    for shape in [None, (1,), (5,), (3, 5), (3, 1), (4, 1, 5), (2, 1, 1, 5), (2, 4, 3, 5)]:  # of the mask
        mask = None if shape is None else randn(*shape, seed=7) > -0.5
        out, weights = attention(q, k, v, make_scorer(name, 4), mask=mask, return_weights=True)
        allowed = torch.ones(2, 4, 3, 5, dtype=torch.bool) if mask is None else mask.expand(2, 4, 3, 5)
        assert weights.shape == (2, 4, 3, 5) and weights.dtype == (F64 if dtype == F64 else F32) and out.dtype == dtype
        assert (weights >= 0).all() and (weights[~allowed] == 0).all()
        total, full = weights.sum(-1), allowed.any(-1).to(weights.dtype)  # full: 1, or 0 where nothing is allowed
        if name == "sa_softmax":
            assert (total <= full + 1e-6).all()
        elif name == "cosformer":
            assert (((total - full).abs() < 1e-6) | (total == 0)).all()
        else:
            torch.testing.assert_close(total, full, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SCORERS)
def test_a_query_with_nothing_allowed_gets_zeros_and_gives_zero_gradients(name):
    (q, k, v), scorer = qkv(), make_scorer(name, 4)
    mask = torch.ones(2, 1, 3, 5, dtype=torch.bool)
    mask[0, :, 1] = False
    out, weights = attention(q, k, v, scorer, mask=mask, return_weights=True)
    assert (out[0, :, 1] == 0).all() and (weights[0, :, 1] == 0).all()
    inputs = [q, k, v, *scorer.parameters()]
    with torch.autograd.set_detect_anomaly(True):  # raises on a NaN anywhere on the way, not only at the end
        grads = torch.autograd.grad(out[0, :, 1].sum(), inputs, retain_graph=True, allow_unused=True)
        assert all((g == 0).all() for g in grads if g is not None)
        grads = torch.autograd.grad(out.sum(), inputs, allow_unused=True)  # and it does not spoil the other rows
    assert all(g.isfinite().all() for g in grads if g is not None)


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("case", ["plain", "causal", "padding"])
def test_gradients_through_attention_match_finite_differences(name, case):
    (q, k, v), scorer = qkv(), make_scorer(name, 4).double()  # grouped heads, 3 queries at the end of 5 keys
    for i, parameter in enumerate(scorer.parameters()):
        parameter.data += randn(4, seed=i)  # a different value in each head
    options = dict(causal=case != "plain", mask=padding() if case == "padding" else None)
    inputs = [v] if name == "hardmax" else [q, k, v, *scorer.parameters()]  # gradcheck moves these tensors in place
    assert torch.autograd.gradcheck(lambda *_: attention(q, k, v, scorer, **options), inputs)


@pytest.mark.parametrize("name", SCORERS)
def test_a_scorer_survives_state_dict_deepcopy_and_compile(name):
    scorer, (q, k, v) = make_scorer(name, 4), qkv(dtype=F32)
    for parameter in scorer.parameters():
        parameter.data += randn(4, dtype=F32)
    loaded = make_scorer(name, 4)
    loaded.load_state_dict(scorer.state_dict(), strict=True)
    call = lambda s: attention(q, k, v, s, causal=True, mask=padding())
    assert torch.equal(call(loaded), call(scorer)) and torch.equal(call(copy.deepcopy(scorer)), call(scorer))
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(scorer), call(scorer))


@pytest.mark.parametrize("name", FROM_SCORES)
def test_autocast_leaves_the_transform_in_float32(name):
    (q, k, v), scorer = qkv(dtype=F32), make_scorer(name, 4)
    with torch.autocast("cpu", BF16):
        out, weights = attention(q, k, v, scorer, return_weights=True)
        scores = (q * 0.5) @ k.repeat_interleave(2, 1).mT
        assert scores.dtype == BF16 and weights.dtype == F32 and scorer(scores).dtype == F32
    torch.testing.assert_close(weights, scorer(scores.float()), rtol=0, atol=1e-6)
    assert out.isfinite().all()


@pytest.mark.parametrize("change, error, message", [
    (dict(q=torch.zeros(4, 3, 4)), ValueError, "four dimensions"),
    (dict(q=torch.zeros(2, 3, 3, 4)), ValueError, "3 query heads.*multiple of the 2"),
    (dict(q=torch.zeros(1, 4, 3, 4)), ValueError, "do not fit"),
    (dict(q=torch.zeros(2, 4, 3, 6)), ValueError, "do not fit"),
    (dict(v=torch.zeros(2, 2, 6, 4)), ValueError, "do not fit"),
    (dict(v=torch.zeros(2, 4, 5, 4)), ValueError, "do not fit"),
    (dict(mask=torch.ones(3, 5)), TypeError, "float32; it must be boolean"),
    (dict(mask=torch.ones(3, 5).int()), TypeError, "int32; it must be boolean"),
    (dict(mask=torch.ones(3, 6).bool()), ValueError, "does not broadcast"),
    (dict(mask=torch.ones(1, 2, 4, 3, 5).bool()), ValueError, "does not broadcast"),
])
def test_operands_that_do_not_fit_are_refused_with_the_reason(change, error, message):
    q, k, v = qkv(dtype=F32)
    with pytest.raises(error, match=message):
        attention(**({"q": q, "k": k, "v": v, "scorer": make_scorer("softmax", 4)} | change))


# ------------------------------------------------------------------------------------------- attend() and its path table

def some_mask(kind, Q, K):
    """None, padding, or a mask with a row that allows nothing, or in a shape with fewer than four dimensions."""
    if kind == "empty row":
        mask = torch.ones(2, 1, Q, K, dtype=torch.bool)
        mask[1, :, -1] = False
        return mask
    few = torch.arange(K) != 1
    return {"none": None, "padding": padding(2, K), "(K,)": few, "(H, 1, K)": few.expand(4, 1, K)}[kind]


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", ["none", "padding", "empty row", "(K,)", "(H, 1, K)"])
@pytest.mark.parametrize("name, path", FUSED)
def test_every_path_gives_the_output_and_all_gradients_of_plain(name, path, mask, causal, dtype):
    scorer = scorer_with_varied_heads(name)
    for Q, K, Hkv, scale in [(5, 5, 4, None), (5, 5, 2, 0.3), (3, 5, 2, None), (1, 5, 1, None), (7, 5, 4, None)]:
        inputs, options = qkv(Q=Q, K=K, Hkv=Hkv, dtype=dtype), dict(causal=causal, mask=some_mask(mask, Q, K), scale=scale)
        got = output_and_gradients(inputs, scorer, path=path, **options)
        assert_same(got, output_and_gradients(inputs, scorer, path="plain", **options), TOLERANCE[dtype])
        if mask == "empty row":
            assert (got[0][1, :, -1] == 0).all()


@pytest.mark.parametrize("name", SCORERS)
def test_the_plain_path_is_attention_itself_and_auto_agrees(name):
    scorer, (q, k, v) = scorer_with_varied_heads(name), qkv(dtype=F32)
    reference = attention(q, k, v, scorer, causal=True, mask=padding(), scale=0.7)
    assert torch.equal(attend(q, k, v, scorer, causal=True, mask=padding(), scale=0.7, path="plain"), reference)
    torch.testing.assert_close(attend(q, k, v, scorer, causal=True, mask=padding(), scale=0.7), reference)


@pytest.mark.parametrize("name", SCORERS)
def test_auto_takes_a_fused_kernel_where_there_is_one_and_plain_otherwise(name):
    scorer = make_scorer(name, 4)
    path, reason = pick_path(torch.device("cpu"), F32, scorer, (2, 4, 512, 4))
    assert path == dict(FUSED).get(name, "plain") and why_not(path, scorer) is None and reason
    path, reason = pick_path(torch.device("cpu"), F32, scorer, (2, 4, 512, 4), 0.1)  # dropout falls on the weights
    assert path == ("sdpa" if name in ("softmax", "temperature") else "plain") and why_not(path, scorer, "cpu", 0.1) is None


@pytest.mark.parametrize("name, path", [(n, p) for n in SCORERS for p in PATHS
                                        if p != "plain" and (n, p) not in FUSED and (n, p) != ("ssa", "triton")])
def test_a_path_that_cannot_run_the_scorer_is_refused_with_the_reason(name, path):
    computes = "softmax" if path == "sdpa" else "SSA"
    with pytest.raises(ValueError, match=f"path '{path}'.*computes {computes}, not {SCORERS[name].__name__}"):
        attend(*qkv(), make_scorer(name, 4), path=path)


def test_dropout_of_weights_is_refused_where_no_weights_are_kept():
    with pytest.raises(ValueError, match="path 'blockwise': attention dropout of 0.1"):
        attend(*qkv(dtype=F32), make_scorer("ssa", 4), dropout_p=0.1, path="blockwise")


def test_an_unknown_path_is_refused_with_the_choices():
    with pytest.raises(ValueError, match="there is no path 'flash'; choose auto or one of plain, sdpa"):
        attend(*qkv(), make_scorer("softmax", 4), path="flash")


@pytest.mark.parametrize("name, path", FUSED)
def test_every_path_refuses_operands_that_do_not_fit(name, path):
    q, k, v = qkv(dtype=F32)
    with pytest.raises(TypeError, match="boolean"):
        attend(q, k, v, make_scorer(name, 4), mask=torch.ones(3, 5), path=path)
    with pytest.raises(ValueError, match="do not fit"):
        attend(q, k, v[:, :, :4], make_scorer(name, 4), path=path)
    with pytest.raises(ValueError, match="q has 4 heads, the scorer 3"):
        attend(q, k, v, make_scorer(name, 3), path=path)


@pytest.mark.parametrize("name", SCORERS)
def test_dropout_reaches_the_weights_on_the_chosen_path(name):
    torch.manual_seed(0)
    q, k, v = (x.expand(4_000, -1, -1, -1) for x in qkv(B=1, dtype=F32))
    out, whole = (attend(q, k, v, make_scorer(name, 4), dropout_p=p) for p in (0.3, 0.0))
    assert (out != whole).any()
    torch.testing.assert_close(out.mean(0), whole[0], rtol=0, atol=0.08)


# -------------------------------------------------------------------------------------------- the scorer is in effect

@pytest.mark.parametrize("one, other", list(combinations(SCORERS, 2)))
def test_every_two_scorers_give_different_outputs(one, other):
    inputs, outs = qkv(dtype=F32), []
    for name in (one, other):
        outs.append(attend(*inputs, make_scorer(name, 4, **({"tau": 2.0} if name == "temperature" else {}))))
    assert (outs[0] - outs[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name, parameter", [("ssa", "raw_b"), ("ssa", "raw_n"), ("temperature", "raw_tau")])
def test_changing_a_parameter_changes_the_output(name, parameter):
    scorer, inputs = make_scorer(name, 4), qkv(dtype=F32)
    before = attend(*inputs, scorer, causal=True)
    getattr(scorer, parameter).data[2] += 1.0  # of head 2 alone
    change = (attend(*inputs, scorer, causal=True) - before).abs().amax((0, 2, 3))
    assert change[2] > 1e-3 and (change[[0, 1, 3]] == 0).all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("mask", [None, padding()], ids=["causal", "causal and padding"])
@pytest.mark.parametrize("name", ["ssa", "temperature"])
def test_the_scorers_parameters_get_finite_gradients_that_are_not_zero(name, mask, dtype):
    scorer, (q, k, v) = make_scorer(name, 4).to(dtype), qkv(Q=5, dtype=dtype)
    attend(q, k, v, scorer, causal=True, mask=mask).float().square().sum().backward()
    for parameter in scorer.parameters():
        assert parameter.grad.dtype == F32 and parameter.grad.isfinite().all() and (parameter.grad != 0).all()
