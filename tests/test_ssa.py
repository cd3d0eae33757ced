"""What ssa.py promises. Each test states one sentence twice, ours and an independent reference's, and compares."""

import math
import os

import entmax
import mpmath
import pytest
import torch
from hypothesis import given, settings, strategies as st
from mpmath import mpf

from ssa import FAR, SCORERS, attention, make_scorer, signed_log, ssa

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
FROM_SCORES = [name for name in SCORERS if name != "cosformer"]
TRAINS_QK = [name for name in FROM_SCORES if name != "hardmax"]
LARGEST = torch.finfo(BF16).max  # 3.39e38; float32's own largest, 3.40e38, is beyond bf16
SPECIAL = [0.0, -0.0, 1e-45, 1.0, -1.0, FAR, -FAR, LARGEST, -LARGEST, torch.finfo(F32).max, -torch.finfo(F32).max]

a_score = st.sampled_from(SPECIAL) | st.floats(-9, 9, width=32) | st.floats(allow_nan=False, allow_infinity=False, width=32)
a_row = st.lists(st.tuples(a_score, st.floats(-1, 1), st.booleans()), min_size=1, max_size=6)  # (score, dP, allowed?)
any_b = st.floats(-4, 4).map(lambda e: 10**e)  # 1e-4 .. 1e4
any_n = st.sampled_from([1.0, 64.0]) | st.floats(1, 64)
often = settings(max_examples=int(os.environ.get("SSA_EXAMPLES", 100)), deadline=None, derandomize=True, database=None)


def randn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def qkv(B=2, H=4, Hkv=2, Q=3, K=5, D=4, dtype=F64):
    tensors = randn(B, H, Q, D, seed=1), randn(B, Hkv, K, D, seed=2), randn(B, Hkv, K, D, seed=3)
    return [x.to(dtype).requires_grad_() for x in tensors]


def row(values, dtype):
    """One row of scores (H=1, Q=1, K), as near to the values as the dtype's finite numbers allow."""
    limit = torch.finfo(dtype).max
    return torch.tensor(values, dtype=F64).clamp(-limit, limit).to(dtype).view(1, 1, -1).requires_grad_()


def padding(B=2, K=5):
    """(B, 1, 1, K): the first sequence is whole, the second has two keys of padding."""
    mask = torch.ones(B, 1, 1, K, dtype=torch.bool)
    mask[1, ..., -2:] = False
    return mask


def exact_ssa(z, b, n, dP):
    """The paper's power form in 60 digits; gradients by the closed form: weights, dz, db, dn, and the size of each term."""
    with mpmath.workdps(60):
        z, dP, b, n = [mpf(x) for x in z], [mpf(x) for x in dP], mpf(b), mpf(n)
        power = [(1 + b * abs(x)) ** (mpmath.sign(x) * n) for x in z]
        P = [w / mpmath.fsum(power) for w in power]
        D = mpmath.fsum(p * g for p, g in zip(P, dP))
        dt = [p * (g - D) for p, g in zip(P, dP)]
        dt_dz = [n * b / (1 + b * abs(x)) for x in z]
        dt_db = [n * x / (1 + b * abs(x)) for x in z]
        dt_dn = [mpmath.sign(x) * mpmath.log(1 + b * abs(x)) for x in z]
        terms = [torch.tensor([float(x) for x in slopes], dtype=F64) for slopes in (dt_dz, dt_db, dt_dn)]
        dt = torch.tensor([float(x) for x in dt], dtype=F64)
        return torch.tensor([float(p) for p in P], dtype=F64), dt, *terms


def assert_near(got, want, allowance):
    assert got.isfinite().all()
    assert ((got.double() - want).abs() <= allowance).all(), (got, want, allowance)


# ------------------------------------------------------------------------------------------------------------ ssa()

def test_ssa_is_the_papers_signed_power_normalised():
    z, b, n = 5 * randn(3, 6, 8), torch.tensor([0.1, 0.8, 9.0], dtype=F64), torch.tensor([1.0, 1.5, 7.0], dtype=F64)
    power = (1 + b.view(-1, 1, 1) * z.abs()) ** (z.sign() * n.view(-1, 1, 1))
    torch.testing.assert_close(ssa(z, b, n), power / power.sum(-1, keepdim=True), rtol=1e-12, atol=0)
    torch.testing.assert_close(ssa(z, 0.8, 1.5)[1], ssa(z, b, n)[1])  # b and n may be plain numbers


@pytest.mark.parametrize("dtype", [F64, F32, BF16], ids=str)
@often
@given(a_row, any_b, any_n)
def test_weights_and_gradients_match_60_digit_arithmetic_for_any_finite_scores(dtype, cells, b, n):
    z, dP = row([c[0] for c in cells], dtype), torch.tensor([c[1] for c in cells], dtype=F64)
    b, n = (torch.tensor([x], dtype=F64 if dtype == F64 else F32, requires_grad=True) for x in (b, n))
    weights = ssa(z, b, n).view(-1)
    weights.backward(dP.to(weights.dtype))
    P, dt, dt_dz, dt_db, dt_dn = exact_ssa(z.flatten().tolist(), b.item(), n.item(), dP.to(weights.dtype).tolist())
    # t is rounded at its own size, so the weights carry that relative error, and each gradient it times its terms.
    rounding = 16 * torch.finfo(weights.dtype).eps * (4 + n.item() * dt_dn.abs().max())
    assert_near(weights, P, rounding * P + 1e-37)
    assert_near(z.grad.view(-1), dt * dt_dz, (rounding + torch.finfo(dtype).eps) * dt_dz + 1e-37)
    assert_near(b.grad, (dt * dt_db).sum(), rounding * dt_db.abs().sum() + 1e-37)
    assert_near(n.grad, (dt * dt_dn).sum(), rounding * dt_dn.abs().sum() + 1e-37)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_the_slope_at_score_zero_is_n_times_b(zero):
    z = row([zero, zero], F64)
    ssa(z, 0.8, 1.5)[..., 0].sum().backward()  # two weights of 1/2: dt = (1/4, -1/4)
    torch.testing.assert_close(z.grad.view(-1), 1.5 * 0.8 * torch.tensor([0.25, -0.25], dtype=F64))


def test_value_and_slope_are_continuous_where_b_times_z_would_overflow():
    b = torch.tensor(1e4, dtype=F64)
    z = (FAR / b * torch.tensor([1 - 1e-9, 1 + 1e-9, -1 + 1e-9, -1 - 1e-9], dtype=F64)).requires_grad_()
    log = signed_log(z, b)
    log.sum().backward()
    torch.testing.assert_close(log, z.sign() * math.log(FAR), rtol=0, atol=2e-9)
    torch.testing.assert_close(z.grad, 1 / z.abs(), rtol=1e-12, atol=0)


def test_softmax_is_the_edge_of_the_family_b_equal_1_over_n():
    z = randn(1, 4, 8)
    error = [(ssa(z, 1 / n, n) - z.softmax(-1)).abs().max() for n in (1e2, 1e4, 1e6)]
    assert error[0] < 0.1 and error[1] < error[0] / 50 and error[2] < error[1] / 50  # falls like 1/n


def test_scaling_the_scores_is_scaling_b():
    z = randn(2, 4, 8)
    torch.testing.assert_close(ssa(37 * z, 0.8, 1.5), ssa(z, 37 * 0.8, 1.5))


@pytest.mark.parametrize("b, n, remedy", [(0, 1.5, "b=0.*greater than 0"), (math.nan, 1.5, "b=nan"), (True, 1.5, "b=True"),
                                          (1, 0.9, "n=0.9.*at least 1"), ("1", 1.5, "b='1': must be a number"),
                                          (1, [1.5], "n=.*must be a number")])
def test_ssa_refuses_numbers_outside_the_domain(b, n, remedy):
    with pytest.raises(ValueError, match=remedy):
        ssa(torch.zeros(1, 1, 2), b, n)


# ------------------------------------------------------------------------------------------- what every scorer keeps

@pytest.mark.parametrize("name", FROM_SCORES)
@pytest.mark.parametrize("extreme", [LARGEST, -LARGEST])
def test_a_masked_score_does_not_matter_however_large(name, extreme):
    z, scorer = randn(2, 4, 3, 5, dtype=F32), make_scorer(name, 4)
    mask = torch.tensor([True, True, False, True, False])
    spoiled = z.masked_fill(~mask, extreme).requires_grad_()
    weights = scorer(spoiled, mask)
    torch.testing.assert_close(weights[..., mask], scorer(z[..., mask]))
    if name != "hardmax":
        weights.square().sum().backward()
        assert spoiled.grad.isfinite().all() and (spoiled.grad[..., ~mask] == 0).all()


@pytest.mark.parametrize("name", FROM_SCORES)
@often
@given(a_row, any_b, any_n)
def test_weights_and_gradients_are_finite_for_any_finite_scores_and_mask(name, cells, b, n):
    options = {"ssa": dict(b=b, n=n, freeze="n" if n == 1 else "none"), "temperature": dict(tau=b)}.get(name, {})
    scorer, (values, dP, allowed) = make_scorer(name, 1, **options), zip(*cells)
    for dtype in (F32, BF16):
        z = row(values, dtype)
        weights = scorer(z, torch.tensor(allowed))
        assert weights.isfinite().all() and (name == "sa_softmax" or abs(weights.sum().item() - any(allowed)) < 1e-5)
        if weights.requires_grad:
            weights.backward(torch.tensor(dP).view_as(weights))
        assert all(p.grad is None or p.grad.isfinite().all() for p in (z, *scorer.parameters()))


@pytest.mark.parametrize("name", TRAINS_QK)
def test_scores_that_are_all_zero_still_train(name):
    z = torch.zeros(4, 3, 5, requires_grad=True)
    (make_scorer(name, 4)(z) * randn(5, dtype=F32)).sum().backward()
    assert (z.grad.abs().amax(-1) > 0).all()


# ------------------------------------------------------------------------------------------------- the other scorers

@pytest.mark.parametrize("K", [1, 2, 7, 200])
@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
def test_sparsemax_and_entmax15_equal_the_package_entmax(name, K):
    scorer, theirs = make_scorer(name, 2), getattr(entmax, name)
    mask = (torch.arange(K) % 3 != 1) | (K == 1)
    for scale in (0.1, 1.0, 10.0):
        for z in (scale * randn(2, 6, K), (scale * randn(2, 6, K)).round(), torch.zeros(2, 6, K, dtype=F64)):  # ties
            for keep in (torch.ones(K, dtype=torch.bool), mask):
                ours, other = z.clone().requires_grad_(), z[..., keep].clone().requires_grad_()
                P, expected = scorer(ours, keep), theirs(other, dim=-1)
                torch.testing.assert_close(P[..., keep], expected, rtol=0, atol=1e-9)
                weight = randn(2, 6, K, seed=9)
                (P * weight).sum().backward()
                (expected * weight[..., keep]).sum().backward()
                torch.testing.assert_close(ours.grad[..., keep], other.grad, rtol=0, atol=1e-9)


def test_temperature_is_softmax_of_the_scores_over_tau():
    z = randn(2, 3, 5, dtype=F32)
    torch.testing.assert_close(make_scorer("temperature", 2)(z), z.softmax(-1))
    torch.testing.assert_close(make_scorer("temperature", 2, tau=0.25)(z), (4 * z).softmax(-1))


@pytest.mark.parametrize("freeze", [False, True])
def test_a_temperature_trains_unless_it_is_fixed(freeze):
    scorer, z = make_scorer("temperature", 2, tau=2.0, freeze=freeze), randn(2, 3, 5, dtype=F32).requires_grad_()
    scorer(z).square().sum().backward()
    assert (scorer.raw_tau.grad is None) if freeze else (scorer.raw_tau.grad != 0).all()
    assert scorer.tau.tolist() == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("z", [[1.0, 2.0, 3.0], [-1.0, -2.0, -4.0], [-1.0, 0.0, 2.5], [5.0], [-5.0]])
def test_self_adjusting_softmax_is_its_formula(z):
    z = torch.tensor(z, dtype=F64)
    low, high = min(z.min().item(), 0), max(z.max().item(), 0)
    formula = (z - low) / (high - low) * z.exp() / z.exp().sum()
    torch.testing.assert_close(make_scorer("sa_softmax", 1)(z.view(1, 1, -1)).view(-1), formula)


def test_self_adjusting_softmax_of_zeros_is_the_plain_average():
    mask = torch.tensor([True, True, False, True, True])
    assert make_scorer("sa_softmax", 1)(torch.zeros(1, 1, 5), mask).tolist() == [[[0.25, 0.25, 0, 0.25, 0.25]]]


def test_hardmax_shares_ties_and_is_the_limit_of_softmax():
    hardmax, z = make_scorer("hardmax", 1), torch.tensor([[[3.0, -1.0, 3.0, 2.9]]])
    assert hardmax(z).tolist() == [[[0.5, 0, 0.5, 0]]]
    torch.testing.assert_close(hardmax(z), (1e4 * z).softmax(-1))
    assert hardmax(z, torch.tensor([False, True, True, True])).tolist() == [[[0, 0, 1, 0]]]


def test_hardmax_trains_v_but_neither_q_nor_k_and_says_so():
    (q, k, v), scorer = qkv(), make_scorer("hardmax", 4)
    attention(q, k, v, scorer).square().sum().backward()
    assert q.grad is None and k.grad is None and v.grad.abs().sum() > 0 and not scorer.trains_qk
    assert all(SCORERS[name].trains_qk for name in SCORERS if name != "hardmax")


def slow_cosformer(q, k, horizon, causal, keep):
    """Weights (Q, K) of one head by a double loop; keep: which keys are no padding. The last query stands at the last key."""
    Q, K = len(q), len(k)
    power = torch.zeros(Q, K, dtype=F64)
    for i in range(Q):
        at = K - Q + i
        for j in range(K):
            if keep[j] and not (causal and j > at):
                power[i, j] = q[i].clamp_min(0) @ k[j].clamp_min(0) * math.cos(math.pi / 2 * (at - j) / horizon)
    total = power.sum(-1, keepdim=True)
    return torch.where(total > 0, power / total, 0.0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("Q", [1, 3, 9])
def test_cosformer_equals_a_double_loop_in_quadratic_and_in_linear_form(causal, Q):
    scorer, q, k, v = make_scorer("cosformer", 2, horizon=11), randn(2, 2, Q, 4), randn(2, 2, 9, 4, seed=5), randn(2, 2, 9, 3)
    q[0, 0, 0] = -1.0  # this query fires nowhere
    keep = padding(2, 9)
    heads = [slow_cosformer(q[b, h], k[b, h], 11, causal, keep[b, 0, 0]) for b in (0, 1) for h in (0, 1)]
    slow = torch.stack(heads).view(2, 2, Q, 9)
    out, weights = attention(q, k, v, scorer, causal=causal, mask=keep, return_weights=True)
    torch.testing.assert_close(weights, slow)
    torch.testing.assert_close(out, slow @ v)
    assert (out[0, 0, 0] == 0).all()
    for block in (1, 2, 5, 64):
        torch.testing.assert_close(scorer.linear(q, k, v, causal=causal, key_mask=keep[:, 0], block=block), slow @ v)


def test_cosformer_depends_on_distances_only_so_that_a_shifted_cache_agrees():
    scorer, q, k, v = make_scorer("cosformer", 2, horizon=99), randn(1, 2, 3, 4), randn(1, 2, 5, 4, seed=5), randn(1, 2, 5, 4)
    at = torch.arange(40, 45)
    torch.testing.assert_close(scorer.weights(q, k, positions=at), scorer.weights(q, k))
    torch.testing.assert_close(scorer.linear(q, k, v, positions=at), scorer.weights(q, k) @ v)


def test_cosformer_wants_q_and_k_and_no_more_keys_than_its_horizon():
    scorer, (q, k, v) = make_scorer("cosformer", 4, horizon=4), qkv()
    with pytest.raises(TypeError, match="needs q and k"):
        scorer(torch.zeros(4, 3, 5))
    with pytest.raises(ValueError, match="5 keys are more than cosformer's horizon of 4"):
        attention(q, k, v, scorer)
    with pytest.raises(ValueError, match="3 queries are more than the 2 keys"):
        attention(q, k[:, :, :2], v[:, :, :2], scorer)
    assert [name for name in SCORERS if SCORERS[name].needs_qk] == ["cosformer"]


# --------------------------------------------------------------------------------------------- parameters and options

def test_ssa_has_two_scalars_a_head_and_only_temperature_has_another():
    owned = {name: {p: tuple(x.shape) for p, x in make_scorer(name, 6).named_parameters()} for name in SCORERS}
    assert owned == {"ssa": {"raw_b": (6,), "raw_n": (6,)}, "temperature": {"raw_tau": (6,)}} | {
        name: {} for name in SCORERS if name not in ("ssa", "temperature")}
    assert not any(list(make_scorer(name, 6).buffers()) for name in SCORERS)


@pytest.mark.parametrize("cast", [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.to(BF16), lambda m: m.to("cpu", F16)])
def test_b_n_and_tau_stay_float32_in_a_half_precision_model(cast):
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), make_scorer("ssa", 3, b=2.7201, n=1.4901), make_scorer("temperature", 3)])
    linear, scorer, temperature = cast(model)
    assert linear.weight.dtype in (BF16, F16)
    assert scorer.b.dtype == scorer.n.dtype == temperature.tau.dtype == F32 and scorer.b.shape == scorer.n.shape == (3,)
    torch.testing.assert_close(scorer.b, torch.tensor([2.7201] * 3), rtol=1e-6, atol=0)
    torch.testing.assert_close(scorer.n, torch.tensor([1.4901] * 3), rtol=1e-6, atol=0)


def test_b_and_n_are_float32_also_when_the_default_dtype_is_not():
    torch.set_default_dtype(BF16)
    try:
        scorer = make_scorer("ssa", 3)
    finally:
        torch.set_default_dtype(F32)
    assert scorer.b.dtype == scorer.n.dtype == F32


@pytest.mark.parametrize("b, n", [(1e-4, 1.0001), (0.8, 1.5), (2.72, 1.49), (1e4, 64.0), (1e-4, 64.0), (1e4, 1e4)])
def test_b_and_n_start_where_asked(b, n):
    scorer = make_scorer("ssa", 3, b=b, n=n)
    assert scorer.b.tolist() == pytest.approx([b] * 3, rel=2e-6) and scorer.n.tolist() == pytest.approx([n] * 3, rel=2e-6)


@pytest.mark.parametrize("raw", [-1e4, -200.0, 0.0, 1e4])
def test_b_is_positive_and_n_at_least_1_whatever_the_raw_value(raw):
    scorer, z = make_scorer("ssa", 2), torch.tensor([[[-LARGEST, -1, 0, 1, LARGEST]]]).expand(2, 1, 5).clone().requires_grad_()
    for parameter in scorer.parameters():
        parameter.data.fill_(raw)
    assert (scorer.b > 0).all() and (scorer.n >= 1).all()
    scorer(z).square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (z, scorer.raw_b, scorer.raw_n))


@pytest.mark.parametrize("freeze, trained", [("none", {"raw_b", "raw_n"}), ("b", {"raw_n"}), ("n", {"raw_b"}), ("both", set())])
def test_freeze_says_what_does_not_train(freeze, trained):
    scorer = make_scorer("ssa", 2, freeze=freeze)
    (scorer(randn(2, 3, 5, dtype=F32).requires_grad_()) ** 2).sum().backward()
    assert {name for name, p in scorer.named_parameters() if p.grad is not None and (p.grad != 0).all()} == trained


def test_a_frozen_n_may_be_exactly_1():
    assert make_scorer("ssa", 2, n=1.0, freeze="n").n.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("name", FROM_SCORES)
def test_vmap_over_scores_is_the_batch(name):
    z, scorer = randn(3, 4, 2, 5, dtype=F32), make_scorer(name, 4)
    torch.testing.assert_close(torch.func.vmap(scorer)(z), scorer(z))


@pytest.mark.parametrize("name, options, message", [
    ("softmx", {}, "'softmx' is unknown; choose one of softmax, ssa"),
    ("softmax", dict(b=1.0), "'softmax' has no option 'b'; it takes none"),
    ("ssa", dict(beta=1.0), "'ssa' has no option 'beta'; it takes b, n, freeze"),
    ("ssa", dict(b=0.0), "b=0.0: must be a number greater than 0"), ("ssa", dict(b=math.nan), "b=nan: must be a number"),
    ("ssa", dict(n=0.5), "n=0.5: must be a number greater than 1"), ("ssa", dict(n=1.0), "n=1.0.*exactly 1 with n frozen"),
    ("ssa", dict(n=math.inf), "n=inf"), ("ssa", dict(freeze="all"), "freeze='all': must be none, b, n or both"),
    ("temperature", dict(tau=0.0), "tau=0.0: must be a number greater than 0"),
    ("cosformer", dict(horizon=0), "horizon=0: must be a number at least 1"),
    ("ssa", dict(b="1"), "b='1': must be a number greater than 0"), ("ssa", dict(n="2"), "n='2': must be a number"),
    ("ssa", dict(b=None), "b=None: must be a number"), ("ssa", dict(b=[0.8, 1.0]), r"b=\[0.8, 1.0\]: must be a number"),
    ("ssa", dict(b=torch.ones(4)), r"b=tensor\(.*: must be a number"), ("ssa", dict(b=True), "b=True: must be a number"),
    ("temperature", dict(tau="1"), "tau='1': must be"), ("cosformer", dict(horizon="9"), "horizon='9': must be"),
])
def test_make_scorer_names_what_is_wrong_and_the_remedy(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_scorer(name, 4, **options)
