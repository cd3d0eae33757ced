"""What the theorems mean for attention: entropy, gradients of losing tokens, sensitivity to scores, rounding; and what not.

    question                                        softmax                        SSA
    entropy, K scores between -s and s              >= log K - 2 s                 >= log K - 2 n log(1 + b s)
    gradient of a loser, another score at x         Theta(e^-x)                    Theta(x^-n)
    Lipschitz constant, norms 1, 2, infinity        1/2                            n b/2;  n b/(2 (1 + b s)) for sizes >= s
    scores rounded, relative error e                weights times e^(+-2 e s)      weights times (1 - e)^(+-2n), any scores
    scores off by an absolute error e               weights times e^(+-2 e)        weights times e^(+-2 n b e)

The last two lines are upper bounds of the same kind for both, and the unnormalised ones are sharp. All of it is ours: the
paper argues from Theorems 1 and 2 alone. P is always a row of weights, M its largest.
Not every line favours SSA: for n b > 1 it is more sensitive than softmax to small scores, and its entropy stays high also
where a task wants it low.
"""

import sympy as sp
from identity import L, R, b, g, n, power, ssa, t_of, x, y, z
from prove import at_most, equal, grows_past, less, proof, rises_to, tends
from theorem2 import A, B, ssa_rest

K = sp.Symbol("K", positive=True, integer=True)
p, M = sp.symbols("p M", positive=True)
u, d = sp.symbols("u d", nonnegative=True)  # d: a distance of log weights, a range of t
rest, e = sp.symbols("r epsilon", positive=True)  # the losers' mass; a rounding error
share = sp.Symbol("P", real=True)  # a weight


def binary_entropy(p):
    """Entropy of (p, 1 - p) in nats."""
    return -p * sp.log(p) - (1 - p) * sp.log(1 - p)


def largest_weight_bound(K, spread):
    """The largest of K weights whose logarithms lie within `spread` of each other."""
    return 1 / (1 + (K - 1) * sp.exp(-spread))


def spread_of_t(s, b, n):
    """The range of t for scores between -s and s: 2 n log(1 + b s). For softmax it is 2 s."""
    return t_of(s, b, n) - t_of(-s, b, n)


# ----------------------------------------------------------------------------------------------------------- entropy

@proof
def entropy_from_largest_weight():
    """H(P) >= -log M, and H(P) >= binary_entropy(M): a row whose largest weight is M cannot be more certain than that.

    By hand: sum the first line over the tokens, p <= M. The second is the chain rule: the losers, of mass r, have weights r p
    with p a distribution of its own; summed over them, H(P) = binary_entropy(r) + r H(losers), and H(losers) >= 0.
    """
    return [at_most("Each term of H is at least its share of -log M", -p * sp.log(M), -p * sp.log(p), {M: p * sp.exp(u)}),
            equal("Each loser's term by the chain rule", -(rest * p) * sp.log(rest * p),
                  -p * rest * sp.log(rest) - rest * p * sp.log(p))]


@proof
def entropy_from_range():
    """Scores between -s and s: H >= log(1 + (K-1) e^-d) >= log K - d, with d = 2s for softmax, d = 2 n log(1 + b s) for SSA.

    In SSA the entropy that large scores can take away grows like their logarithm only.
    By hand: the largest weight is 1 / sum_k e^(t_k - t_max), and each of the other K - 1 terms is at least e^-d; then
    H >= -log M. The bound on M is attained: one score s, the others -s.
    """
    s = x
    row = ssa([s, -s, -s, -s])
    return [equal("Range of t", spread_of_t(s, b, n), 2 * n * sp.log(1 + b * s)),
            equal("Attained by one s among -s, here K = 4", row[0], largest_weight_bound(4, spread_of_t(s, b, n))),
            equal("The two forms differ by this factor inside the logarithm", 1 + (K - 1) * sp.exp(-d) - K * sp.exp(-d),
                  1 - sp.exp(-d)),
            grows_past("which is nonnegative", 0, 1 - sp.exp(-d), d),
            tends("SSA's loss of entropy per score", spread_of_t(s, b, n) / s, s, sp.oo, 0)]


@proof
def entropy_at_collapse():
    """A row that collapses, losers' mass r -> 0, has entropy ~ r log(1/r): under Theorem 2 that is ~ n B (b x)^-n log(b x) for
    SSA against ~ A x e^-x for softmax. Under Theorem 1 SSA's entropy tends to that of its limit, at least
    -log(z_max^n / sum z_k^n) > 0 if two scores are positive, while softmax's tends to log m.

    By hand: H = binary_entropy(r) + r H(losers), and H(losers) <= log(K - 1), which r log(1/r) outgrows. Entropy is continuous.
    """
    return [tends("Entropy against r log(1/r)", binary_entropy(rest) / (-rest * sp.log(rest)), rest, 0, 1),
            equal("SSA: with r = B (b x)^-n, the logarithm is", -sp.log(B * (b * x) ** -n), n * sp.log(b * x) - sp.log(B)),
            tends("which is like", (n * sp.log(b * x) - sp.log(B)) / (n * sp.log(b * x)), x, sp.oo, 1),
            tends("Softmax: with r = A e^-x, against x", -sp.log(A * sp.exp(-x)) / x, x, sp.oo, 1),
            less("Theorem 1, two positive scores: the entropy's bound is positive", 1, (x**n + y**n) / x**n)]


# --------------------------------------------------------------------------------------------------------- gradients

@proof
def gradient_of_losers():
    """One score x grows (Theorem 2): what a change of a losing score z = y > 0 does to its own weight, dP/dz = P (1 - P) t'(z).

    Softmax: Theta(e^-x). SSA: Theta(x^-n), the constant being b^-n power(y) n b/(1 + b y). The winner's own score loses its
    gradient as well: Theta(x^(-n-1)) against Theta(e^-x). So under SSA a token that lost can come back by training.
    """
    soft = sp.exp(z) / (R + sp.exp(x) + sp.exp(z))
    P = power(y) / (R + power(x) + power(y))
    winner = 1 - ssa_rest(x, B)
    return [equal("SSA: the loser's gradient", P.diff(y), P * (1 - P) * n * b / (1 + b * y)),
            tends("Constant", x**n * P * (1 - P), x, sp.oo, (1 + b * y) ** n / b**n),
            tends("Softmax's", sp.exp(x) * soft * (1 - soft), x, sp.oo, sp.exp(z)),
            equal("SSA: the winner's gradient", winner.diff(x), winner * (1 - winner) * n * b / (1 + b * x)),
            tends("The constant of its last factor", x * n * b / (1 + b * x), x, sp.oo, n)]


@proof
def gradient_under_scaling():
    """All scores grow (Theorem 1), two of them positive: the gradient with respect to the unscaled scores z,
    L P (1 - P) t'(L z), tends to P_j (1 - P_j) n / z_j for a positive score, not to 0. Softmax's, L P (1 - P), vanishes
    exponentially if there is no tie at the top; tied winners keep P = 1/m, and theirs grows like L.
    """
    soft = 1 / (1 + sp.exp(L * g))
    return [tends("The inner factor", L * n * b / (1 + b * L * y), L, sp.oo, n / y),
            tends("Softmax: two tokens, gap g", L * soft * (1 - soft), L, sp.oo, 0),
            tends("with its rate", sp.exp(L * g) * soft * (1 - soft), L, sp.oo, 1),
            equal("but two that tie, g = 0, have", (L * soft * (1 - soft)).subs(g, 0), L / 4)]


@proof
def lipschitz():
    """Softmax is 1/2-Lipschitz and SSA n b/2-Lipschitz, each in the norms 1, 2 and infinity, and no smaller constant will do.
    Where all scores are at least s in size, SSA's constant is n b / (2 (1 + b s)).

    By hand: J = diag(P) - P P^T has absolute row sums P_i (1 - P_i) + P_i sum_(j != i) P_j = 2 P_i (1 - P_i), and is symmetric,
    so its norms 1 and infinity are at most 1/2, and its norm 2 is at most the root of their product. SSA's Jacobian is
    J diag(t'(z)). Mean value inequality: SSA is once continuously differentiable (identity.smooth_once); the second claim is
    for segments on which all scores keep that size. Sharp: two scores at 0, the direction (1, -1), which all three norms
    measure alike on both sides; more tokens, far below, only add what vanishes.
    """
    direction = sp.Matrix([1, -1])

    def at_zero(row):  # Jacobian of the weights of the scores (x, y) at (0, 0), times the direction
        return (sp.Matrix(2, 2, lambda i, j: row[i].diff((x, y)[j])).subs({x: 0, y: 0}) * direction)

    soft = at_zero([sp.exp(v) / (sp.exp(x) + sp.exp(y)) for v in (x, y)])
    signed = at_zero(ssa([x, y]))
    return [at_most("Absolute row sum of J", 2 * share * (1 - share), sp.Rational(1, 2)),
            at_most("Slope of t", n * b / (1 + b * x), n * b),
            at_most("Slope of t beyond size x", n * b / (1 + b * (x + u)), n * b / (1 + b * x)),
            *[equal(f"Sharp: softmax's Jacobian at (0, 0) times (1, -1), entry {i + 1}", soft[i], direction[i] / 2)
              for i in range(2)],
            *[equal(f"and SSA's, entry {i + 1}", signed[i], n * b / 2 * direction[i]) for i in range(2)]]


# ---------------------------------------------------------------------------------------------------------- rounding

@proof
def rounded_scores():
    """Scores rounded to z (1 + e_j), |e_j| <= e; bf16 rounds to nearest with e = 2^-8. The factor on the unnormalised weight is

        softmax: e^(e_j z), up to e^(e|z|), growing with the score;     SSA: between (1-e)^n and (1-e)^-n, whatever the score

    and twice these exponents bound the weights. At e = 2^-8, n = 1.5 that is 1.2 % for SSA at most; softmax passes it at
    |z| = 1.5, and at |z| = 100 its factor may be 2.2 (1.5 unnormalised).
    By hand: (1+e)^n <= (1-e)^-n, a negative score has the inverse factor; a weight is a quotient of two such factors, one
    averaged over the row.
    """
    return [equal("Softmax: the factor", sp.exp(z * (1 + e)) / sp.exp(z), sp.exp(e * z)),
            at_most("SSA, rounded up: the base grows by 1 + e at most", 1 + b * x * (1 + e), (1 + e) * (1 + b * x)),
            at_most("and not less than by 1", 1 + b * x, 1 + b * x * (1 + e)),
            at_most("SSA, rounded down: it shrinks by 1 - e at most", (1 - e) * (1 + b * x), 1 + b * x * (1 - e)),
            less("which is the worse of the two, 1 + e < 1/(1 - e)", (1 + e) * (1 - e), 1),
            tends("Sharp for large scores", (1 + b * x * (1 + e)) / (1 + b * x), x, sp.oo, 1 + e)]


@proof
def shifted_scores():
    """An absolute error e of a score (long sums in low precision) moves t by n b e at most, and near 0 by just that. Where the
    score stays of size >= x, it moves t by n b e / (1 + b x) at most: SSA is safer than softmax where n b < 1 + b x.

    x is the smaller of the two sizes, so for an error towards 0 it is that of the wrong score.
    By hand: for scores of either sign, the mean value inequality with the slope of t.
    """
    moved, ratio = t_of(x + e) - t_of(x), b * e / (1 + b * x)
    return [equal("How far t moves between x > 0 and x + e, either way", moved, n * sp.log(1 + ratio)),
            grows_past("at most n times u, here u = b e / (1 + b x)", n * sp.log(1 + u), n * u, u),
            grows_past("and at least n times u / (1 + u)", n * u / (1 + u), n * sp.log(1 + u), u),
            equal("which has the larger size below", ratio / (1 + ratio), b * e / (1 + b * (x + e))),
            tends("Sharp at 0", t_of(e) / e, e, 0, n * b)]


# ---------------------------------------------------------------------------------------- what the theorems do not say

@proof
def n_can_grow():
    """The theorems fix n and b; training does not. At bounded scores a head reaches any concentration by raising n: to give the
    share alpha to a score x > 0 among K - 1 zeros it needs n = log((K-1) alpha/(1-alpha)) / log(1 + b x); o = alpha/(1-alpha).

    For K = 1024, x = 10, b = 0.8 and 99 % that is n = 5.2. So "SSA cannot collapse" is true of the function at fixed n, not of
    a trained model; whether n grows is a question for measurements.
    """
    o = sp.Symbol("o", positive=True)
    needed = sp.log(B * o) / sp.log(1 + b * x)
    return [equal("At that n the logarithm of the winner's power is", sp.log((1 + b * x) ** needed), sp.log(B * o)),
            equal("the others keep 1/(1 + o)", B / (B + B * o), 1 / (1 + o)),
            tends("and n -> infinity is hardmax, here for the scores 1/b and 2/b", power(1 / b) / power(2 / b), n, sp.oo, 0)]


@proof
def bounded_scores_disperse():
    """The theorems send scores to infinity; in a model norms bound them: |q . k| / sqrt(D) <= |q| |k| / sqrt(D), and both norms
    are bounded for weights that are fixed and inputs that are normalised. At scores between -s and s, a longer context
    disperses *both*: the largest of K weights is at most 1/(1 + (K-1) e^-d), d = 2s or 2 n log(1 + b s), which tends to 0.
    The context from which no token can have half the weight is K > 1 + e^(2s) for softmax, K > 1 + (1 + b s)^(2n) for SSA.

    Nor do the theorems speak of the rest of the model: an outlier also enters through its own residual stream, the values, the
    feed-forward layers and the normalisation. They concern one row of weights of one head.
    """
    bound = largest_weight_bound(K, d)
    return [tends("Long contexts", bound, K, sp.oo, 0),
            equal("Bound at K = 1 + e^d, softmax", bound.subs(K, 1 + sp.exp(d)), sp.Rational(1, 2)),
            equal("and at K = 1 + (1 + b s)^(2n), SSA",
                  largest_weight_bound(1 + (1 + b * x) ** (2 * n), spread_of_t(x, b, n)), sp.Rational(1, 2)),
            rises_to("The bound grows with the range, to 1", bound.subs(K, 2 + u).subs(d, x), x, 1)]
