"""SSA attention on CUDA: one Triton kernel forward, two backward, memory linear in the sequence length.

The mathematics is that of ssa_blockwise.py, whose two functions these replace, in base 2 because GPUs compute 2^x and
log2 x in hardware:

    z = scale q k^T,   s = sgn(z) log2(1 + b|z|),   t = n s,   P = 2^(t - lse / log 2),   out = P v
    dt = P (dout v^T - delta),   dz = dt n b / (1 + b|z|),   delta = rowsum(dout * out)
    dq = scale dz k,   dk = scale dz^T q,   dv = P^T dout,   dn = log 2 sum dt s,   db = sum dz z / b

The forward kernel gives a program BLOCK_M queries, which walk over all keys they may see with a running maximum.
Backward needs sums over keys (dq) and sums over queries (dk, dv): two kernels, each of which recomputes z, so that no
program ever adds to another's result. b and n are numbers of a head, so their gradients are sums over a head's scores:
the dq kernel writes one sum a query, and PyTorch adds those up. No atomics, hence the same bits every time.

TRITON_INTERPRET=1 (set before the import) runs all this on a CPU, slowly, for the tests. The interpreter's bf16 product
is wrong, so there bf16 is widened first: what bf16 tensor cores make of it only a GPU can show.
"""

import os

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from ssa_blockwise import empty_like_heads

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


def tuned(*tiles):
    """Try these (BLOCK_M, BLOCK_N, warps, stages) on first use, keep the fastest; the interpreter takes a small one."""
    configs = [triton.Config({"BLOCK_M": m, "BLOCK_N": n}, num_warps=w, num_stages=s) for m, n, w, s in tiles]
    if INTERPRETED:
        configs = [triton.Config({"BLOCK_M": 16, "BLOCK_N": 32})]
    return triton.autotune(configs, key=["Q", "D", "DV", "CAUSAL"])


# ------------------------------------------------------------------------------------------------ pieces of the kernels

@triton.jit
def of_head(pointer, strides, batch, head):
    """Where a tensor (B, H, ...) keeps this head; strides: of every dimension but the last, or of all for a mask."""
    return pointer + batch.to(tl.int64) * strides[0] + tl.cast(head, tl.int64) * strides[1]


@triton.jit
def load_rows(pointer, strides, rows, count, width, WIDTH: tl.constexpr):
    """`rows` of a (count, width) matrix -> (len(rows), WIDTH), zeros beyond the matrix."""
    cols = tl.arange(0, WIDTH)
    inside = (rows[:, None] < count) & (cols[None, :] < width)
    x = tl.load(pointer + rows[:, None].to(tl.int64) * strides[2] + cols[None, :], mask=inside, other=0.0)
    return x.to(tl.float32) if INTERPRETED else x


@triton.jit
def store_rows(pointer, strides, x, rows, count, width, WIDTH: tl.constexpr):
    cols = tl.arange(0, WIDTH)
    inside = (rows[:, None] < count) & (cols[None, :] < width)
    at = pointer + rows[:, None].to(tl.int64) * strides[2] + cols[None, :]
    tl.store(at, x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def product(a, b):
    return tl.dot(a, b, input_precision="ieee")  # float32 operands are not rounded to TF32


@triton.jit
def log2(x):
    """The hardware's, absolute error 2^-22; tl.log2 is a polynomial in software, which costs several times as much. So of a
    b|z| of 1e-4 or less few digits are left: too little to see in the weights, only in dn, to which it adds next to nothing."""
    return tl.log2(x) if INTERPRETED else libdevice.fast_log2f(x)


@triton.jit
def signed_log2(z, b):
    """sgn(z) log2(1 + b|z|). Where b|z| would overflow, the 1 is far below rounding, and log2 b + log2|z| is exact."""
    size = tl.abs(z)
    far = b * size > 1e30
    log = log2(tl.where(far, size, 1.0 + b * size)) + tl.where(far, log2(b), 0.0)
    return tl.where(z < 0, -log, log)


@triton.jit
def may_attend(rows, cols, Q, K, mask, mask_s, CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    """(rows, cols): which query may attend to which key. With CAUSAL the last query sees the last key."""
    allowed = (rows[:, None] < Q) & (cols[None, :] < K)
    if CAUSAL:
        allowed = allowed & (cols[None, :] <= rows[:, None] + (K - Q))
    if MASKED:
        at = mask + rows[:, None].to(tl.int64) * mask_s[2] + cols[None, :].to(tl.int64) * mask_s[3]
        allowed = allowed & (tl.load(at, mask=allowed, other=0) != 0)
    return allowed


@triton.jit
def backward_tile(q, k, v, dout, lse, delta, b, n, scale, allowed):
    """P, dz, dz z and dt s of a tile, from rows of q and dout with their lse and delta, and keys k with v."""
    z = product(q, tl.trans(k)) * scale
    s = signed_log2(z, b)
    p = tl.where(allowed, tl.exp2(n * s - lse[:, None] * LOG2E), 0.0)
    dt = p * (product(dout, tl.trans(v)) - delta[:, None])
    dz = dt * (n / (1.0 / b + tl.abs(z)))  # n b / (1 + b|z|), where b|z| might overflow
    return p, dz, dz * z, dt * s


# ---------------------------------------------------------------------------------------------------------- the kernels
# A name ending in _s is a tuple of strides; the last dimension's is 1, except in a mask, where it is named too.

@tuned((128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (64, 32, 4, 3))
@triton.jit
def forward_kernel(q, k, v, out, lse, b, n, mask, q_s, k_s, v_s, out_s, mask_s, scale, H, Hkv, Q, K, D, DV,
                   CAUSAL: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
                   WIDTH_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    kv_head = head // (H // Hkv)
    k, v, mask = of_head(k, k_s, batch, kv_head), of_head(v, v_s, batch, kv_head), of_head(mask, mask_s, batch, head)
    b, n = tl.load(b + head), tl.load(n + head)
    first = tl.program_id(0) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    q_tile = load_rows(of_head(q, q_s, batch, head), q_s, rows, Q, D, WIDTH)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, WIDTH_V), tl.float32)
    end = tl.minimum(K, tl.maximum(0, first + BLOCK_M + K - Q)) if CAUSAL else K
    for j in range(0, end, BLOCK_N):
        cols = j + tl.arange(0, BLOCK_N)
        k_tile = load_rows(k, k_s, cols, K, D, WIDTH)
        v_tile = load_rows(v, v_s, cols, K, DV, WIDTH_V)
        allowed = may_attend(rows, cols, Q, K, mask, mask_s, CAUSAL, MASKED)
        t = n * signed_log2(product(q_tile, tl.trans(k_tile)) * scale, b)
        t = tl.where(allowed, t, float("-inf"))
        m_new = tl.maximum(m, tl.max(t, 1))
        reference = tl.where(m_new == float("-inf"), 0.0, m_new)  # nothing allowed yet: 2^(-inf - 0) = 0, not NaN
        p, shrink = tl.exp2(t - reference[:, None]), tl.exp2(m - reference)
        l, m = l * shrink + tl.sum(p, 1), m_new
        total = total * shrink[:, None] + product(p.to(v_tile.dtype), v_tile)
    l = tl.where(l == 0, 1.0, l)  # a row that sees nothing is all 0
    store_rows(of_head(out, out_s, batch, head), out_s, total / l[:, None], rows, Q, DV, WIDTH_V)
    row_lse = tl.where(m == float("-inf"), 0.0, m + log2(l)) * LN2
    tl.store(lse + tl.program_id(1).to(tl.int64) * Q + rows, row_lse, mask=rows < Q)


@tuned((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 4, 3))
@triton.jit
def dq_kernel(q, k, v, dout, lse, delta, dq, b, n, db, dn, mask, q_s, k_s, v_s, dout_s, dq_s, mask_s, scale,
              H, Hkv, Q, K, D, DV, CAUSAL: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
              WIDTH_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    batch, head = tl.program_id(1) // H, tl.program_id(1) % H
    kv_head = head // (H // Hkv)
    k, v, mask = of_head(k, k_s, batch, kv_head), of_head(v, v_s, batch, kv_head), of_head(mask, mask_s, batch, head)
    b, n = tl.load(b + head), tl.load(n + head)
    first = tl.program_id(0) * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    q_tile = load_rows(of_head(q, q_s, batch, head), q_s, rows, Q, D, WIDTH)
    dout_tile = load_rows(of_head(dout, dout_s, batch, head), dout_s, rows, Q, DV, WIDTH_V)
    at = tl.program_id(1).to(tl.int64) * Q + rows
    row_lse, row_delta = tl.load(lse + at, mask=rows < Q, other=0.0), tl.load(delta + at, mask=rows < Q, other=0.0)
    total = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    row_db, row_dn = tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    end = tl.minimum(K, tl.maximum(0, first + BLOCK_M + K - Q)) if CAUSAL else K
    for j in range(0, end, BLOCK_N):
        cols = j + tl.arange(0, BLOCK_N)
        k_tile = load_rows(k, k_s, cols, K, D, WIDTH)
        v_tile = load_rows(v, v_s, cols, K, DV, WIDTH_V)
        allowed = may_attend(rows, cols, Q, K, mask, mask_s, CAUSAL, MASKED)
        _, dz, dzz, dts = backward_tile(q_tile, k_tile, v_tile, dout_tile, row_lse, row_delta, b, n, scale, allowed)
        total += product(dz.to(k_tile.dtype), k_tile)
        row_db += tl.sum(dzz, 1)
        row_dn += tl.sum(dts, 1)
    store_rows(of_head(dq, dq_s, batch, head), dq_s, total * scale, rows, Q, D, WIDTH)
    tl.store(db + at, row_db / b, mask=rows < Q)
    tl.store(dn + at, row_dn * LN2, mask=rows < Q)


@tuned((64, 128, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (32, 64, 4, 3))
@triton.jit
def dkv_kernel(q, k, v, dout, lse, delta, dk, dv, b, n, mask, q_s, k_s, v_s, dout_s, dk_s, dv_s, mask_s, scale,
               H, Hkv, Q, K, D, DV, CAUSAL: tl.constexpr, MASKED: tl.constexpr, WIDTH: tl.constexpr,
               WIDTH_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    batch, kv_head = tl.program_id(1) // Hkv, tl.program_id(1) % Hkv
    first = tl.program_id(0) * BLOCK_N
    cols = first + tl.arange(0, BLOCK_N)
    k_tile = load_rows(of_head(k, k_s, batch, kv_head), k_s, cols, K, D, WIDTH)
    v_tile = load_rows(of_head(v, v_s, batch, kv_head), v_s, cols, K, DV, WIDTH_V)
    total_k, total_v = tl.zeros((BLOCK_N, WIDTH), tl.float32), tl.zeros((BLOCK_N, WIDTH_V), tl.float32)
    start = tl.maximum(0, first - (K - Q)) // BLOCK_M * BLOCK_M if CAUSAL else 0  # the first query to see `first`
    for head in range(kv_head * (H // Hkv), (kv_head + 1) * (H // Hkv)):  # all query heads that share these keys
        q_head, dout_head = of_head(q, q_s, batch, head), of_head(dout, dout_s, batch, head)
        mask_head = of_head(mask, mask_s, batch, head)
        head_b, head_n = tl.load(b + head), tl.load(n + head)
        for i in range(start, Q, BLOCK_M):
            rows = i + tl.arange(0, BLOCK_M)
            q_tile = load_rows(q_head, q_s, rows, Q, D, WIDTH)
            dout_tile = load_rows(dout_head, dout_s, rows, Q, DV, WIDTH_V)
            at = (batch.to(tl.int64) * H + head) * Q + rows
            row_lse = tl.load(lse + at, mask=rows < Q, other=0.0)
            row_delta = tl.load(delta + at, mask=rows < Q, other=0.0)
            allowed = may_attend(rows, cols, Q, K, mask_head, mask_s, CAUSAL, MASKED)
            p, dz, _, _ = backward_tile(q_tile, k_tile, v_tile, dout_tile, row_lse, row_delta, head_b, head_n, scale,
                                        allowed)
            total_v += product(tl.trans(p.to(dout_tile.dtype)), dout_tile)
            total_k += product(tl.trans(dz.to(q_tile.dtype)), q_tile)
    store_rows(of_head(dk, dk_s, batch, kv_head), dk_s, total_k * scale, cols, K, D, WIDTH)
    store_rows(of_head(dv, dv_s, batch, kv_head), dv_s, total_v, cols, K, DV, WIDTH_V)


# ----------------------------------------------------------------------------------------------------- what Python sees

def forward(q, k, v, b, n, mask, causal, scale):
    """As ssa_blockwise.forward, for float32 and half precision."""
    if q.dtype == torch.float64:
        raise ValueError("path 'triton': its arithmetic is float32, so float64 operands need the path plain or blockwise")
    out = empty_like_heads(v, q.size(1), q.size(2), v.size(3))
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    q, k, v = map(_rows_contiguous, (q, k, v))
    sizes, options = _arguments(q, k, v, mask, causal, scale)
    mask, mask_s = _mask(mask, q, k)
    _launch(forward_kernel, q.size(2), "BLOCK_M", q.size(0) * q.size(1),
            q, k, v, out, lse, b, n, mask, *_strides(q, k, v, out), mask_s, *sizes, **options)
    return out, lse


def backward(dout, q, k, v, out, lse, b, n, mask, causal, scale):
    """As ssa_blockwise.backward."""
    dq, dk, dv = (empty_like_heads(x, *x.shape[1:]) for x in (q, k, v))
    q, k, v, dout = map(_rows_contiguous, (q, k, v, dout))
    delta = (dout.float() * out.float()).sum(-1)  # (B, H, Q)
    sizes, options = _arguments(q, k, v, mask, causal, scale)
    mask, mask_s = _mask(mask, q, k)
    B, H, Q, _ = q.shape
    db, dn = torch.empty_like(delta), torch.empty_like(delta)  # every query's share
    _launch(dq_kernel, Q, "BLOCK_M", B * H, q, k, v, dout, lse, delta, dq, b, n, db, dn, mask,
            *_strides(q, k, v, dout, dq), mask_s, *sizes, **options)
    _launch(dkv_kernel, k.size(2), "BLOCK_N", B * k.size(1), q, k, v, dout, lse, delta, dk, dv, b, n, mask,
            *_strides(q, k, v, dout, dk, dv), mask_s, *sizes, **options)
    return dq, dk, dv, db.sum((0, 2)), dn.sum((0, 2))


def _launch(kernel, length, block, heads, *arguments, **options):
    kernel[lambda meta: (triton.cdiv(length, meta[block]), heads)](*arguments, **options)


def _arguments(q, k, v, mask, causal, scale):
    (_, H, Q, D), (_, Hkv, K, DV) = q.shape, v.shape
    options = dict(CAUSAL=causal, MASKED=mask is not None,
                   WIDTH=max(16, triton.next_power_of_2(D)), WIDTH_V=max(16, triton.next_power_of_2(DV)))
    return (scale, H, Hkv, Q, K, D, DV), options


def _mask(mask, q, k):
    """A pointer and four strides; without a mask any pointer does, it is never read."""
    if mask is None:
        return q, (0, 0, 0, 0)
    return mask, mask.expand(*q.shape[:3], k.size(2)).stride()


def _rows_contiguous(x):
    return x if x.stride(3) == 1 else x.contiguous()


def _strides(*tensors):
    return [x.stride()[:3] for x in tensors]
