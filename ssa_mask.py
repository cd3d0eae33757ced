"""Attention with the masks of other people's models: boolean, or floats that mean "masked" or are added to the score.

PyTorch and Hugging Face transformers also mask with floats. Softmax does not care what a float is for: it adds all of them,
and -inf makes a weight 0. SSA cares, because -inf inside the power gives 0 * inf in the gradients of b and n, and because
SSA of a large negative score is small, not 0. So a float mask is taken apart into who may attend and what is added:

    -inf, or the least finite number of the dtype    masked: weight exactly 0
    any other value                                  a bias, added to the score z before the transform

A mask of -10000 or -1e9 is such a bias: softmax gives it weight 0, SSA gives it (b 1e4)^-n. Use booleans or -inf.
"""

import torch
from torch import Tensor

from ssa import Scorer, attention
from ssa_flash import attend


def ssa_split_mask(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """A float mask of any shape -> (allowed, bias) of that shape: boolean, True = may attend; bias None if it is all 0.

    Raises TypeError for a mask of integers, which says neither.
    """
    if not mask.is_floating_point():
        raise TypeError(f"the mask has dtype {mask.dtype}; it must be boolean, or floats to add to the scores")
    # A mask made in bfloat16 and cast to float32 carries bfloat16's minimum, which is not quite float32's.
    least = max(torch.finfo(mask.dtype).min, torch.finfo(torch.bfloat16).min)
    allowed = mask > least
    bias = mask.masked_fill(~allowed, 0.0)
    # Without a bias the fast paths can run. A trained bias must stay, also while it is 0; torch.compile cannot look inside.
    if not mask.requires_grad and not torch.compiler.is_compiling() and not bias.any():
        bias = None
    return allowed, bias


class _Biased:
    """A scorer that adds a bias, broadcastable to (B, H, Q, K), to the scores first."""

    needs_qk = False

    def __init__(self, scorer, bias):
        if scorer.needs_qk:
            raise ValueError(f"{type(scorer).__name__} forms no scores, so a float mask has nothing to be added to; "
                             "use a boolean mask")
        self.scorer, self.bias, self.n_head = scorer, bias, scorer.n_head

    def __call__(self, scores, mask=None):
        wide = scores if scores.dtype == torch.float64 else scores.float()
        return self.scorer(wide + self.bias, mask)


def ssa_attend(q: Tensor, k: Tensor, v: Tensor, scorer: Scorer, *, mask: Tensor | None = None, bias: Tensor | None = None,
               causal: bool = False, scale: float | None = None, dropout_p: float = 0.0,
               need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
    """`ssa_flash.attend` with a bias on the scores, and with the weights where they are wanted.

    q (B, H, Q, D), k (B, Hkv, K, D), v (B, Hkv, K, Dv) -> out (B, H, Q, Dv) and the weights (B, H, Q, K) before dropout, or
    None. bias: broadcastable to (B, H, Q, K), added to scale q . k. A bias or the weights need the plain path; the rest, and
    every other argument and error, is as in `ssa.attention`.
    """
    if bias is None and not need_weights:
        return attend(q, k, v, scorer, causal=causal, mask=mask, scale=scale, dropout_p=dropout_p), None
    if bias is not None:
        scorer = _Biased(scorer, bias)
    out, weights = attention(q, k, v, scorer, causal=causal, mask=mask, scale=scale, dropout_p=dropout_p, return_weights=True)
    return out, weights if need_weights else None
