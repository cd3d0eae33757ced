"""Attention with a scorer, fast: the path table, and one function that every model calls.

    path       scorers               how
    plain      all                   ssa.attention: the reference, K scores a query in memory, any device, any dropout
    sdpa       softmax, temperature  PyTorch's fused scaled_dot_product_attention (temperature: q / tau before it)
    blockwise  ssa                   tile by tile, memory linear in T, any device: C++ (ssa_cpu.cpp) on a CPU that has a
                                     compiler; else, and for extreme scores, PyTorch (ssa_blockwise.py)
    triton     ssa                   tile by tile in CUDA kernels (ssa_triton.py)

`pick_path` chooses and says why; `attend` runs. Every path gives what `plain` gives, output and all gradients, and no
path skips the scorer: a path that cannot run a scorer is refused with the reason, never replaced.
"""

import importlib.util
import os
from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

import ssa_blockwise
import ssa_cpu
from ssa import SSA, Softmax, Temperature, attention, check_shapes, end_aligned
from ssa_blockwise import empty_like_heads

PATHS = ("plain", "sdpa", "blockwise", "triton")
FUSED = (Softmax, Temperature)  # exactly these, no subclass that may compute something else
LONG = 256  # keys from which on tiles in PyTorch were measured faster than plain (2 CPU cores: 1.4x, at 4096 keys 7x)
WIDEST = 128  # head width up to which a tile of the Triton kernels fits into a GPU's shared memory


def why_not(path, scorer, device=None, dropout_p=0.0):
    """None if `path` can run `scorer` (on this device, with this dropout), else the reason, in a few words."""
    if path not in PATHS:
        return f"there is no path {path!r}; choose auto or one of {', '.join(PATHS)}"
    if path == "sdpa" and type(scorer) not in FUSED:
        return f"the fused kernel of PyTorch computes softmax, not {type(scorer).__name__}"
    if path in ("blockwise", "triton"):
        if type(scorer) is not SSA:
            return f"it computes SSA, not {type(scorer).__name__}"
        if dropout_p > 0:
            return f"attention dropout of {dropout_p} falls on the weights, which only the path plain keeps"
    if path == "triton" and device is not None:
        return _why_not_triton(torch.device(device).type)
    return None


def pick_path(device, dtype, scorer, shape, dropout_p=0.0):
    """(path, reason): the fastest path for this scorer, on this device and dtype, at this shape (B, H, T, D)."""
    if type(scorer) in FUSED:
        return "sdpa", f"{type(scorer).__name__} is what PyTorch's fused kernel computes"
    if type(scorer) is not SSA:
        return "plain", f"the only path for {type(scorer).__name__}"
    if dropout_p > 0:
        return "plain", f"attention dropout of {dropout_p} falls on the weights, which only this path keeps"
    if dtype == torch.float64:
        return "plain", "float64 is for checking, and this path is what is checked against"
    device = torch.device(device).type
    if device == "cuda" and _why_not_triton(device) is None and shape[3] <= WIDEST:
        return "triton", "the fused kernel for SSA on CUDA"
    if device == "cpu" and _why_not_cpu(dtype) is None:
        return "blockwise", "the compiled CPU kernel, faster than the plain path at every length"
    reason = _why_not_cpu(dtype) if device == "cpu" else _why_not_triton(device) or f"no kernel for D={shape[3]}"
    if shape[2] >= LONG:
        return "blockwise", f"in PyTorch ({reason}), which from {LONG} keys on is faster than the plain path"
    return "plain", f"{reason}, and there are fewer than {LONG} keys"


def _why_not_cpu(dtype):
    if dtype not in (torch.float32, torch.bfloat16):
        return f"the CPU kernel has no {dtype}"
    return _kernel_reason()


@torch.compiler.assume_constant_result  # torch.compile takes the answer and does not look at how a compiler is found
def _kernel_reason():
    return ssa_cpu.why_not()


def _why_not_triton(device):
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # then it runs on a CPU, for tests
    return None if interpreted or device == "cuda" else f"its kernels need CUDA, not {device}"


def attend(q, k, v, scorer, *, causal=False, mask=None, scale=None, dropout_p=0.0, path="auto"):
    """Attention with any scorer along the path named, or the fastest: arguments, shapes and result as `ssa.attention`.

    Raises ValueError where the path cannot run the scorer, and says why.
    """
    if path == "auto":
        path, _ = pick_path(q.device, q.dtype, scorer, (*q.shape[:2], k.size(2), q.size(3)), dropout_p)
    reason = why_not(path, scorer, q.device, dropout_p)
    if reason:
        raise ValueError(f"path {path!r}: {reason}")
    if path == "sdpa":
        return _sdpa(q, k, v, scorer, causal, mask, scale, dropout_p)
    if path in ("blockwise", "triton"):
        return _fused(q, k, v, scorer, causal, mask, scale, path)
    return attention(q, k, v, scorer, causal=causal, mask=mask, scale=scale, dropout_p=dropout_p)


def _sdpa(q, k, v, scorer, causal, mask, scale, dropout_p):
    """Softmax through PyTorch's fused kernel; a temperature is folded into q."""
    check_shapes(q, k, v, scorer, mask)
    if isinstance(scorer, Temperature):
        q = (q / scorer.tau.view(-1, 1, 1)).to(q.dtype)  # (B, H, Q, D) / (H, 1, 1)
    Q, K = q.size(2), k.size(2)
    if causal and Q == 1:
        causal = False  # one query at the end may see every key: a decoding step needs no causal mask
    is_causal = causal and mask is None and Q == K
    if causal and not is_causal:  # is_causal aligns the diagonal to the first key; a cache needs it at the last
        mask = end_aligned(Q, K, mask, q.device)
    if mask is not None:
        mask = torch.atleast_2d(mask)  # the kernel takes no mask of fewer dimensions
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal,
                                          scale=scale, enable_gqa=q.size(1) != k.size(1))


# ------------------------------------------------------------------------------------------------------- fused SSA

def _fused(q, k, v, scorer, causal, mask, scale, path):
    """SSA through a kernel that never holds all scores: brings the operands into the one form that the kernels take."""
    check_shapes(q, k, v, scorer, mask)
    result = v.dtype
    if torch.is_autocast_enabled(q.device.type):  # autocast does not know our operator, so it is done here
        result = common = torch.get_autocast_dtype(q.device.type)
    else:
        common = torch.promote_types(q.dtype, v.dtype)
    q, k, v = q.to(common), k.to(common), v.to(common)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]  # (..., K) -> four dimensions
        mask.expand(*q.shape[:3], k.size(2))  # raises where it does not broadcast
    scale = q.size(-1) ** -0.5 if scale is None else scale
    out, _ = fused_forward(q, k, v, scorer.b, scorer.n, mask, causal, scale, path)
    return out.to(result)


def _run(direction, path, like, *operands):
    """`forward` or `backward` along the path; ssa_blockwise.py describes what goes in and comes out."""
    if path == "triton":
        import ssa_triton  # only here, because triton is not installed everywhere
        return getattr(ssa_triton, direction)(*operands)
    result = None
    if like.device.type == "cpu" and _why_not_cpu(like.dtype) is None:
        result = getattr(ssa_cpu, direction)(*operands)  # None where the scores are too extreme for it
    return getattr(ssa_blockwise, direction)(*operands) if result is None else result


# torch.compile sees one opaque operator a direction, so the model around it compiles without a break.
@torch.library.custom_op("ssa::fused_forward", mutates_args=())
def fused_forward(q: Tensor, k: Tensor, v: Tensor, b: Tensor, n: Tensor, mask: Optional[Tensor], causal: bool,
                  scale: float, path: str) -> Tuple[Tensor, Tensor]:
    return _run("forward", path, q, q, k, v, b, n, mask, causal, scale)


@fused_forward.register_fake
def _(q, k, v, b, n, mask, causal, scale, path):
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return empty_like_heads(v, q.size(1), q.size(2), v.size(3)), q.new_empty(q.shape[:3], dtype=wide)


@torch.library.custom_op("ssa::fused_backward", mutates_args=())
def fused_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, b: Tensor, n: Tensor,
                   mask: Optional[Tensor], causal: bool, scale: float,
                   path: str) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _run("backward", path, q, dout, q, k, v, out, lse, b, n, mask, causal, scale)


@fused_backward.register_fake
def _(dout, q, k, v, out, lse, b, n, mask, causal, scale, path):
    return *(empty_like_heads(x, *x.shape[1:]) for x in (q, k, v)), torch.empty_like(b), torch.empty_like(n)


def _save(ctx, inputs, output):
    q, k, v, b, n, mask, ctx.causal, ctx.scale, ctx.path = inputs
    ctx.save_for_backward(q, k, v, *output, b, n, mask)


def _grad(ctx, dout, _):
    grads = fused_backward(dout, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.path)
    return *grads, None, None, None, None


def _no_second_grad(ctx, *_):
    raise NotImplementedError("the fused SSA kernels have no second derivative; use path='plain'")


fused_forward.register_autograd(_grad, setup_context=_save)
fused_backward.register_autograd(_no_second_grad)
