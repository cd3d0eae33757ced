"""SSA is softmax of a signed log, and what follows from that one line.

    power(z) = (1 + b|z|)^(sgn(z) n)                SSA(z)_j = power(z_j) / sum_k power(z_k)         the paper's definition
    t(z)     = n sgn(z) log(1 + b|z|)               SSA(z)   = softmax(t(z))                         the identity

In plain words: t is odd, increasing, once continuously differentiable, with slope n b at 0 and a jump in its second
derivative there. Scaling the scores is scaling b. Unlike softmax, SSA notices a shift of all scores. Softmax is the edge of
the family (n -> infinity with b = 1/n), and its distance to an SSA of finite n is known for scores of a given range; b -> 0
is the plain average; b -> infinity weighs by powers of ratios; n -> infinity with b fixed is hardmax.

All of this holds for every b > 0 and n > 0; the paper's n >= 1 is not needed. The definitions are those of ssa.py, whose
signed_log is t without n; the other modules of theory/ use them from here. The paper defines the power form; the bounds and
rates are ours.
"""

import sympy as sp
from prove import at_most, differ, equal, grows_past, less, proof, rises_to, tends

z, z_1, z_2, c = sp.symbols("z z_1 z_2 c", real=True)  # scores of either sign; a shift
x, y, s, g, L, R = sp.symbols("x y s g L R", positive=True)  # sizes of scores; a gap; a scale; what other tokens add up to
b, n = sp.symbols("b n", positive=True)
u = sp.Symbol("u", nonnegative=True)


def power(z, b=b, n=n):
    """The paper's unnormalised weight of a score."""
    return (1 + b * sp.Abs(z)) ** (sp.sign(z) * n)


def t_of(z, b=b, n=n):
    """t(z), the score that softmax would need to give the same weights: n times the signed_log of ssa.py."""
    return n * sp.sign(z) * sp.log(1 + b * sp.Abs(z))


def ssa(scores, b=b, n=n):
    """The weights of a list of scores, as the paper writes them."""
    powers = [power(score, b, n) for score in scores]
    return [p / sum(powers) for p in powers]


@proof
def power_is_exp_of_t():
    """power(z) = exp(t(z)) for every real z.

    By hand: SSA and softmax(t) divide these same numbers by the sum of these same numbers, so they agree for any K.
    """
    return [equal("The logarithm of the power is t", sp.log(power(z)), t_of(z)),
            equal("At 0, for all b and n", power(0), sp.exp(t_of(0)))]


@proof
def odd():
    """A score of -z undoes what a score of z does."""
    return [equal("t(-z), which is -t(z)", t_of(-z), -t_of(z)),
            equal("power(z) times power(-z)", power(z) * power(-z), 1)]


@proof
def increasing():
    """t increases everywhere, fastest at 0, and |t(z)| <= n b |z|.

    By hand: a continuous function with a positive derivative on both sides of 0 increases on the whole line. For z < 0 the last
    statement follows from t being odd.
    """
    slope = n * b / (1 + b * x)
    return [equal("Slope at x > 0", sp.diff(t_of(x), x), slope),
            equal("Slope at -x < 0", -sp.diff(t_of(-x), x), slope),
            tends("Slope at 0 from the right", t_of(x) / x, x, 0, n * b),
            tends("Slope at 0 from the left", t_of(-x) / (-x), x, 0, n * b),
            less("It is positive", 0, slope),
            at_most("and largest at 0", slope, n * b),
            grows_past("so that t(x), which is |t(-x)| as well, stays below the tangent at 0", t_of(x), n * b * x, x)]


@proof
def smooth_once():
    """The first derivative is continuous at 0, the second jumps there by -2 n b^2, for t and for the power alike.

    (t'' goes from n b^2 to -n b^2, power'' from n(n+1)b^2 to n(n-1)b^2.) An optimizer of first order sees nothing unusual at 0.
    """
    statements = []
    for name, f, second in [("t", t_of, n * b**2), ("the power", power, n * (n + 1) * b**2)]:
        right, left = f(x), f(-x).subs(x, -z)  # the two branches, each smooth up to 0
        jump = sp.limit(right.diff(x, 2), x, 0) - left.diff(z, 2).subs(z, 0)
        statements += [
            tends(f"First derivative of {name} right of 0", right.diff(x), x, 0, n * b),
            equal(f"First derivative of {name} left of 0", left.diff(z).subs(z, 0), n * b),
            equal(f"Second derivative of {name} left of 0", left.diff(z, 2).subs(z, 0), second),
            equal(f"It jumps for {name} by", jump, -2 * n * b**2),
            less("which is never 0", -2 * n * b**2, 0)]
    return statements


@proof
def gradients():
    """What backpropagation computes: with G the gradient that reaches the weights P, and D = sum_k P_k G_k,

        dt_j = P_j (G_j - D),   dz_j = dt_j n b / (1 + b|z_j|),   dn = sum dt_j sgn(z_j) log(1 + b|z_j|),
        db = sum dt_j n z_j / (1 + b|z_j|)

    By hand: K tokens. R stands for all tokens but the ones named, so the two entries of the Jacobian hold for any K; each
    term of the sums depends on one token and its sign only, so three tokens, two positive and one negative, show every term.
    """
    P, Q = sp.exp(z_1) / (sp.exp(z_1) + R), sp.exp(z_1) / (sp.exp(z_1) + sp.exp(z_2) + R)
    Q_2 = sp.exp(z_2) / (sp.exp(z_1) + sp.exp(z_2) + R)
    scores, G = [x, -y, s], sp.symbols("G_1:4", real=True)
    P3 = ssa(scores)
    loss = sum(p * g for p, g in zip(P3, G))
    dt = [p * (g - loss) for p, g in zip(P3, G)]  # here D is the loss itself
    db = sum(d * n * score / (1 + b * sp.Abs(score)) for d, score in zip(dt, scores))
    dn = sum(d * sp.sign(score) * sp.log(1 + b * sp.Abs(score)) for d, score in zip(dt, scores))
    return [equal("Jacobian of softmax, diagonal", P.diff(z_1), P * (1 - P)),
            equal("Jacobian of softmax, elsewhere", Q.diff(z_2), -Q * Q_2),
            equal("Gradient of a positive score", loss.diff(x), dt[0] * n * b / (1 + b * x)),
            equal("Gradient of a negative score", -loss.diff(y), dt[1] * n * b / (1 + b * y)),
            equal("Gradient of b", loss.diff(b), db),
            equal("Gradient of n", loss.diff(n), dn)]


@proof
def scale_is_b():
    """SSA(L z; b) = SSA(z; L b): how large scores are and how large b is are the same question."""
    return [equal("t(L z) with b, and t(z) with L b", t_of(L * z), t_of(z, b=L * b)),
            equal("and so the power", power(L * z), power(z, b=L * b))]


@proof
def shift_matters():
    """Softmax ignores a shift of all scores; SSA does not: 0 is special to it. A large shift, up or down, erases all scores.

    The log odds of two tokens are t(z_1 + c) - t(z_2 + c). By hand: where they tend to 0 for every pair, the weights become
    equal.
    """
    odds = t_of(y + g + c) - t_of(y + c)
    above = odds.subs(c, u)  # a shift upwards
    weights, shifted = ssa([0, 1], b=1, n=1), ssa([1, 2], b=1, n=1)
    return [equal("Softmax: the shift cancels", sp.exp(z_1 + c) / (sp.exp(z_1 + c) + sp.exp(z_2 + c)),
                  sp.exp(z_1) / (sp.exp(z_1) + sp.exp(z_2))),
            equal("SSA of the scores 0 and 1, b = n = 1", weights[0], sp.Rational(1, 3)),
            equal("SSA of the scores 1 and 2", shifted[0], sp.Rational(2, 5)),
            differ("The shift did not cancel", weights[0], shifted[0]),
            less("Among positive scores a shift up narrows the log odds", above.diff(u), 0),
            tends("and far up they vanish", above, u, sp.oo, 0),
            tends("Far down they vanish as well", t_of(-x) - t_of(-x - g), x, sp.oo, 0)]


@proof
def edge_is_softmax():
    """n -> infinity with b = 1/n turns SSA into softmax. How near it is depends on the range of the scores:

        |t(z) - z| <= z^2 / (2n), so for |z_j| <= R every SSA weight is within a factor exp(+-R^2/n) of softmax's.

    The constant is sharp: the log odds of scores R and -R differ from softmax's 2R by R^2/n to first order. Nothing uniform in
    the range is possible: for any fixed n, t(z)/z -> 0.
    By hand: t_j = z_j + d_j with |d_j| <= R^2/(2n) =: e; SSA_j / softmax_j = exp(d_j) / sum_k softmax_k exp(d_k), and both the
    numerator and the average below it lie between exp(-e) and exp(e). Negative scores follow from t being odd.
    """
    t = t_of(x, b=1 / n)
    below = u - u**2 / 2  # for u = x/n: below <= log(1 + u) <= below + u^3/3, and t = n log(1 + u)
    return [tends("The limit of t", t, n, sp.oo, x),
            tends("The limit of the power", power(x, b=1 / n), n, sp.oo, sp.exp(x)),
            tends("The same for a negative score", power(-x, b=1 / n), n, sp.oo, sp.exp(-x)),
            grows_past("Lower bound on the logarithm", below, sp.log(1 + u), u),
            grows_past("Upper bound", sp.log(1 + u), u, u),
            grows_past("and a closer one", sp.log(1 + u), below + u**3 / 3, u),
            equal("The lower bound, times n, at u = x/n", n * below.subs(u, x / n), x - x**2 / (2 * n)),
            tends("So the error is of order 1/n exactly", n * (x - t), n, sp.oo, x**2 / 2),
            tends("Sharp for the log odds of R and -R",
                  n * (2 * R - t_of(R, b=1 / n) + t_of(-R, b=1 / n)), n, sp.oo, R**2),
            tends("but for fixed n nothing holds at all scores", t / x, x, sp.oo, 0)]


@proof
def b_to_zero_is_uniform():
    """b -> 0 gives the plain average; to first order the weights are (1 + n b (z_j - mean z)) / K.

    By hand: |t_j| <= n b |z_j| (see `increasing`), so all powers lie between exp(-n b R) and exp(n b R) for scores of size R,
    and each weight is within a factor exp(+-2 n b R) of 1/K. For the first order, insert power = 1 + n b z + o(b).
    """
    return [tends("Every power tends to 1", power(x), b, 0, 1),
            tends("also of a negative score", power(-x), b, 0, 1),
            tends("First order in b", (power(x) - 1) / b, b, 0, n * x),
            tends("of a negative score", (power(-x) - 1) / b, b, 0, -n * x)]


@proof
def b_to_infinity_is_ratios():
    """b -> infinity weighs positive scores by powers of their ratios, and leaves nothing to the others if some score is positive.

    By `scale_is_b` that is the limit of Theorem 1, where all cases are worked out (theorem1.py).
    """
    return [tends("Odds of two positive scores", power(x) / power(y), b, sp.oo, (x / y) ** n),
            tends("Odds of a zero against a positive score", power(0) / power(x), b, sp.oo, 0),
            tends("Odds of a negative against a positive score", power(-x) / power(y), b, sp.oo, 0)]


@proof
def n_to_infinity_is_hardmax():
    """n -> infinity with b fixed: all weight goes to the largest score, exponentially in n, as n is an inverse temperature.

    The rate is the gap of t/n, which for positive scores stays below log of their ratio, however large b is.
    By hand: t/n is free of n and increases (`increasing`), so whatever the signs, the log odds of the largest score against a
    smaller one are n times a positive rate; K tokens are a finite sum of such odds. Tied largest scores share.
    """
    rate = sp.log((1 + b * (y + g)) / (1 + b * y))
    return [equal("The log odds are n times a rate", t_of(y + g) - t_of(y), n * rate),
            equal("and for negative scores the same", t_of(-y) - t_of(-y - g), n * rate),
            equal("A positive against a negative score: also n times a rate", t_of(x) - t_of(-y),
                  n * (sp.log(1 + b * x) + sp.log(1 + b * y))),
            less("The larger of two positive scores has the larger base, so the rate is positive", 1 + b * y, 1 + b * (y + g)),
            rises_to("and below the log of their ratio", rate, b, sp.log((y + g) / y)),
            tends("At any positive rate, here g, the loser's odds vanish", sp.exp(-n * g), n, sp.oo, 0)]
