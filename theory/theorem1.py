"""Theorem 1: all scores are scaled by L -> infinity. Softmax collapses to hardmax; SSA keeps every positive score.

In plain words, as the paper has it: the larger the scores, the nearer softmax is to putting all weight on the largest one,
whereas SSA's weights tend to powers of the scores, which leave something to every positive score:

    softmax(L z)_j -> 1/m for the m largest, 0 else               SSA(L z)_j -> z_j^n / (sum over positive z_k of z_k^n)

Ours is stronger in this: two-sided bounds for every finite L, exact rates, and every case, whether the theorem's conclusion
holds there or not. With p positive scores, r zeros, q negative scores, m tied at the top:

    case                 SSA(L z) tends to                 how fast                       collapse?
    p >= 2               z_j^n / sum z_k^n, positives      1/L                            no
    p = 1, r >= 1        one-hot                           L^-n                           yes, polynomial
    p = 1, r = 0         one-hot                           L^-2n                          yes, polynomial
    p = 0, r >= 1        uniform over the zeros            L^-n                           to one-hot only if r = 1
    p = 0, r = 0         |z_j|^-n / sum |z_k|^-n           1/L                            no (if q >= 2)
    softmax, any case    uniform over the m largest        exp(-L gap)                    to one-hot if m = 1

Assumptions, each with a counterexample in `assumptions`: no tie (softmax), two positive scores (SSA), n and b do not move
with L. That n >= 1 is not needed: n > 0 will do. (But zeros with n < 1 slow the first rate to L^-n, and negative scores with
n < 1/2 to L^-2n; at n = 1 and n = 1/2 they change its constant, see `several_positive_rate`.)
"""

import sympy as sp
from identity import L, R, b, g, n, power, ssa, t_of, x, y, z
from prove import at_most, equal, grows_past, less, proof, rises_to, tends

m, k, r, q = sp.symbols("m k r q", positive=True, integer=True)  # tied winners, losers, zeros, negatives
S, W, A, B, B_1, N, h, e = sp.symbols("S W A B B_1 N h e", positive=True)
d, s_1, s_2, s_3 = sp.symbols("d s_1 s_2 s_3", nonnegative=True)
ratio = sp.Symbol("rho", positive=True)  # a losing score as a part of the largest


def share(S, W):
    """What is left to tokens of total weight S beside others of total weight W."""
    return S / (W + S)


def softmax_loser_bounds(L, g, k, m=1):
    """(lower, upper) bound on the mass that softmax(L z) leaves to k losers, g below the m winners or (the others) more."""
    return 1 / (1 + m * sp.exp(L * g)), k / (k + m * sp.exp(L * g))


def ssa_limit(scores, n):
    """The weights to which SSA(L z; b, n) tends for L -> infinity, whatever b: a list, all cases of the table above."""
    scores = [sp.sympify(score) for score in scores]
    if any(score > 0 for score in scores):
        weights = [score**n if score > 0 else sp.Integer(0) for score in scores]
    elif any(score.is_zero for score in scores):  # sympy's 0.0 is not == 0
        weights = [sp.Integer(int(score.is_zero)) for score in scores]
    else:
        weights = [(-score) ** (-n) for score in scores]
    return [weight / sum(weights) for weight in weights]


@proof
def share_grows():
    """The lemma behind all bounds: S/(W + S) increases in S and decreases in W, so bounds on S and W bound it."""
    return [less("It increases in S", 0, share(S, W).diff(S)), less("and decreases in W", share(S, W).diff(W), 0)]


# ----------------------------------------------------------------------------------------------------------- softmax

@proof
def softmax_bounds():
    """m scores tie at the top, k are lower, the nearest by the gap g > 0. What softmax(L z) leaves to the k losers:

        1 / (1 + m e^(L g))  <=  loser mass  <=  k / (k + m e^(L g))  <=  (k/m) e^(-L g)       for every L > 0

    and each winner misses 1/m by (loser mass)/m, so the distance to hardmax in total variation is the loser mass.
    By hand: divided by a winner's e^(L z), the losers add up to S = sum e^(-L g_j), which lies between its largest term
    e^(-L g) and k times that; then `share_grows`. The bounds are attained: k = 1, or all losers at the same gap.
    """
    lower, upper = softmax_loser_bounds(L, g, k, m)
    return [equal("Lower bound: S is its largest term", share(sp.exp(-L * g), m), lower),
            equal("Upper bound: all k terms are that large", share(k * sp.exp(-L * g), m), upper),
            at_most("and in a simpler form", upper, k / m * sp.exp(-L * g)),
            equal("What the m winners miss together", m * (1 / m - 1 / (m + S)), share(S, m))]


@proof
def softmax_rate():
    """The collapse is exponential with the gap as its rate, and the constant is (number of runners-up) / (number of winners).

    k runners-up at gap g; everything lower, at gap g + h or more, adds R e^(-L(g + h)) at most, R its number.
    """
    losers = sp.exp(-L * g) * (k + R * sp.exp(-L * h))
    return [tends("Loser mass times e^(L g)", sp.exp(L * g) * share(losers, m), L, sp.oo, sp.Rational(1) * k / m),
            tends("Rate", -sp.log(share(losers, m)) / L, L, sp.oo, g)]


# --------------------------------------------------------------------------------------------- SSA, some positive score

@proof
def several_positive():
    """SSA(L z) -> z_j^n / (sum over positive z_k of z_k^n): no collapse as soon as two scores are positive.

    By hand: 1/weight_j is the sum over k of the odds of k against j, a finite sum, so it tends to the sum of their limits.
    """
    return [tends("Odds of two positive scores", power(L * x) / power(L * y), L, sp.oo, (x / y) ** n),
            tends("Odds of a zero against a positive score", power(0) / power(L * x), L, sp.oo, 0),
            tends("Odds of a negative against a positive score", power(-L * y) / power(L * x), L, sp.oo, 0)]


@proof
def context_mass():
    """What remains for the context, in closed form: off the m scores x at the top, the other positive ones having sum of
    powers B,      C = B / (m x^n + B);      k others, each at least rho x (0 < rho < 1), keep C >= k rho^n / (m + k rho^n).

    And C is not only the limit: **at no scale L, and for no b, is the mass off the winners smaller than C**, as the odds of the
    winner against a positive loser rise to their limit and never reach it.
    By hand: the log odds are n times the difference below; zeros and negative scores only add to the mass off the winners.
    """
    mass = share(B, m * x**n)
    scaled = t_of(L * (y + g)) / n - t_of(L * y) / n
    return [equal("k others at ratio rho exactly", mass.subs(B, k * (ratio * x) ** n), k * ratio**n / (m + k * ratio**n)),
            at_most("k others at ratio rho or more", k * ratio**n / (m + k * ratio**n), mass, {B: x**n * (k * ratio**n + d)}),
            less("It is positive", 0, k * ratio**n / (m + k * ratio**n)),
            rises_to("Log odds at finite L, over n, stay below the limit's", scaled, L, sp.log(y + g) - sp.log(y))]


@proof
def several_positive_bounds():
    """Two-sided bounds at every L. With e = 1/(b L z_min), z_min the least positive score, and P_j the limit,

        P_j / ((1 + e)^n (1 + D))  <=  SSA(L z)_j  <=  P_j (1 + e)^n,        (1 + e)^n <= exp(n e)

    for positive z_j; D is the total power of the nonpositive scores over that of the positive ones, at most
    (r + q) / (sum (b L z_k)^n).
    By hand: power(L z) = (b L z)^n a with 1 <= a <= (1 + e)^n =: a_max. The limit compares A = z_j^n with the sum B of the
    others; their factors are a and an average of others, written beta; D divides everything by 1 + D.
    """
    a, beta, top = sp.symbols("a beta a_max", positive=True)
    domain = {a: 1 + s_1, beta: 1 + s_2}
    return [equal("The power at scale L", power(L * x), (b * L * x) ** n * (1 + 1 / (b * L * x)) ** n),
            at_most("Its correction is largest for the least score", 1 + 1 / (b * L * x), 1 + 1 / (b * L * y), {x: y + d}),
            at_most("Upper bound", A * a / (A * a + B * beta + d), top * A / (A + B), {**domain, top: 1 + s_1 + s_3}),
            at_most("Lower bound, before D", A / (A + B) / top, A * a / (A * a + B * beta), {**domain, top: 1 + s_2 + s_3}),
            grows_past("The exponential form", n * sp.log(1 + s_1), n * s_1, s_1)]


@proof
def several_positive_rate():
    """The rate is 1/L, with the constant: L (SSA(L z)_j / P_j - 1) -> (n/b) (1/z_j - sum_k P_k / z_k).

    (For n > 1; without zeros for n > 1/2; without zeros and negative scores for n > 0.) Zeros fade like L^-n: r of them add
    -r/(b sum z_k) at n = 1 and set the rate below. Negative scores fade like L^-2n: without zeros they add -N/(b sum z_k^n), with
    N = sum |z_i|^-n over them, at n = 1/2 and set the rate below.
    The constant vanishes for every j only if all positive scores tie or one is alone: then the nonpositive scores set the rate,
    as in `one_positive`.
    By hand: with e = 1/(b L), SSA is z_j^n (1 + e/z_j)^n over a sum of such terms, plus r e^n, plus N e^(2n) to first order. The
    other positive tokens enter as B + n B_1 e + O(e^2), with B = sum z_k^n and B_1 = sum z_k^(n-1).
    """
    def change(extra):  # of the logarithm of the weight, per e; the nonpositive scores add extra * e to the sum
        P = x**n * (1 + e / x) ** n
        return sp.log(P / (P + B + n * B_1 * e + extra * e)).diff(e).subs(e, 0)

    def added(extra):
        return sp.simplify(change(extra) - change(0))

    half, mean_inverse = sp.Rational(1, 2), (x ** (n - 1) + B_1) / (x**n + B)
    return [equal("Relative change of the weight per e", change(0), n * (1 / x - mean_inverse)),
            equal("A negative score's power over (b L)^n", power(-y / (b * e)) * e**n, e ** (2 * n) * (y + e) ** -n),
            equal("n = 1: r zeros add", added(r).subs(n, 1), -r / (x + B)),
            equal("n = 1/2: negative scores add", added(N).subs(n, half), -N / (sp.sqrt(x) + B))]


@proof
def one_positive():
    """Exactly one positive score x: SSA collapses to one-hot too, but polynomially. The mass off the winner is

        r zeros, q negative:    r / (r + (1+bLx)^n)  <=  mass  <=  (r + q) / (r + q + (1+bLx)^n),      ~ r (b L x)^-n
        q negative, in size between y and y + g:
            q / (q + ((1+bLx)(1+bL(y+g)))^n)  <=  mass  <=  q / (q + ((1+bLx)(1+bLy))^n),
                                                                               ~ sum_k (b^2 L^2 x |z_k|)^-n
    By hand: `share_grows`, with 0 < power(-L y) <= 1; the n-th power of a limit is the limit of the n-th powers.
    """
    W = power(L * x)
    base = (1 + b * L * x) * (1 + b * L * y)
    return [equal("Odds of a negative score", power(-L * y) / W, base ** (-n)),
            equal("So q of the same size have together", share(q * power(-L * y), W), q / (q + base**n)),
            less("A negative score of larger size has less", base, base.subs(y, y + g)),
            tends("Zeros: rate and constant", L**n * share(r + d, W), L, sp.oo, (r + d) * (b * x) ** (-n)),
            tends("where the negative scores' part d vanishes", power(-L * y), L, sp.oo, 0),
            tends("Only negative ones: the n-th root of their odds, times L^2", L**2 / base, L, sp.oo, 1 / (b**2 * x * y)),
            at_most("For all L their odds are at most (b^2 L^2 x y)^-n", b**2 * L**2 * x * y, base)]


# ------------------------------------------------------------------------------------------- SSA, no positive score

@proof
def none_positive():
    """No positive score. With r zeros, SSA(L z) tends to the average over the zeros, and the negative scores keep

        N / (r + N),  N = sum_k (1 + b L |z_k|)^-n,      so L^n times their mass tends to sum_k (b |z_k|)^-n / r.

    Without zeros, SSA(L z)_j -> |z_j|^-n / sum |z_k|^-n: no collapse, while softmax takes the least negative score alone.
    By hand: a finite sum of odds, as in `several_positive`. As power(-z) = 1/power(z), the bounds there hold here, too.
    """
    return [equal("The power of a negative score", power(-L * y), (1 + b * L * y) ** (-n)),
            tends("vanishes beside a zero, which keeps 1", power(-L * y), L, sp.oo, 0),
            tends("like", L**n * power(-L * y), L, sp.oo, (b * y) ** (-n)),
            tends("Mass of one negative score beside r zeros", L**n * share(power(-L * y), r), L, sp.oo, (b * y) ** (-n) / r),
            tends("Odds of two negative scores", power(-L * x) / power(-L * y), L, sp.oo, (y / x) ** n),
            rises_to("and their logarithm over n stays below the limit's", t_of(-L * y) / n - t_of(-L * (y + g)) / n,
                     L, sp.log(y + g) - sp.log(y))]


@proof
def ties():
    """Equal scores have equal weights, at every scale, in softmax and in SSA; where all scores tie, nothing moves."""
    tied = ssa([L * z, L * z, L * z])
    return [equal("Weight of each of three tied scores", tied[0], sp.Rational(1, 3)),
            equal("and of each of four scores 0", ssa([0, 0, 0, 0])[0], sp.Rational(1, 4)),
            tends("Softmax: two tied above a third", 1 / (2 + sp.exp(-L * g)), L, sp.oo, sp.Rational(1, 2)),
            tends("SSA: two tied above a third, of any sizes", 2 * power(L * (y + g)) / power(L * y), L, sp.oo,
                  2 * ((y + g) / y) ** n)]


@proof
def assumptions():
    """What happens without each assumption.

    - Softmax, no tie at the top: with scores (x, x) it stays at (1/2, 1/2).
    - SSA, two positive scores: with (x, -y) it collapses, see `one_positive`.
    - SSA, n fixed: with n = L, scores (2, 1) and b = 1 collapse.
    - SSA, b fixed: with b = 1/L nothing moves, and the limit is SSA(z; 1) instead of a ratio of powers.
    - L positive: with L -> -infinity the roles of positive and negative scores are exchanged.
    """
    return [equal("Tie: the weight of either", sp.exp(L * x) / (2 * sp.exp(L * x)), sp.Rational(1, 2)),
            tends("One positive score", ssa([L * x, -L * x], n=1)[1], L, sp.oo, 0),
            tends("n grows with L", power(L, b=1, n=L) / power(2 * L, b=1, n=L), L, sp.oo, 0),
            equal("b shrinks with L: the power stays", power(L * z, b=b / L), power(z)),
            equal("L negative: the power is inverted", power(-L * z), 1 / power(L * z))]
