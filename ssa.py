"""Scaled Signed Averaging, the scorers it is compared with, and attention with any of them: plain and complete.

A scorer turns one query's scores against every key into weights. The paper (Naim, Bhar, Bolte, Asher, ACL 2026,
arXiv 2508.14685) replaces softmax's exponential by a signed power, with two trained scalars a head:

    w_j = (1 + b |z_j|)^(sgn(z_j) n),      weight_j = w_j / sum_k w_k,      b > 0,  n >= 1                       (SSA)

    in the code     in the paper    meaning
    scores, z       z               z_j = q . k_j / sqrt(D), one score a key
    b               b               scale: how soon a score counts as large; the slope of t at 0 is n b
    n               n               power: large positive scores grow like z^n, large negative ones fade like z^-n
    t               -               the signed log, t = n sgn(z) log(1 + b|z|); SSA(z) = softmax(t)
    weights, P      softmax(z)      what the values are averaged with; a row sums to 1
    tau             tau             temperature of softmax(z / tau)
    B, H, Hkv       -               batch, query heads, key/value heads (H is a multiple of Hkv)
    Q, K, D         -               queries, keys, width of a head

This file needs torch alone. It is the reference that every faster path (ssa_flash.py) is tested against.
Not here: fused kernels, dropout on anything but the weights, positions (model.py rotates q and k before they arrive).
"""

import inspect
import math
import numbers

import torch
import torch.nn as nn
import torch.nn.functional as F

FAR = 1e30  # beyond b|z| = 1e30 the 1 in 1 + b|z| is far below rounding, so log b + log|z| is exact
TINY = 1e-30  # below this a denominator counts as 0


# ---------------------------------------------------------------------------------------------------------- SSA itself

def signed_log(z, b):
    """sgn(z) log(1 + b|z|) for z (..., H, Q, K) and b broadcastable: value and gradients finite for all finite z.

    Two traps that the obvious `z.sign() * torch.log1p(b * z.abs())` falls into:
    - at z = 0 it has gradient 0, since sign and abs both say 0 there; the truth is b. (Zero-initialised projections make
      every score 0: they would never train.) Choosing z or -z by comparison keeps the slope.
    - b|z| overflows for the largest scores. There log(1 + b|z|) = log b + log|z| to the last bit.
    """
    magnitude = torch.where(z < 0, -z, z)
    far = b * magnitude > FAR  # true also where the product is inf
    near_log = torch.log1p(b * magnitude.masked_fill(far, 0.0))
    far_log = torch.log(b) + torch.log(magnitude.masked_fill(~far, 1.0))
    log = torch.where(far, far_log, near_log)
    return torch.where(z < 0, -log, log)


def ssa(scores, b, n, mask=None):
    """Scaled Signed Averaging: scores (..., H, Q, K) -> weights of the same shape, float32 (float64 for float64).

    b and n: numbers, or tensors of shape (H,), one a head. mask: boolean, broadcastable to scores, True = may attend.
    As the paper writes it, for one row z:

        power = (1 + b * z.abs()) ** (z.sign() * n)
        weights = power / power.sum()

    Because (1 + b|z|)^(sgn(z) n) = exp(n sgn(z) log(1 + b|z|)), that is softmax of the signed log, which cannot overflow
    and which any softmax kernel can compute. The mask falls on t, never on z: -inf inside the power would give 0 * inf in
    the gradients of b and n. Raises ValueError for a number b <= 0 or n < 1, and for what is neither number nor tensor.
    """
    if not isinstance(b, torch.Tensor):
        check_number("b", b, "greater than 0", lambda b: b > 0)
    if not isinstance(n, torch.Tensor):
        check_number("n", n, "at least 1", lambda n: n >= 1)
    z = _at_least_float32(scores)
    return masked_softmax(_per_head(n, z) * signed_log(z, _per_head(b, z)), mask)


def masked_softmax(t, mask=None):
    """Softmax over the last dimension of t among the allowed keys; a row with nothing allowed is all 0, gradient 0."""
    if mask is None:
        return t.softmax(-1)
    t = t.masked_fill(~mask, -math.inf)
    t = t.masked_fill(~mask.any(-1, keepdim=True), 0.0)  # an empty row would be exp(-inf) / 0
    return t.softmax(-1).masked_fill(~mask, 0.0)


def check_number(name, value, wanted, fits):
    """Raise ValueError unless `value` is a number, which True, "1" and tensors are not, and fits(value) holds."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not fits(value):
        raise ValueError(f"{name}={value!r:.60}: must be a number {wanted}")


def _at_least_float32(x):
    return x if x.dtype == torch.float64 else x.float()


def _per_head(parameter, like):
    """A number or an (H,) tensor -> something that broadcasts over (..., H, Q, K)."""
    parameter = torch.as_tensor(parameter, dtype=like.dtype, device=like.device)
    return parameter.view(-1, 1, 1) if parameter.dim() else parameter


# --------------------------------------------------------------------------------------------------------- the scorers

class Scorer(nn.Module):
    """Base of all scorers: `scorer(scores, mask=None)`, shapes and mask as in `ssa`, weights >= 0 and 0 where masked."""

    needs_qk = False  # True: has `weights(q, k, mask, positions)` instead, because the product q . k is not enough
    trains_qk = True  # False: no gradient reaches q and k

    def __init__(self, n_head):
        super().__init__()
        self.n_head = n_head

    def _apply(self, fn, recurse=True):
        # model.bfloat16() casts every parameter. A scalar near 1 in bf16 has steps of 0.008: a whole training could pass
        # without moving it. So a scorer's scalars stay float32, whatever the rest of the model becomes.
        def keep_float32(tensor):
            result = fn(tensor)
            return tensor.to(result.device) if result.dtype in (torch.bfloat16, torch.float16) else result
        return super()._apply(keep_float32, recurse)


class Softmax(Scorer):
    """exp(z_j) / sum_k exp(z_k)."""

    def forward(self, scores, mask=None):
        return masked_softmax(_at_least_float32(scores), mask)


class SSA(Scorer):
    """Scaled Signed Averaging with b = softplus(raw_b) > 0 and n = 1 + softplus(raw_n) >= 1, one of each a head.

    b, n: where training starts; freeze: "none", "b", "n" or "both" stay there. n = 1 exactly is the edge of what
    softplus can reach, where its gradient vanishes, so it is accepted only with n frozen. (The published decoder starts
    from b = 0.8, n = 1.5, the small GPT-2 from b = 2.72, n = 1.49.) Raises ValueError for values outside the domain.
    """

    def __init__(self, n_head, b=0.8, n=1.5, freeze="none"):
        super().__init__(n_head)
        if freeze not in ("none", "b", "n", "both"):
            raise ValueError(f"freeze={freeze!r}: must be none, b, n or both")
        check_number("b", b, "greater than 0, from 1e-30 to 1e30", lambda b: 1e-30 <= b <= 1e30)
        check_number("n", n, "greater than 1 (or exactly 1 with n frozen)",
                     lambda n: 1 < n <= 1e30 or (n == 1 and freeze in ("n", "both")))
        self.raw_b = _raw_parameter(b, n_head, trained=freeze in ("none", "n"))
        self.raw_n = _raw_parameter(n - 1, n_head, trained=freeze in ("none", "b"))

    @property
    def b(self):
        """(H,), float32."""
        return _positive(self.raw_b)

    @property
    def n(self):
        """(H,), float32."""
        return 1 + F.softplus(self.raw_n)

    def forward(self, scores, mask=None):
        return ssa(scores, self.b, self.n, mask)


class Temperature(Scorer):
    """softmax(z / tau) with tau = softplus(raw_tau) > 0, one a head, trained from `tau` on or, with freeze, fixed."""

    def __init__(self, n_head, tau=1.0, freeze=False):
        super().__init__(n_head)
        check_number("tau", tau, "greater than 0", lambda tau: 0 < tau < math.inf)
        self.raw_tau = _raw_parameter(tau, n_head, trained=not freeze)

    @property
    def tau(self):
        """(H,), float32."""
        return _positive(self.raw_tau)

    def forward(self, scores, mask=None):
        z = _at_least_float32(scores)
        # Softmax ignores a shift, so the row's maximum is taken off before the division, which then cannot overflow.
        return masked_softmax(_below_max(z, mask, floor=-1e20) / _per_head(self.tau, z), mask)


class Sparsemax(Scorer):
    """The point of the simplex nearest to z (Martins & Astudillo 2016): max(z - threshold, 0), the sum being 1."""

    def forward(self, scores, mask=None):
        z = _below_max(_at_least_float32(scores), mask, floor=-2.0)  # 1 below the maximum the weight is already 0
        with torch.no_grad():
            ordered, _ = z.sort(-1, descending=True)
            total = ordered.cumsum(-1)
            count = torch.arange(1, z.size(-1) + 1, device=z.device, dtype=z.dtype)
            support = (1 + count * ordered > total).sum(-1, keepdim=True)  # how many weights are positive
            support = support.clamp_min(1)  # 0 for NaN, which goes on into the weights
            threshold = (total.gather(-1, support - 1) - 1) / support
        # The threshold solves sum(max(z - threshold, 0)) = 1. One Newton step, differentiated while the threshold itself
        # is not, leaves its value and gives it the gradient of the implicit function theorem.
        above = (z - threshold).relu()
        threshold = threshold + (above.sum(-1, keepdim=True) - 1) / (above > 0).sum(-1, keepdim=True)
        return _zero_where_masked((z - threshold).relu(), mask)


class Entmax15(Scorer):
    """entmax with alpha = 1.5 (Peters, Niculae & Martins 2019): max(z/2 - threshold, 0)^2, the sum being 1."""

    def forward(self, scores, mask=None):
        z = _below_max(_at_least_float32(scores), mask, floor=-4.0) / 2  # 1 below the maximum the weight is already 0
        with torch.no_grad():
            ordered, _ = z.sort(-1, descending=True)
            count = torch.arange(1, z.size(-1) + 1, device=z.device, dtype=z.dtype)
            mean = ordered.cumsum(-1) / count
            variance = (ordered.square().cumsum(-1) / count - mean.square()).clamp_min(0)
            # With the largest `count` scores positive, sum (z - threshold)^2 = 1 is a quadratic; this is its lower root.
            candidates = mean - (1 / count - variance).clamp_min(0).sqrt()
            support = (candidates <= ordered).sum(-1, keepdim=True).clamp_min(1)  # 0 for NaN, which goes on into the weights
            threshold = candidates.gather(-1, support - 1)
        above = (z - threshold).relu()  # and one Newton step carries the gradient, as in Sparsemax
        threshold = threshold + (above.square().sum(-1, keepdim=True) - 1) / (2 * above.sum(-1, keepdim=True))
        return _zero_where_masked((z - threshold).relu().square(), mask)


class SASoftmax(Scorer):
    """Self-adjusting softmax, normalised form (Zheng et al. 2025, arXiv 2502.18277); a row sums to at most 1:

        (z_j - min(z_min, 0)) / (max(z_max, 0) - min(z_min, 0)) * softmax(z)_j

    Where every score is 0 the factor reads 0/0. Here it is 1, so that such a row is the plain average.
    """

    def forward(self, scores, mask=None):
        z = _at_least_float32(scores)
        half = _zero_where_masked(z, mask) / 2  # halves, because the span of the largest scores overflows
        lowest = half.amin(-1, keepdim=True).clamp_max(0)
        span = half.amax(-1, keepdim=True).clamp_min(0) - lowest
        nothing = span < TINY
        factor = ((half - lowest) / span.masked_fill(nothing, 1.0)).masked_fill(nothing, 1.0)
        return factor * masked_softmax(z, mask)


class CosFormer(Scorer):
    """CosFormer (Qin et al. 2022): relu(q_i) . relu(k_j) cos(pi/2 (i - j)/M), normalised; 0 in a row where nothing fires.

    horizon: M, at least the number of keys; a model passes its context, so that cached and uncached decoding agree.
    """

    needs_qk = True

    def __init__(self, n_head, horizon=1024):
        super().__init__(n_head)
        check_number("horizon", horizon, "at least 1", lambda horizon: horizon >= 1)
        self.horizon = horizon

    def forward(self, scores, mask=None):
        raise TypeError("cosformer needs q and k, not their product: call scorer.weights(q, k, mask, positions)")

    def _angles(self, Q, K, positions, like):
        """Angles pi/2 * position / M of the queries (Q,) and keys (K,). The queries are the last Q of the K positions."""
        if positions is None:
            positions = torch.arange(K, device=like.device)
        if Q > K:
            raise ValueError(f"{Q} queries are more than the {K} keys, at whose last positions they stand")
        if K > self.horizon:
            raise ValueError(f"{K} keys are more than cosformer's horizon of {self.horizon}")
        angle = positions.to(like.dtype) * (math.pi / 2 / self.horizon)
        return angle[K - Q:], angle

    def weights(self, q, k, mask=None, positions=None):
        """q (..., H, Q, D), k (..., H, K, D), positions (K,) of the keys, 0..K-1 if None -> weights (..., H, Q, K)."""
        q, k = _at_least_float32(q).relu(), _at_least_float32(k).relu()
        angle_q, angle_k = self._angles(q.size(-2), k.size(-2), positions, q)
        power = _zero_where_masked((q @ k.mT) * torch.cos(angle_q[:, None] - angle_k), mask)
        return self._divide(power, power.sum(-1, keepdim=True))

    def linear(self, q, k, v, causal=False, key_mask=None, positions=None, block=64):
        """The same attention, weights @ v, in time and memory linear in K: -> (..., H, Q, Dv).

        cos(x - y) = cos x cos y + sin x sin y splits the weight into a product of a feature of the query and a feature of
        the key, so that the sum over keys can be taken before the query is known. key_mask: boolean (..., 1, K), padding.
        """
        q, k, v = (_at_least_float32(x) for x in (q, k, v))
        Q, K = q.size(-2), k.size(-2)
        angle_q, angle_k = self._angles(Q, K, positions, q)
        q = torch.cat([q.relu() * angle_q.cos()[:, None], q.relu() * angle_q.sin()[:, None]], -1)  # (..., Q, 2D)
        k = torch.cat([k.relu() * angle_k.cos()[:, None], k.relu() * angle_k.sin()[:, None]], -1)  # (..., K, 2D)
        if key_mask is not None:
            k = k.masked_fill(~key_mask.unsqueeze(-1), 0.0)
        v = torch.cat([v, torch.ones_like(v[..., :1])], -1)  # a column of ones adds up the denominator: (..., K, Dv + 1)
        if not causal:
            total = q @ (k.mT @ v)
        else:
            past = K - Q  # the diagonal ends at the last key: query i sees keys 0 .. past + i
            state, parts = k[..., :past, :].mT @ v[..., :past, :], []  # (..., 2D, Dv + 1), the sum over all earlier keys
            for i in range(0, Q, block):
                q_block = q[..., i:i + block, :]
                k_block, v_block = (x[..., past + i:past + i + block, :] for x in (k, v))
                parts.append(q_block @ state + (q_block @ k_block.mT).tril() @ v_block)
                state = state + k_block.mT @ v_block
            total = torch.cat(parts, -2)
        return self._divide(total[..., :-1], total[..., -1:])

    @staticmethod
    def _divide(numerator, denominator):
        nothing = denominator < TINY
        return (numerator / denominator.masked_fill(nothing, 1.0)).masked_fill(nothing, 0.0)


class Hardmax(Scorer):
    """All weight on the largest score, ties shared: the limit that the paper's theorems speak of.

    It is flat almost everywhere, so no gradient reaches q and k: they stay as initialised, and only v and what follows train.
    """

    trains_qk = False

    def forward(self, scores, mask=None):
        z = _at_least_float32(scores.detach())
        if mask is not None:
            z = z.masked_fill(~mask, -math.inf)
        largest = _zero_where_masked((z == z.amax(-1, keepdim=True)).to(z.dtype), mask)
        return largest / largest.sum(-1, keepdim=True).clamp_min(1)


SCORERS = {"softmax": Softmax, "ssa": SSA, "temperature": Temperature, "sparsemax": Sparsemax, "entmax15": Entmax15,
           "cosformer": CosFormer, "sa_softmax": SASoftmax, "hardmax": Hardmax}


def make_scorer(name, n_head, **options):
    """The scorer called `name` for n_head heads. Raises ValueError for an unknown name, option or value."""
    if name not in SCORERS:
        raise ValueError(f"scorer {name!r} is unknown; choose one of {', '.join(SCORERS)}")
    known = list(inspect.signature(SCORERS[name]).parameters)[1:]
    for option in options:
        if option not in known:
            raise ValueError(f"scorer {name!r} has no option {option!r}; it takes {', '.join(known) or 'none'}")
    return SCORERS[name](n_head, **options)


def _raw_parameter(value, n_head, trained):
    """(H,) parameter whose softplus is `value`; softplus(-100) is 0 to float32, the nearest that a float comes to 0."""
    raw = value + math.log(-math.expm1(-value)) if value > 0 else -100.0
    return nn.Parameter(torch.full((n_head,), raw, dtype=torch.float32), requires_grad=trained)


def _positive(raw):
    return F.softplus(raw) + torch.finfo(torch.float32).tiny  # softplus alone rounds to 0 below -104, and log b follows


def _zero_where_masked(x, mask):
    return x if mask is None else x.masked_fill(~mask, 0.0)


def _below_max(z, mask, floor):
    """z minus its row's largest allowed score, nothing below `floor`; masked keys lie at the floor."""
    if mask is None:
        return (z - z.detach().amax(-1, keepdim=True)).clamp_min(floor)
    largest = z.detach().masked_fill(~mask, torch.finfo(z.dtype).min).amax(-1, keepdim=True)
    return (z - largest).clamp_min(floor).masked_fill(~mask, floor)


# ----------------------------------------------------------------------------------------------------------- attention

def attention(q, k, v, scorer, *, causal=False, mask=None, scale=None, dropout_p=0.0, return_weights=False):
    """Attention with any scorer: q (B, H, Q, D), k (B, Hkv, K, D), v (B, Hkv, K, Dv) -> (B, H, Q, Dv) in v's dtype.

    H is a multiple of Hkv: each key/value head serves H / Hkv query heads in a row. causal: the diagonal ends at the last
    key, so that the last query sees all of them (with a cache, Q < K). mask: boolean, broadcastable to (B, H, Q, K), True =
    may attend; a query that may attend to nothing gets zeros. scale: of q . k, 1/sqrt(D) if None. dropout_p: probability of
    dropping a weight; the caller passes 0 when it evaluates. return_weights: also the weights (B, H, Q, K) before dropout.
    Raises ValueError for shapes that do not fit, TypeError for a mask that is not boolean.
    """
    check_shapes(q, k, v, scorer, mask)
    groups = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)  # (B, Hkv, K, D) -> (B, H, K, D)
    allowed = end_aligned(q.size(2), k.size(2), mask, q.device) if causal else mask
    if scorer.needs_qk:
        weights = scorer.weights(q, k, allowed)
    else:
        scale = q.size(-1) ** -0.5 if scale is None else scale
        weights = scorer((q * scale) @ k.mT, allowed)  # q is scaled first: in half precision q . k alone may overflow
    dropped = F.dropout(weights, dropout_p) if dropout_p else weights
    out = dropped.to(v.dtype) @ v
    return (out, weights) if return_weights else out


def end_aligned(Q, K, mask, device):
    """The causal mask (Q, K) whose last query sees the last key, together with `mask` if there is one."""
    causal = torch.ones(Q, K, dtype=torch.bool, device=device).tril(K - Q)
    return causal if mask is None else causal & mask


def check_shapes(q, k, v, scorer, mask):
    """Raise ValueError or TypeError unless the operands fit together as `attention` says."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ValueError(f"{shapes}: each must have four dimensions, (batch, heads, length, width)")
    if k.shape[:3] != v.shape[:3] or q.size(0) != k.size(0) or q.size(3) != k.size(3):
        raise ValueError(f"{shapes}: batch, key length or width do not fit together")
    if q.size(1) % k.size(1):
        raise ValueError(f"{shapes}: the {q.size(1)} query heads are not a multiple of the {k.size(1)} key/value heads")
    if scorer.n_head != q.size(1):
        raise ValueError(f"{shapes}: q has {q.size(1)} heads, the scorer {scorer.n_head}")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"the mask has dtype {mask.dtype}; it must be boolean, True where a query may attend")
    if mask is not None:
        full = (*q.shape[:3], k.size(2))  # (B, H, Q, K)
        if mask.dim() > 4 or any(m not in (1, size) for m, size in zip(reversed(mask.shape), reversed(full))):
            raise ValueError(f"the mask {tuple(mask.shape)} does not broadcast to (batch, heads, queries, keys) {full}")
