"""Other scorers in the frame of the two theorems: which collapse, how fast, and which do not.

Theorem 1 scales all scores by L, g the gap between the largest score and the next. Theorem 2 lets one score x grow.

    scorer           scale L, mass off the winner           one score x grows         losers' gradient after collapse
    softmax          exp(-L g)                              exp(-x)                   exponentially small
    temperature      exp(-L g / tau)                        exp(-x / tau)             exponentially small
    SA-softmax       exp(-L g), times a constant < 1        exp(-x) / x               exponentially small
    sparsemax        exactly 0 from L g = 1 on              exactly 0, gap >= 1       exactly 0
    entmax-1.5       exactly 0 from L g = 2 on              exactly 0, gap >= 2       exactly 0
    hardmax          exactly 0 for all L > 0                exactly 0                 exactly 0
    SSA              stays, if two scores are positive      x^-n                      x^-n
    CosFormer        does not change with L                 1/x (x: the key's power)  not by q . k: see `cosformer`

So among weights that are a function of the score alone, what decides is the tail of that function (`tail_decides`), and where
scaling leaves odds that are neither 0 nor infinite, these are powers (`why_a_power`). All of this is ours; the paper compares
by experiment. The definitions are those of ssa.py. m = 1 winner unless said otherwise; ties share as in Theorem 1.
"""

import sympy as sp
from identity import L, R, b, g, n, power, s, x, y, z
from prove import at_most, equal, less, proof, tends
from theorem1 import W, share, softmax_loser_bounds

k = sp.Symbol("k", positive=True, integer=True)  # losers
tau, alpha, A, a, r, h, e = sp.symbols("tau alpha A a r h epsilon", positive=True)
u, d = sp.symbols("u d", nonnegative=True)


@proof
def tail_decides():
    """Weights w(z_j) / sum_k w(z_k), one score grows: the others keep R / (R + w(x)), which is R / w(x) to first order.

    So the tail of w is the speed of the collapse: e^x, x^n, x; and a bounded w (by W, say a sigmoid) never collapses: R/(R + W).
    """
    return [tends("Others' mass times w, as w grows", W * share(R, W), W, sp.oo, R),
            less("A weight below its bound leaves more", share(R, W + x), share(R, W))]


@proof
def why_a_power():
    """Limits under scaling are powers. Suppose w(L x) / w(L y) tends to a finite positive limit f(x/y) for all positive scores
    x, y. Then f(r s) = f(r) f(s), and f(r) = r^n for some n (n = 0: weights that end by ranking nothing). SSA is one such scorer
    that is also once differentiable at 0 and treats negative scores as inverses. Not the only one: exp(n asinh(b z)) does the
    same, has the same limit, and all derivatives at 0.

    By hand: the odds of x against y and of y against z multiply, before and in the limit. For differentiable f, the derivative
    of f(r s) = f(r) f(s) with respect to s at s = 1 is r f'(r) = n f(r), n = f'(1); so f(r) r^-n has derivative 0 and is
    f(1) = 1.
    (Measurable w is enough: that is Karamata's theorem on regular variation.)
    """
    f = sp.Function("f")

    def other(z):
        return sp.exp(n * sp.asinh(b * z))

    return [equal("The derivative of f(r) r^-n has the factor r f' - n f", (f(r) * r**-n).diff(r),
                  r ** (-n - 1) * (r * f(r).diff(r) - n * f(r))),
            equal("r^n is multiplicative", (r * s) ** n, r**n * s**n),
            equal("SSA: power(x) times power(-x)", power(-x) * power(x), 1),
            equal("The same for exp(n asinh(b z))", other(-z) * other(z), 1),
            tends("and its odds at scale L", other(L * x) / other(L * y), L, sp.oo, (x / y) ** n)]


@proof
def temperature():
    """softmax(z / tau) is softmax at scale 1/tau: Theorem 1 with g / tau for g, Theorem 2 with x / tau for x.

    A temperature, trained or not, changes the rate of the collapse and not its kind. By hand: k runners-up, others h below them.
    """
    losers = sp.exp(-L * g / tau) * (k + R * sp.exp(-L * h / tau))
    return [equal("The upper bound of Theorem 1", softmax_loser_bounds(L, g / tau, k)[1], softmax_loser_bounds(L / tau, g, k)[1]),
            tends("Rate under scaling", -sp.log(share(losers, 1)) / L, L, sp.oo, g / tau),
            tends("Constant under one growing score", sp.exp(x / tau) * share(A, sp.exp(x / tau)), x, sp.oo, A),
            tends("SSA's mass is larger in the end, at any temperature", x**n * share(A, sp.exp(x / tau)), x, sp.oo, 0)]


@proof
def sparsemax():
    """Sparsemax, max(z - theta, 0) with sum 1, is one-hot exactly when L g >= 1: a collapse at a finite scale. Before that,

        (1 - L g)/2  <=  loser mass  <=  k (1 - L g)/(k + 1)            for k losers, the nearest g below the winner, L g <= 1

    Both are attained (one loser; all losers tied). Under Theorem 2 read L g as the gap that has grown.
    By hand: theta is unique, as the sum falls strictly where it is positive. Dropping losers from the sum lowers theta and so
    the loser mass, raising losers to the gap g raises both: that leaves the two cases below, whose sums are checked to be 1.
    With theta = L z_1 - 1 the winner has 1, so the row is one-hot if and only if no loser is above that theta.
    """
    gap = L * g
    beyond, before = {L: (1 + u) / g}, {L: 1 / (g * (1 + s))}
    winner = (1 + k * gap) / (k + 1)  # all k losers tied: their weight is winner - gap
    return [equal("Theta = L z_1 - 1: a loser's weight from L g = 1 on", sp.Max(1 - gap, 0), 0, beyond),
            less("and before: not one-hot", 0, 1 - gap, before),
            equal("k tied losers: the weights sum to 1", winner + k * (winner - gap), 1),
            less("they are positive before L g = 1", 0, winner - gap, before),
            equal("Their mass", 1 - winner, k * (1 - gap) / (k + 1)),
            equal("One loser", (1 - winner).subs(k, 1), (1 - gap) / 2)]


@proof
def entmax():
    """alpha-entmax, max((alpha-1) z - theta, 0)^(1/(alpha-1)) with sum 1, is one-hot exactly when (alpha-1) L g >= 1: at L g = 2
    for 1.5, at 1 for sparsemax (alpha = 2), never for softmax (alpha -> 1). Just before, two tokens under entmax-1.5 leave the
    loser (1 - L g/2)^2 to first order.

    Its power is SSA's: with n = 1/(alpha-1) and b = 1/n, positive scores have the same (1 + b z)^n. The difference is below 0,
    where entmax cuts off and SSA inverts, and in the normalisation: entmax shifts the scores until the sum is 1, SSA divides.
    By hand: as for sparsemax; theta = (alpha-1) L z_1 - 1 gives the winner 1.
    """
    b = alpha - 1
    big, small = (d + sp.sqrt(2 - d**2)) / 2, (-d + sp.sqrt(2 - d**2)) / 2  # roots of the weights of two tokens, d = L g/2
    loser, d_at_most_1 = 1 - b * L * g, {d: 1 / (1 + u)}
    return [equal("A loser's base from (alpha-1) L g = 1 on", sp.Max(loser, 0), 0, {L: (1 + u) / (g * e), alpha: 1 + e}),
            less("and before: not one-hot", 0, loser, {L: 1 / (g * e * (1 + s)), alpha: 1 + e}),
            equal("For entmax-1.5 that base is", loser.subs(alpha, sp.Rational(3, 2)), 1 - L * g / 2),
            tends("alpha -> 1: the threshold goes to infinity", 1 / (b * g), alpha, 1, sp.oo),
            equal("Two tokens: the weights sum to 1", big**2 + small**2, 1, d_at_most_1),
            equal("and their roots differ by", big - small, d, d_at_most_1),
            tends("The loser's weight just before, at d = 1 - e", small.subs(d, 1 - e) ** 2 / e**2, e, 0, 1),
            equal("SSA's power on positive scores", power(x, b=b, n=1 / b), (1 + b * x) ** (1 / b)),
            tends("which at alpha -> 1 is the exponential", (1 + x / n) ** n, n, sp.oo, sp.exp(x))]


def sa_factor(z, lowest, highest):
    """SA-softmax's factor on softmax's weight of z in a row between lowest and highest."""
    low = sp.Min(lowest, 0)
    return (z - low) / (sp.Max(highest, 0) - low)


@proof
def sa_softmax():
    """SA-softmax multiplies softmax's weights by (z - min(z_min, 0)) / (max(z_max, 0) - min(z_min, 0)), which does not change
    with L: it collapses as softmax does, a little faster, since the factor is at most the winner's. Under Theorem 2 a loser at z
    keeps Theta(e^-x / x).

    Its rows sum to less than 1, and where all scores are negative the rest does not vanish: the winner tends to the factor
    1 - z_max/z_min instead of 1, and a row of equal negative scores is 0. (ssa.py has the same.)
    """
    mixed = sa_factor(z, -y, x)
    grown = sa_factor(z, -s, x) * sp.exp(z) / (A + sp.exp(x))
    return [equal("The factor ignores the scale", sa_factor(L * z, -L * y, L * x), mixed),
            equal("The winner's factor, if its score is positive", sa_factor(x, -y, x), 1),
            equal("Two positive scores: loser over winner", sa_factor(L * y, L * y, L * (y + g)) * sp.exp(-L * g),
                  y / (y + g) * sp.exp(-L * g)),
            less("the constant being below 1", y / (y + g), 1),
            tends("One growing score: constant", x * sp.exp(x) * grown, x, sp.oo, (z + s) * sp.exp(z)),
            equal("All negative: the winner's factor", sa_factor(-y, -y - g, -y), 1 - y / (y + g)),
            equal("Factor of equal negative scores", sa_factor(-y, -y, -y), 0)]


@proof
def cosformer():
    """CosFormer's weights are a_j = relu(q) . relu(k_j) cos(angle_j) over their sum. Each a_j is positively homogeneous in q and
    in k_j: no scale of q, or of all keys, changes the weights, and one key whose power x grows leaves the others R / (R + x) =
    Theta(1/x), like SSA with n = 1. With n = 1 SSA's limit in Theorem 1, z_j / sum z_k over positive scores, has the same form.

    The price: they do not follow q . k, since what is negative in q and k is cut off before the product. Below, q . k ranks
    one key first and CosFormer the other. And one-hot rows need no growth: q = (1, 0) sees only one of the keys (1, 0), (0, 1).
    """
    def fires(q, k):
        return sum(sp.Max(i, 0) * sp.Max(j, 0) for i, j in zip(q, k))

    q, near, far = (1, -2), (1, -2), (3, 0)
    dot = [sum(i * j for i, j in zip(q, key)) for key in (near, far)]
    return [equal("Scaling q by L", share(L * R, L * a), share(R, a)),
            tends("One key grows: constant", x * share(R, x), x, sp.oo, R),
            tends("SSA with n = 1, b = 1", x * share(R, power(x, b=1, n=1)), x, sp.oo, R),
            less("q . k prefers the first key", dot[1], dot[0]),
            less("CosFormer the second", fires(q, near), fires(q, far)),
            equal("What q = (L, 0) gives the key (0, 1) at any scale", fires((L, 0), (0, 1)), 0)]


@proof
def hardmax():
    """Hardmax, all weight on the largest score, is where softmax ends; the mass that softmax still leaves is at most k e^(-L g),
    its distance to hardmax. SSA with two positive scores y < x = y + g stays away by more than the loser's y^n/(x^n + y^n).
    """
    stays = y**n / ((y + g) ** n + y**n)
    at_scale = power(L * y) / (power(L * (y + g)) + power(L * y))
    return [at_most("Distance of softmax to it", softmax_loser_bounds(L, g, k)[1], k * sp.exp(-L * g)),
            tends("vanishes", k * sp.exp(-L * g), L, sp.oo, 0),
            less("whereas SSA's limit is this far away", 0, stays),
            tends("which is the limit of the loser's weight, here for n = 1", at_scale.subs(n, 1), L, sp.oo, stays.subs(n, 1))]
