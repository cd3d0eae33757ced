"""SSA attention tile by tile in plain PyTorch: memory linear in the sequence length, any device, no compiler.

The scores of all queries against all keys never exist at once. The forward pass walks over tiles, keeps the running
maximum m, the sum l and the output so far, and returns the output and log-sum-exp, lse = m + log l. The backward pass
recomputes each tile's weights from it, P = exp(t - lse):

    z = scale q k^T          t = n sgn(z) log(1 + b|z|)         out = P v
    dP = dout v^T            dt = P (dP - delta)                delta = rowsum(P dP) = rowsum(dout * out)
    dz = dt n b / (1 + b|z|)                                    dn = sum dt t / n        db = sum dz z / b
    dv = P^T dout            dq = scale dz k                    dk = scale dz^T q

These two functions are the pattern: ssa_cpu.py (C++) and ssa_triton.py (CUDA) compute the same with the same arguments.
Arithmetic is float32 (float64 for float64), whatever the operands are: on CPUs without bf16 instructions a bf16 product
takes a hundred times as long, and where a GPU has them the Triton kernel runs instead.
"""

import math

import torch

from ssa import signed_log

ROWS, COLS = 128, 512  # queries and keys in a tile


def forward(q, k, v, b, n, mask, causal, scale):
    """q (B, H, Q, D), k (B, Hkv, K, D), v (B, Hkv, K, Dv), b and n (H,) -> out (B, H, Q, Dv) and lse (B, H, Q).

    mask: None, or boolean of four dimensions, broadcastable to (B, H, Q, K), True = may attend. causal: end-aligned.
    """
    B, H, Q, K, Hkv = *q.shape[:3], k.size(2), k.size(1)
    out, lse = empty_like_heads(q, H, Q, v.size(3)), q.new_empty(B, H, Q, dtype=_wide(q))
    for i0, i1 in _spans(Q, ROWS):
        q_tile = _fold(q, i0, i1, Hkv) * scale
        m = lse.new_full((B, H, i1 - i0, 1), -math.inf)
        l, total = torch.zeros_like(m), lse.new_zeros(B, H, i1 - i0, v.size(3))
        for j0, j1 in _spans(_end(Q, K, i1, causal), COLS):
            z = (q_tile @ _wide_keys(k, j0, j1).mT).view(B, H, i1 - i0, j1 - j0)
            t = _mask_tile(_per_head(n) * signed_log(z, _per_head(b)), Q, K, mask, causal, i0, i1, j0, j1)
            m_new = torch.maximum(m, t.amax(-1, keepdim=True))
            reference = m_new.masked_fill(m_new == -math.inf, 0.0)  # nothing allowed yet: exp(-inf - 0) = 0, not NaN
            p, shrink = torch.exp(t - reference), torch.exp(m - reference)
            product = p.view(B, Hkv, -1, j1 - j0) @ _wide_keys(v, j0, j1)  # (B, Hkv, groups * rows, Dv)
            total = total * shrink + product.view_as(total)
            l, m = l * shrink + p.sum(-1, keepdim=True), m_new
        empty = l == 0
        out[:, :, i0:i1] = total / l.masked_fill(empty, 1.0)
        lse[:, :, i0:i1] = (m + l.log()).masked_fill(empty, 0.0).squeeze(-1)  # an empty row's weights are masked anyway
    return out, lse


def backward(dout, q, k, v, out, lse, b, n, mask, causal, scale):
    """-> dq, dk, dv in the layout and dtype of q, k, v, and db, dn (H,): summed over all scores of a head."""
    B, H, Q, K, Hkv = *q.shape[:3], k.size(2), k.size(1)
    dq = empty_like_heads(q, H, Q, q.size(3))
    dk, dv = (empty_like_heads(x, *x.shape[1:]).to(_wide(x)).zero_() for x in (k, v))  # added up in float32
    db, dn = torch.zeros_like(b), torch.zeros_like(n)
    for i0, i1 in _spans(Q, ROWS):
        rows = i1 - i0
        q_tile, dout_tile = _fold(q, i0, i1, Hkv) * scale, _fold(dout, i0, i1, Hkv)  # (B, Hkv, groups * rows, D)
        delta = (dout_tile * _fold(out, i0, i1, Hkv)).sum(-1).view(B, H, rows, 1)
        dq_tile = torch.zeros_like(q_tile)
        for j0, j1 in _spans(_end(Q, K, i1, causal), COLS):
            k_tile, v_tile = _wide_keys(k, j0, j1), _wide_keys(v, j0, j1)
            z = (q_tile @ k_tile.mT).view(B, H, rows, j1 - j0)
            log = signed_log(z, _per_head(b))
            t = _mask_tile(_per_head(n) * log, Q, K, mask, causal, i0, i1, j0, j1)
            p = torch.exp(t - lse[:, :, i0:i1, None])
            dt = p * ((dout_tile @ v_tile.mT).view_as(z) - delta)
            dz = dt * _per_head(n) / (1 / _per_head(b) + z.abs())  # n b / (1 + b|z|), where b|z| might overflow
            dn += (dt * log).sum((0, 2, 3))
            db += (dz * z).sum((0, 2, 3)) / b
            p, dz = p.view(B, Hkv, -1, j1 - j0), dz.view(B, Hkv, -1, j1 - j0)  # (B, Hkv, groups * rows, cols)
            dv[:, :, j0:j1] += p.mT @ dout_tile
            dk[:, :, j0:j1] += dz.mT @ q_tile
            dq_tile += dz @ k_tile
        dq[:, :, i0:i1] = dq_tile.view(B, H, rows, -1) * scale
    return dq, dk.to(k.dtype), dv.to(v.dtype), db, dn


def empty_like_heads(like, heads, length, width):
    """(B, heads, length, width) stored as (B, length, heads, width), which the model then joins without a copy."""
    return like.new_empty(like.size(0), length, heads, width).transpose(1, 2)


def _spans(stop, step):
    return [(start, min(start + step, stop)) for start in range(0, stop, step)]


def _end(Q, K, i1, causal):
    """How many keys the queries before i1 see; the last query sees the last key."""
    return max(K - Q + i1, 0) if causal else K


def _wide(x):
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _wide_keys(x, j0, j1):
    return x[:, :, j0:j1].to(_wide(x))


def _fold(x, i0, i1, Hkv):
    """Queries i0..i1 of all heads that share a key/value head, one below the other: (B, Hkv, groups * rows, D)."""
    return x[:, :, i0:i1].to(_wide(x)).reshape(x.size(0), Hkv, -1, x.size(3))


def _per_head(x):
    return x.view(-1, 1, 1)  # (H,) -> (H, 1, 1)


def _mask_tile(t, Q, K, mask, causal, i0, i1, j0, j1):
    """t (B, H, rows, cols) with -inf wherever a query may not attend."""
    if causal and j1 > K - Q + i0 + 1:  # the tile reaches over the diagonal
        past = torch.ones(i1 - i0, j1 - j0, dtype=torch.bool, device=t.device).tril(K - Q + i0 - j0)
        t = t.masked_fill(~past, -math.inf)
    if mask is not None:
        rows = slice(i0, i1) if mask.size(2) > 1 else slice(None)
        cols = slice(j0, j1) if mask.size(3) > 1 else slice(None)
        t = t.masked_fill(~mask[:, :, rows, cols], -math.inf)
    return t
