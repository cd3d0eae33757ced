"""Every fused kernel of SSA against the plain path: output and the gradients of q, k, v, b and n."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ssa_cpu
import ssa_flash
from conftest import require_interpreter
from ssa import SSA, attention
from ssa_flash import attend, pick_path, why_not

ROOT = Path(__file__).resolve().parent.parent
needs_kernel = pytest.mark.skipif(ssa_cpu.why_not() is not None, reason=str(ssa_cpu.why_not()))


@pytest.fixture(params=[pytest.param("cpp", marks=needs_kernel), "torch"])
def kernel(request, monkeypatch):
    """Both implementations of the path blockwise; `cpp` fails if the call falls back, `torch` keeps C++ out."""
    if request.param == "cpp":
        monkeypatch.setattr(ssa_flash, "ssa_blockwise", None)
    else:
        monkeypatch.setattr(ssa_flash, "_why_not_cpu", lambda dtype: "not in this test")
    return request.param


def operands(B=2, H=4, Hkv=2, Q=33, K=33, D=16, Dv=None, dtype=torch.float32, seed=0):
    """q, k, v, the upstream gradient and a scorer with different b and n in every head."""
    g = torch.Generator().manual_seed(seed)
    shapes = (B, H, Q, D), (B, Hkv, K, D), (B, Hkv, K, Dv or D), (B, H, Q, Dv or D)
    scorer = SSA(H, b=1.2, n=2.5)
    with torch.no_grad():
        for raw in scorer.parameters():
            raw += 0.5 * torch.randn(H, generator=g)
    return [torch.randn(shape, generator=g).to(dtype) for shape in shapes], scorer


def results(function, tensors, scorer, **options):
    """Output, and the gradients of q, k, v, raw b and raw n."""
    *inputs, upstream = [x.clone().requires_grad_() for x in tensors]
    scorer.zero_grad()
    out = function(*inputs, scorer, **options)
    out.backward(upstream.detach())
    return [out.detach(), *(x.grad for x in inputs), *(p.grad for p in scorer.parameters() if p.requires_grad)]


def assert_same(actual, expected, tolerance):
    """Largest difference within `tolerance` of the largest value, or of 0.1: a gradient of 0 is a sum that cancels."""
    assert len(actual) == len(expected)
    for name, x, y in zip(("out", "dq", "dk", "dv", "db", "dn"), actual, expected):
        assert x.shape == y.shape and x.dtype == y.dtype, name
        assert x.isfinite().all(), name
        error = (x.double() - y.double()).abs().max() / y.double().abs().max().clamp_min(0.1)
        assert error <= tolerance, f"{name}: {error:.1e}"


def check(shape=(), tolerance=2e-5, path="blockwise", **options):
    tensors, scorer = operands(**dict(shape))
    expected = results(attention, tensors, scorer, **options)
    assert_same(results(attend, tensors, scorer, path=path, **options), expected, tolerance)


SHAPES = [
    dict(Q=1, K=1), dict(Q=33, K=33), dict(Q=129, K=129, D=64), dict(Q=300, K=300, D=128, B=1), dict(Q=65, K=520, D=32),
    dict(Q=1, K=300, Hkv=1), dict(Q=40, K=30), dict(Q=70, K=70, Hkv=4, D=20, Dv=24), dict(Q=64, K=513, H=3, Hkv=1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("causal", (False, True))
def test_equals_plain(kernel, shape, causal):
    check(shape, causal=causal)


@pytest.mark.parametrize("mask_shape", [(300,), (2, 1, 1, 300), (1, 4, 70, 300), (2, 1, 70, 1), (70, 300),
                                        (2, 4, 70, 300)])
@pytest.mark.parametrize("causal", (False, True))
def test_masks_and_empty_rows(kernel, mask_shape, causal):
    mask = torch.rand(mask_shape, generator=torch.Generator().manual_seed(1)) > 0.6
    mask[..., : mask.size(-1) // 2] = False  # with `causal` the first queries see nothing at all
    check(dict(Q=70, K=300), causal=causal, mask=mask)


def test_nothing_to_attend_to(kernel):
    tensors, scorer = operands()
    for x in results(attend, tensors, scorer, path="blockwise", mask=torch.zeros(33, dtype=torch.bool)):
        assert not x.any()  # zeros, and zero gradients, not NaN


def test_masked_keys_may_hold_anything(kernel):
    """Scores of padding are never looked at; that values are multiplied by weight 0 is so in the plain path too."""
    tensors, scorer = operands()
    mask = torch.ones(33, dtype=torch.bool)
    mask[-5:] = False
    before = attend(*tensors[:3], scorer, mask=mask, path="blockwise")
    tensors[1][:, :, -5:] = 1e4
    torch.testing.assert_close(attend(*tensors[:3], scorer, mask=mask, path="blockwise"), before)


@pytest.mark.parametrize("causal", (False, True))
def test_bfloat16(kernel, causal):
    """Against float32 arithmetic on the same bf16 numbers: only results are rounded, to 2^-9 (out enters delta)."""
    tensors, scorer = operands(Q=130, K=130, D=64, dtype=torch.bfloat16)
    expected = results(attention, [x.float() for x in tensors], scorer, causal=causal)
    actual = results(attend, tensors, scorer, causal=causal, path="blockwise")
    assert all(x.dtype == torch.bfloat16 for x in actual[:4])
    assert_same([x.float() for x in actual], expected, 2**-6)


@needs_kernel
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="the bf16 product is MKL's")
@pytest.mark.parametrize("native", (False, True))
def test_both_bfloat16_products(native, monkeypatch):
    """Products of widened operands, and of bf16 itself, which the kernel takes where a CPU is faster with it."""
    monkeypatch.setattr(ssa_cpu, "bfloat16_pays", lambda: native)
    monkeypatch.setattr(ssa_flash, "ssa_blockwise", None)
    tensors, scorer = operands(Q=100, K=300, D=32, Hkv=1, dtype=torch.bfloat16)
    expected = results(attention, [x.float() for x in tensors], scorer, causal=True)
    assert_same([x.float() for x in results(attend, tensors, scorer, causal=True, path="blockwise")], expected, 2**-6)


def test_autocast(kernel):
    tensors, scorer = operands()
    with torch.autocast("cpu", torch.bfloat16):
        actual = results(attend, tensors, scorer, causal=True, path="blockwise")
    assert actual[0].dtype == torch.bfloat16 and actual[1].dtype == torch.float32
    expected = results(attention, tensors, scorer, causal=True)
    assert_same([x.float() for x in actual], expected, 0.02)


def test_strided_operands_and_scale(kernel):
    """As the model makes them: heads cut from one projection, the gradient broadcast."""
    tensors, scorer = operands(H=4, Hkv=4)
    heads = torch.cat(tensors[:3], 1).transpose(1, 2).contiguous().transpose(1, 2)  # (B, 3 H, T, D), stored by T
    q, k, v = heads.split(4, 1)
    grad = torch.ones(1, 1, 1, 1).expand_as(q)
    expected = results(lambda *a: attention(*a, scale=0.7), [*tensors[:3], grad], scorer)
    assert_same(results(lambda *a: attend(*a, scale=0.7, path="blockwise"), [q, k, v, grad], scorer), expected, 2e-5)
    assert attend(q, k, v, scorer, path="blockwise").transpose(1, 2).is_contiguous()  # so that joining heads is no copy


@pytest.mark.parametrize("freeze", ("b", "n", "both"))
def test_frozen_parameters(kernel, freeze):
    tensors, _ = operands()
    scorer = SSA(4, freeze=freeze)
    expected = results(attention, tensors, scorer, causal=True)
    assert_same(results(attend, tensors, scorer, causal=True, path="blockwise"), expected, 2e-5)


@pytest.mark.parametrize("size", (1e-20, 1e-6, 1e3, 1e12, 1e16))
def test_extreme_scores(size):
    """From scores that are all but 0 to b|z| = 1e32, where b|z| + 1 needs care. The kernel hands the wild ones on."""
    tensors, scorer = operands(H=2, Hkv=2, Q=9, K=9)
    tensors[0] *= size
    tensors[1] *= size if size > 1 else 1
    expected = results(attention, [x.double() for x in tensors], scorer)
    actual = results(attend, tensors, scorer, path="blockwise")
    assert_same([x.double() for x in actual], [x.double() for x in expected], 1e-4)


@needs_kernel
def test_kernel_refuses_what_it_cannot_prove():
    (q, k, v, _), scorer = operands(H=2, Hkv=2)
    b, n = scorer.b.detach(), scorer.n.detach()
    assert ssa_cpu.forward(q, k, v, b, n, None, True, 0.25) is not None
    for wild in (q * 1e18, q * float("inf"), q * float("nan")):
        assert ssa_cpu.forward(wild, k, v, b, n, None, True, 0.25) is None
    assert ssa_cpu.forward(q, k, v, b, n * 1000, None, True, 0.25) is None
    out = attend(q * float("nan"), k, v, scorer, path="blockwise")
    assert out.isnan().any()  # NaN goes through, as in the plain path


def test_zero_scores_have_a_slope(kernel):
    """Zero-initialised projections must train: at z = 0 the slope is n b, not 0."""
    tensors, scorer = operands()
    tensors[0].zero_()
    expected = results(attention, tensors, scorer)
    assert expected[1].abs().max() > 0
    assert_same(results(attend, tensors, scorer, path="blockwise")[:4], expected[:4], 2e-5)


def test_gradients_by_differences():
    """The hand-written backward pass in float64 against finite differences, b and n included."""
    tensors, _ = operands(B=1, H=2, Hkv=1, Q=5, K=7, D=3, dtype=torch.float64)
    b, n = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in ([0.8, 1.7], [1.5, 2.2]))
    inputs = [x.requires_grad_() for x in tensors[:3]]
    assert torch.autograd.gradcheck(
        lambda *a: ssa_flash.fused_forward(*a, None, True, 0.6, "blockwise")[0], (*inputs, b, n))


def test_no_second_derivative():
    (q, k, v, _), scorer = operands()
    q.requires_grad_()
    grad, = torch.autograd.grad(attend(q, k, v, scorer, path="blockwise").sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="path='plain'"):
        grad.sum().backward()


def test_operator_contract():
    """Schema, fake kernels and autograd registration, by PyTorch's own checker."""
    (q, k, v, _), scorer = operands(Q=5, K=7)
    mask = torch.rand(2, 1, 1, 7) > 0.3
    inputs = (q.requires_grad_(), k, v, scorer.b.detach(), scorer.n.detach(), mask, True, 0.25, "blockwise")
    torch.library.opcheck(ssa_flash.fused_forward, inputs)


@pytest.mark.parametrize("backend", ("aot_eager", pytest.param("inductor", marks=needs_kernel)))
def test_compiles_without_breaks(backend):
    tensors, scorer = operands()
    expected = results(attention, tensors, scorer, causal=True)
    compiled = torch.compile(lambda q, *rest, **options: attend(q * 1.0, *rest, **options), fullgraph=True,
                             backend=backend)
    assert_same(results(compiled, tensors, scorer, causal=True), expected, 2e-5)


# ------------------------------------------------------------------------------------------------------- the path table

def test_path_table():
    scorer, shape = SSA(4), (2, 4, 128, 32)
    kernel = ssa_cpu.why_not() is None
    assert pick_path("cpu", torch.float32, scorer, shape)[0] == ("blockwise" if kernel else "plain")
    assert pick_path("cpu", torch.float64, scorer, shape)[0] == "plain"
    path, reason = pick_path("cpu", torch.float32, scorer, shape, dropout_p=0.1)
    assert path == "plain" and "dropout" in reason
    assert pick_path("mps", torch.float32, scorer, (2, 4, 1024, 32))[0] == "blockwise"
    assert pick_path("mps", torch.float32, scorer, shape)[0] == "plain"


def test_no_silent_fallback():
    (q, k, v, _), scorer = operands()
    for options in (dict(path="sdpa"), dict(path="triton"), dict(path="blockwise", dropout_p=0.1),
                    dict(path="nonsense")):
        with pytest.raises(ValueError, match="path"):
            attend(q, k, v, scorer, **options)
    assert why_not("blockwise", scorer) is None
    assert "SSA" in why_not("blockwise", torch.nn.Identity())


def run_python(code, **environment):
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300,
                          env={**os.environ, **environment})


def test_without_a_compiler(tmp_path):
    """No compiler, an empty cache: the path says so, and attention works all the same."""
    done = run_python("import torch, ssa_cpu, ssa_flash\n"
                      "from ssa import SSA; s = SSA(2); x = torch.randn(1, 2, 300, 16)\n"
                      "print(ssa_flash.pick_path('cpu', x.dtype, s, x.shape)); print(ssa_cpu.why_not())\n"
                      "torch.testing.assert_close(ssa_flash.attend(x, x, x, s, path='blockwise'),\n"
                      "                           ssa_flash.attend(x, x, x, s, path='plain'))",
                      PATH=str(tmp_path), CXX="no-such-compiler", TORCH_EXTENSIONS_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "('blockwise', 'in PyTorch (no C++ compiler" in done.stdout and not list(tmp_path.iterdir())


@needs_kernel
def test_several_processes_build_at_once(tmp_path):
    code = "import ssa_cpu; print(ssa_cpu.why_not())"
    many = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                             env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}) for _ in range(2)]
    assert [process.communicate(timeout=100)[0].strip() for process in many] == ["None", "None"]
    assert len(list(tmp_path.iterdir())) == 1  # one library, nothing left over


# -------------------------------------------------------------------------------------------------------------- Triton

TRITON = """
import sys
sys.path.insert(0, "tests")
import torch
from test_flash_kernels import check, operands, results, assert_same, attend, attention
for shape, causal, mask in [
        (dict(B=1, H=2, Hkv=1, Q=35, K=35, D=16), True, None),
        (dict(B=1, H=2, Hkv=1, Q=5, K=37, D=20, Dv=24), True, None),
        (dict(B=1, H=1, Hkv=1, Q=1, K=33, D=128), True, None),
        (dict(B=1, H=2, Hkv=2, Q=20, K=7, D=16), True, None),
        (dict(B=2, H=2, Hkv=2, Q=17, K=33, D=16), False, torch.rand(2, 1, 1, 33) > 0.5),
        (dict(B=1, H=2, Hkv=2, Q=17, K=33, D=16), True, torch.rand(1, 2, 17, 33) > 0.9)]:
    check(shape, path="triton", causal=causal, mask=mask)
tensors, scorer = operands(B=1, H=2, Hkv=2, Q=9, K=9)
tensors[0] *= 1e16
tensors[1] *= 1e16
assert_same(results(attend, tensors, scorer, path="triton"), results(attention, tensors, scorer), 1e-4)
tensors, scorer = operands(B=1, H=2, Hkv=2, Q=33, K=33, D=64, dtype=torch.bfloat16)
expected = results(attention, [x.float() for x in tensors], scorer, causal=True)
assert_same([x.float() for x in results(attend, tensors, scorer, causal=True, path="triton")], expected, 2**-6)
print("same")
"""


def test_triton_in_the_interpreter():
    """On a CPU. There bf16 is widened to float32 (the interpreter's product is wrong): native bf16 needs a GPU."""
    require_interpreter()
    done = run_python(TRITON, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().endswith("same")
