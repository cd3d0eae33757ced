"""Attention and models under attack: whatever is finite goes in, and on every path comes out finite, normalised, and right.

How many cases each test tries is SSA_EXAMPLES, 25 if it is not set; `python tests/faults.py` sets it to thousands. SSA_SEED
chooses others. Queries and
keys are small whole numbers times a power of two, from 2^-112 to 2^112 together: so every score is exact in every order of
summation, and the paths may differ by the rounding of what follows it alone, however large the scores are.
"""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, seed, settings, strategies as st

import ssa_blockwise
import ssa_cpu
import ssa_flash
from config import ModelConfig
from conftest import require_interpreter
from model import Transformer
from ssa import SCORERS, SSA, Temperature, attention, end_aligned, make_scorer
from ssa_flash import attend, why_not

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
SEED, EXAMPLES = (int(os.environ.get(name, default)) for name, default in (("SSA_SEED", 0), ("SSA_EXAMPLES", 25)))
often = lambda test: seed(SEED)(settings(max_examples=EXAMPLES, deadline=None, database=None)(test))
PAIRS = [(name, "plain") for name in SCORERS] + [("softmax", "sdpa"), ("temperature", "sdpa"), ("ssa", "cpp"), ("ssa", "torch"),
                                                 ("ssa", "triton")]

any_b = st.floats(-4, 4).map(lambda e: 10**e)  # 1e-4 .. 1e4
any_n = st.floats(1, 64)
any_powers = st.tuples(*2 * [st.integers(-56, 56)])
near_1 = st.builds(lambda p, both: (p, both - p), st.integers(-56, 56), st.integers(-10, 2))  # the scores are, not q and k
any_shape = st.fixed_dictionaries(dict(
    B=st.integers(1, 2), Hkv=st.integers(1, 2), groups=st.integers(1, 3), Q=st.integers(1, 6),
    K=st.sampled_from([1, 2, 3, 7, 40]), D=st.sampled_from([1, 4, 16]), seed=st.integers(0, 2**32 - 1)))
any_options = st.fixed_dictionaries(dict(
    causal=st.booleans(), scale=st.sampled_from([None, 0.5, 1.0, 2.0]),
    mask=st.sampled_from(["none", "padding", "any", "one key", "nothing"])))


@pytest.fixture
def take(request, monkeypatch):
    """take(path): the path's name for `attend`, after making sure that nothing else can run in its place."""
    def taken(path):
        if path == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("runs on a CPU with TRITON_INTERPRET=1 alone, as test_the_kernels_of_gpus_too starts it")
        if path == "triton":
            require_interpreter()
        if path == "cpp":
            if ssa_cpu.why_not():
                pytest.skip(ssa_cpu.why_not())
        if path == "torch":
            monkeypatch.setattr(ssa_flash, "_why_not_cpu", lambda dtype: "not in this test")
            monkeypatch.setattr(ssa_blockwise, "ROWS", 4)  # so that the small shapes have several tiles
            monkeypatch.setattr(ssa_blockwise, "COLS", 16)
        return "blockwise" if path in ("cpp", "torch") else path
    return taken


def operands(shape, powers, dtype):
    """q, k, v and the upstream gradient."""
    B, Hkv, groups, Q, K, D = (shape[name] for name in ("B", "Hkv", "groups", "Q", "K", "D"))
    g = torch.Generator().manual_seed(shape["seed"])
    whole = lambda *size: torch.randint(-7, 8, size, generator=g, dtype=F64)
    tensors = (whole(B, Hkv * groups, Q, D) * 2.0**powers[0], whole(B, Hkv, K, D) * 2.0**powers[1], whole(B, Hkv, K, D) / 4,
               whole(B, Hkv * groups, Q, D) / 4)
    return [x.to(dtype) for x in tensors]


def make_mask(kind, shape):
    B, H, Q, K = shape["B"], shape["Hkv"] * shape["groups"], shape["Q"], shape["K"]
    g = torch.Generator().manual_seed(shape["seed"] + 1)
    if kind == "none":
        return None
    if kind == "padding":
        return torch.arange(K) < torch.randint(0, K + 1, (B, 1, 1, 1), generator=g)  # perhaps all of a sequence
    if kind == "one key":
        return (torch.arange(K) == K // 2).view(1, 1, 1, K)
    return torch.rand(B, H, Q, K, generator=g) > (2 if kind == "nothing" else 0.5)


def make(name, H, b, n, dtype=F32):
    scorer = make_scorer(name, H, **{"ssa": dict(b=b, n=n if n > 1 else 1.01), "temperature": dict(tau=b)}.get(name, {}))
    return scorer.double() if dtype == F64 else scorer


def outcome(function, tensors, scorer, **options):
    """Output, and gradients of q, k, v and the scorer's parameters (0 where there is none)."""
    *inputs, upstream = [x.clone().requires_grad_() for x in tensors]
    out = function(*inputs, scorer, **options)
    wanted = [*inputs, *scorer.parameters()]
    grads = torch.autograd.grad(out, wanted, upstream.detach(), allow_unused=True, materialize_grads=True)
    return dict(zip(("out", "dq", "dk", "dv", *(f"d{name}" for name, _ in scorer.named_parameters())), (out, *grads)))


@pytest.mark.parametrize("name, path", PAIRS)
def test_every_scorer_on_every_path_is_finite_normalised_and_right(name, path, take):
    dtypes = [F32, BF16] if path in ("cpp", "triton") else [F32, BF16, F16]  # the kernels have no float16 of their own
    least_log = 1.0 if path == "triton" else 0.0  # its logarithm has an absolute error (ssa_triton.log2), the others' a relative
    kernel, path = path, take(path)
    compared = name in ("softmax", "temperature", "ssa")
    powers = any_powers if name == "ssa" else any_powers | near_1  # exp(z) tells scores apart only where they are near 1

    @often
    @given(any_shape, any_options, st.sampled_from(dtypes), powers, any_b, any_n)
    def attack(shape, options, dtype, powers, b, n):
        if kernel == "triton":
            shape |= {"B": 1, "Hkv": 1}  # the interpreter takes half a second for every head
        if kernel == "cpp":  # several tiles of 64 queries and 256 keys
            shape |= {"Q": 70 if shape["Q"] == 6 else shape["Q"], "K": 300 if shape["K"] == 40 else shape["K"]}
        if dtype == F16:  # exact, and scores of at most 2 * 16 * 28 * 28 = 25,088: float16 ends at 65,504
            powers = [power % 11 - 8 for power in powers]
        if (name, path) == ("temperature", "sdpa"):
            b = max(b, 0.0125)  # PyTorch's kernel multiplies q / tau by k: 16 * 7 * 7 * 2^112 / 0.0125 < 3.4e38, float32's end
        if name == "cosformer":
            shape["Q"] = min(shape["Q"], shape["K"])  # it refuses more queries than keys
        tensors, mask = operands(shape, powers, dtype), make_mask(options["mask"], shape)
        scorer = make(name, tensors[0].size(1), b, n)
        assert why_not(path, scorer, "cpu") is None
        options = {**options, "mask": mask}
        got = outcome(attend, tensors, scorer, path=path, **options)
        if path == "plain":
            _, weights = attention(*tensors[:3], scorer, return_weights=True, **options)
            require_normalised(name, weights, mask, options["causal"])
        if compared:
            exact = make(name, tensors[0].size(1), b, n, F64)
            exact.load_state_dict(scorer.state_dict())
            compare(got, [x.double() for x in tensors], exact, dtype, least_log, **options)
        else:
            for part, x in got.items():
                assert x.isfinite().all(), part

    attack()


def test_scores_over_tau_beyond_float32_are_right_in_the_plain_path_and_nan_in_pytorchs_kernel():
    q, v = torch.full((1, 1, 1, 1), 2.0**63), torch.tensor([1.0, 2.0]).view(1, 1, 2, 1)
    k, scorer = q * torch.tensor([1.0, -1.0]).view(1, 1, 2, 1), make("temperature", 1, 1e-4, 1)  # 2^126 / 1e-4 is 8.5e41
    assert attend(q, k, v, scorer, path="plain").item() == 1
    assert attend(q, k, v, scorer, path="sdpa").isnan().all()  # at which a trainer stops


def test_the_kernels_of_gpus_too():
    """`ssa-triton` of the above in a process of its own: the interpreter must be chosen before Triton is imported."""
    require_interpreter()
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", __file__, "-k", "ssa-triton"], capture_output=True, text=True,
                          env={**os.environ, "TRITON_INTERPRET": "1", "SSA_EXAMPLES": "5", "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-2000:]


def require_normalised(name, weights, mask, causal):
    """As the scorers' docstrings say: not negative, 0 where masked, rows that sum to 1 (at most, or 0, for two of them)."""
    B, H, Q, K = weights.shape
    allowed = torch.ones(Q, K, dtype=torch.bool) if mask is None else mask
    allowed = (end_aligned(Q, K, allowed, "cpu") if causal else allowed).expand(B, H, Q, K)
    total, full = weights.sum(-1), allowed.any(-1).float()
    assert (weights >= 0).all() and (weights[~allowed] == 0).all()
    if name == "sa_softmax":
        assert (total <= full + 1e-5).all()
    elif name == "cosformer":
        assert (((total - full).abs() < 1e-5) | (total == 0)).all()
    else:
        assert ((total - full).abs() < 1e-5).all()


def compare(got, tensors, scorer, dtype, least_log, causal, mask, scale):
    """Every part of an outcome is finite, and is that of the plain path in float64 within what rounding can do: a relative error
    `e` of each weight, and in a gradient the same error of every term of its sum. SSA's signed log, where it stands in n's
    gradient, is wrong by e times itself or e times least_log, whichever is more."""
    q, k, v, upstream = tensors
    want = outcome(attention, tensors, scorer, causal=causal, mask=mask, scale=scale)
    groups, scale = q.size(1) // k.size(1), q.size(-1) ** -0.5 if scale is None else scale
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)  # (B, Hkv, K, D) -> (B, H, K, D)
    z, parameters = (q * scale) @ k.mT, {}
    with torch.no_grad():
        if isinstance(scorer, SSA):
            b, n = (x.double().view(-1, 1, 1) for x in (scorer.b, scorer.n))
            t, slope, steepest = n * torch.log1p(b * z.abs()), n * b / (1 + b * z.abs()), n * b
            parameters = {"draw_b": n * z.abs() / (1 + b * z.abs()) * scorer.raw_b.double().sigmoid().view(-1, 1, 1),
                          "draw_n": (t / n).clamp(min=least_log) * scorer.raw_n.double().sigmoid().view(-1, 1, 1)}
            rounded = n.max().item()  # what a relative error of z does to t
        else:
            tau = scorer.tau.double().view(-1, 1, 1) if isinstance(scorer, Temperature) else z.new_ones(1, 1, 1)
            t, slope = ((q.abs() * scale) @ k.abs().mT) / tau, (1 / tau).expand_as(z)  # q / tau is rounded, so sums cancel
            if isinstance(scorer, Temperature):
                parameters = {"draw_tau": t / tau * scorer.raw_tau.double().sigmoid().view(-1, 1, 1)}
            rounded, steepest = t.max().item(), 1 / tau
        info, half = torch.finfo(dtype), dtype != F32
        e = 16 * torch.finfo(F32).eps * (4 + t.max().item()) + half * 2 * info.eps * (1 + rounded)
        _, P = attention(q, k, v, scorer, causal=causal, mask=mask, scale=scale, return_weights=True)
        dP = upstream.abs() @ v.abs().mT
        both = dP + (P * dP).sum(-1, keepdim=True)
        dt = P * both
        dz = dt * slope
        sums = lambda x: x.unflatten(1, (-1, groups)).sum(2)  # (B, H, K, D) -> (B, Hkv, K, D)
        into_q_k = lambda dz: {"dq": scale * dz @ k.abs(), "dk": scale * sums(dz.mT @ q.abs())}
        size = {"out": P @ v.abs(), **into_q_k(dz), "dv": sums(P.mT @ upstream.abs()),
                **{part: (dt * factor).sum((0, 2, 3)) for part, factor in parameters.items()}}
        # A number below the smallest normal one is rounded to the nearest multiple of the smallest of all. That is as much as dz
        # may be wrong by, and what it is made of, in float32: P, before its factor `both`, and dt, before one of up to `steepest`.
        # b's and tau's gradients are made of dz, n's is made of dt.
        smallest = lambda dtype: torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        lost = 4 * smallest(dtype) + smallest(F32) * steepest * (4 + both)
        floor = into_q_k(lost) | {part: (lost * factor / slope).sum((0, 2, 3))
                                  for part, factor in parameters.items() if part != "draw_n"}
        # Where these sizes pass float16's largest number, inf is the right answer.
        ends = max(dz.max(), size["dq"].max() / scale, size["dk"].max()) > info.max
        for part, x in got.items():
            finite = x.isfinite()
            assert finite.all() or (ends and part in ("dq", "dk")), part
            if e <= 0.5:  # else scores so large that the dtype does not tell them apart
                error = (x.double() - want[part].double()).abs()
                allowed = e * size[part] + floor.get(part, 0) + info.smallest_normal
                assert (error <= allowed)[finite].all(), (part, error[finite].max(), (error / allowed)[finite].max())


# --------------------------------------------------------------------------------------------------------- whole models

@pytest.mark.parametrize("name", SCORERS)
def test_a_model_fed_the_worst_batches_stays_finite_or_says_that_it_is_not(name):
    """A trainer stops, naming the step, where the loss or the gradient's norm is not finite (training.Training.end_step). So
    where both are, all of the model must be finite after the update too."""
    @often
    @given(st.sampled_from(["one token", "all the same", "any", "no targets but one", "padding"]), st.integers(-6, 36),
           st.integers(0, 2**32 - 1), st.sampled_from([F32, BF16]))
    def attack(kind, power, seed, dtype):
        torch.manual_seed(seed)
        T = 1 if kind == "one token" else 5
        model = Transformer(ModelConfig(n_layer=2, n_head=2, n_kv_head=1, n_embd=8, n_ff=16, context=5, vocab_size=7,
                                        scorer=name))
        with torch.no_grad():
            model.blocks[0].attn.qkv.weight.mul_(10.0**power)
        x = torch.full((2, T), 3) if kind == "all the same" else torch.randint(7, (2, T))
        y = torch.randint(7, (2, T))
        if kind == "no targets but one":
            y[:, 1:], y[1] = -100, -100
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        with torch.autocast("cpu", BF16, enabled=dtype == BF16):
            _, loss = model(x, y, key_mask=torch.zeros(2, T, dtype=torch.bool) if kind == "padding" else None)
        loss.backward()
        exact = sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None).sqrt()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if power <= 12:  # float32 squares nothing beyond 1.8e19: where that makes the norm inf, the trainer stops
            assert loss.isfinite() and exact.isfinite() and (norm.isfinite() or exact > 1e19), (loss, norm, exact)
        if loss.isfinite() and norm.isfinite():
            optimizer.step()
            assert all(p.isfinite().all() for p in model.parameters())

    attack()


@pytest.mark.parametrize("name", SCORERS)
def test_the_largest_numbers_as_continuous_inputs(name):
    """Numbers in place of tokens: LayerNorm brings them to one size. Where their squares overflow, NaN goes through to the loss,
    at which a trainer stops, and nothing breaks on the way."""
    model = Transformer(ModelConfig(n_layer=1, n_head=2, n_kv_head=2, n_embd=8, n_ff=16, context=5, n_in=1, n_out=1, scorer=name,
                                    positions="learned"))
    for size in (0.0, 1e-30, 1.0, 1e18, torch.finfo(F32).max):
        outputs, _ = model(torch.full((1, 5, 1), size))
        assert outputs.isfinite().all() or size > 1e20, size
