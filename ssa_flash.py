"""Attention with a scorer, fast: the path table, and one function that every model calls.

    path     scorers                 how
    plain    all                     ssa.attention: the reference, K scores a query in memory, any device, any dropout
    sdpa     softmax, temperature    PyTorch's fused scaled_dot_product_attention (temperature: q / tau before it)

`pick_path` chooses and says why; `attend` runs. Every path gives what `plain` gives, output and all gradients, and there
is no path that skips the scorer: a path that cannot run a scorer is refused with the reason, never replaced.
"""

import torch
import torch.nn.functional as F

from ssa import Softmax, Temperature, attention, check_shapes, end_aligned

PATHS = ("plain", "sdpa")
FUSED = (Softmax, Temperature)  # exactly these, no subclass that may compute something else


def why_not(path, scorer):
    """None if `path` can run `scorer`, else the reason, in a few words."""
    if path not in PATHS:
        return f"there is no path {path!r}; choose auto or one of {', '.join(PATHS)}"
    if path == "sdpa" and type(scorer) not in FUSED:
        return f"the fused kernel of PyTorch computes softmax, not {type(scorer).__name__}"
    return None


def pick_path(device, dtype, scorer, shape, dropout_p=0.0):
    """(path, reason): the fastest path for this scorer, on this device and dtype, at this shape (B, H, T, D)."""
    if type(scorer) in FUSED:
        return "sdpa", f"{type(scorer).__name__} is what PyTorch's fused kernel computes"
    if dropout_p > 0:
        return "plain", f"attention dropout of {dropout_p} falls on the weights, which only this path keeps"
    return "plain", f"the only path for {type(scorer).__name__}"


def attend(q, k, v, scorer, *, causal=False, mask=None, scale=None, dropout_p=0.0, path="auto"):
    """Attention with any scorer along the path named, or the fastest: arguments, shapes and result as `ssa.attention`.

    Raises ValueError where the path cannot run the scorer, and says why.
    """
    if path == "auto":
        path, _ = pick_path(q.device, q.dtype, scorer, (*q.shape[:2], k.size(2), q.size(3)), dropout_p)
    reason = why_not(path, scorer)
    if reason:
        raise ValueError(f"path {path!r}: {reason}")
    if path == "sdpa":
        return _sdpa(q, k, v, scorer, causal, mask, scale, dropout_p)
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
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
                                          enable_gqa=q.size(1) != k.size(1))
