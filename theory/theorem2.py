"""Theorem 2: one score x grows, the others stay. Softmax gives it everything exponentially fast, SSA polynomially.

In plain words, as the paper has it: one large score, an outlier, soon has all of softmax's weight; under SSA the others keep
a part that shrinks only like a power. With A = sum e^(z_k) and B = sum (1 + b|z_k|)^(sgn(z_k) n) over the other tokens, the
mass that remains for them is

    softmax:  A / (A + e^x)  = Theta(e^-x)                         SSA:  B / (B + (1 + b x)^n)  = Theta(x^-n)

Ours is stronger in this: closed forms, two-sided constants, the score at which the winner takes a given share, in closed form
too, with its growth in the context length (log K for softmax, K^(1/n) for SSA), and the mirror case of one score that falls,
where SSA's slowness is a price: **a very negative score does not hide a token from SSA as it does from softmax**.

Assumptions, each with a counterexample in `assumptions`: the other scores, their number, b and n stay fixed.
That n >= 1 is not needed: n > 0 will do.
"""

import sympy as sp
from identity import L, b, g, n, power, t_of, x, y
from prove import at_most, equal, grows_past, less, proof, rises_to, tends

A, B, k, s = sp.symbols("A B k s", positive=True)  # the others: sums of their powers, their number K - 1, their size
x_0 = sp.Symbol("x_0", nonnegative=True)  # where the grown score starts
u = sp.Symbol("u", nonnegative=True)
share = sp.Symbol("alpha", positive=True)  # the winner's share, below 1
odds = sp.Symbol("o", positive=True)  # alpha / (1 - alpha)


def softmax_rest(x, A):
    """The mass softmax leaves to the others, A = sum of their e^(z_k)."""
    return A / (A + sp.exp(x))


def ssa_rest(x, B, b=b, n=n):
    """The mass SSA leaves to the others, B = sum of their powers; x >= 0."""
    return B / (B + (1 + b * x) ** n)


def softmax_score_for(share, A):
    """The score at which softmax gives the winner this share."""
    return sp.log(A * share / (1 - share))


def ssa_score_for(share, B, b=b, n=n):
    """The score at which SSA gives the winner this share; where B share/(1 - share) < 1 a negative score would do."""
    return ((B * share / (1 - share)) ** (1 / n) - 1) / b


def score_table(share=0.99, lengths=(16, 128, 1024, 8192, 131072), ns=(1, 1.5, 2, 3, 5), bs=(0.8, 2.72)):
    """Rows (K, softmax's score, {(b, n): SSA's score}): the score at which one of K tokens takes `share`, the others at 0."""
    return [(K, float(softmax_score_for(share, K - 1)), {(b, n): ssa_score_for(share, K - 1, b, n) for b in bs for n in ns})
            for K in lengths]


@proof
def softmax_collapse():
    """A e^-x / (1 + A e^-x_0)  <=  remaining mass  <=  A e^-x      for all x >= x_0, so it is Theta(e^-x)."""
    return [equal("The mass is A e^-x over something near 1", softmax_rest(x, A), A * sp.exp(-x) / (1 + A * sp.exp(-x))),
            grows_past("which is at least that at x_0", 1 / (1 + A * sp.exp(-x_0)), 1 / (1 + A * sp.exp(-x_0 - u)), u),
            less("and the other factor is below 1", 1 / (1 + A * sp.exp(-x)), 1),
            tends("Sharp constant", sp.exp(x) * softmax_rest(x, A), x, sp.oo, A)]


@proof
def ssa_collapse():
    """B (1 + b x)^-n / (1 + B (1 + b x_0)^-n)  <=  remaining mass  <=  B (1 + b x)^-n      for all x >= x_0 >= 0,

    and b x <= 1 + b x <= 2 b x for x >= 1/b, so it is Theta((b x)^-n): at most B (b x)^-n, at least that over
    2^n (1 + B 2^-n), by the bound at x_0 = 1/b.
    """
    inverse = (1 + b * x) ** -n
    return [equal("The mass is B (1 + b x)^-n over something near 1", ssa_rest(x, B), B * inverse / (1 + B * inverse)),
            grows_past("which is at least that at x_0", 1 / (1 + B * (1 + b * x_0) ** -n),
                       1 / (1 + B * (1 + b * (x_0 + u)) ** -n), u),
            less("and the other factor is below 1", 1 / (1 + B * inverse), 1),
            less("b x is a lower bound of the base", b * x, 1 + b * x),
            at_most("and 2 b x an upper one, from x = 1/b on", 1 + b * x, 2 * b * x, {x: 1 / b + u}),
            tends("Sharp constant", x**n * ssa_rest(x, B), x, sp.oo, B / b**n)]


@proof
def slower():
    """Of any two such masses, whatever A, B, b and n, softmax's is smaller in the end: their ratio vanishes like x^n e^-x."""
    return [tends("Softmax's mass over SSA's", softmax_rest(x, A) / ssa_rest(x, B), x, sp.oo, 0),
            tends("Constant of that ratio", sp.exp(x) * x**-n * softmax_rest(x, A) / ssa_rest(x, B), x, sp.oo, A * b**n / B)]


@proof
def others_bounded():
    """The others lie between -s and s: then A and B are known up to a factor, (K-1) (1+bs)^-n <= B <= (K-1) (1+bs)^n.

    By hand: the power increases (identity.increasing), so each of the K - 1 terms lies between those of -s and s.
    """
    return [equal("The largest term of B", power(s), (1 + b * s) ** n),
            equal("The smallest", power(-s), (1 + b * s) ** -n),
            grows_past("A positive score adds at least 1 to B", 1, power(s), s),
            grows_past("and a negative one at most 1", power(-s), 1, s)]


@proof
def score_for_share():
    """The winner takes the share alpha at x = log(A alpha/(1-alpha)) and at x = ((B alpha/(1-alpha))^(1/n) - 1) / b.

    To go from 90 % to 99 % softmax's score needs log 11 more, whatever the context; SSA's 1 + b x needs 11^(1/n) times as much.
    """
    domain = {share: odds / (1 + odds)}  # 0 < alpha < 1
    step_soft = softmax_score_for(sp.Rational(99, 100), A) - softmax_score_for(sp.Rational(9, 10), A)
    step = (1 + b * ssa_score_for(sp.Rational(99, 100), B)) / (1 + b * ssa_score_for(sp.Rational(9, 10), B))
    return [equal("Softmax: what remains at that score", softmax_rest(softmax_score_for(share, A), A), 1 - share,
                  domain),
            equal("SSA: what remains at that score", ssa_rest(ssa_score_for(share, B), B), 1 - share, domain),
            equal("Softmax: from 90 % to 99 %", step_soft, sp.log(11)),
            equal("SSA: from 90 % to 99 %, in 1 + b x", step, 11 ** (1 / n))]


@proof
def context_length():
    """With all others at 0, A = B = K - 1 =: k: the score needed grows like log k for softmax, like k^(1/n) for SSA.

    A price as well as a gift: no outlier takes a long context by accident, and no retrieval of one token among many succeeds
    without a score of that order, or a larger n. (o is alpha / (1 - alpha), 99 for 99 %.)
    """
    soft, signed = softmax_score_for(odds / (1 + odds), k), ssa_score_for(odds / (1 + odds), k)
    return [equal("Softmax's score", soft, sp.log(k * odds)),
            equal("SSA's score", signed, ((k * odds) ** (1 / n) - 1) / b),
            tends("Softmax, per log k", sp.log(k * odds) / sp.log(k), k, sp.oo, 1),
            tends("SSA, per k^(1/n)", ((k * odds) ** (1 / n) - 1) / b / k ** (1 / n), k, sp.oo, odds ** (1 / n) / b)]


@proof
def falling_score():
    """One score falls to -x instead: the mass that it keeps is Theta(e^-x) under softmax, Theta(x^-n) under SSA.

    So a model cannot switch a token off by a large negative score alone: at b x = 99 and n = 1 it keeps a hundredth of the
    weight of a score of 0. (A mask is different: ssa.py removes masked tokens exactly.)
    """
    keeps = power(-x) / (power(-x) + B)
    soft = sp.exp(-x) / (sp.exp(-x) + A)
    return [equal("SSA: what it keeps", keeps, 1 / (1 + B * (1 + b * x) ** n)),
            tends("Sharp constant, softmax", sp.exp(x) * soft, x, sp.oo, 1 / A),
            tends("Sharp constant, SSA", x**n * keeps, x, sp.oo, 1 / (B * b**n)),
            equal("The example, against a score of 0", power(-99, b=1, n=1) / power(0), sp.Rational(1, 100))]


@proof
def assumptions():
    """What happens without each assumption.

    - Others fixed: where a rival stays at a fixed ratio below the winner, we are in Theorem 1, and its odds never vanish.
    - Their number fixed: with K - 1 = e^x others at 0, softmax stays at 1/2, too.
    - n fixed: with n = x, b = 1, SSA's mass falls faster than e^-x, whatever the others.
    - b fixed: with b = (e^x - 1)/x, SSA's mass falls exactly like e^(-n x) if all others are at 0. (B grows with b: beside
      another positive score y it falls like x^-n still, as theorem1.context_mass says.)
    """
    growing = (sp.exp(x) - 1) / x
    rival = t_of(L * (y + g)) / n - t_of(L * y) / n
    return [rises_to("A rival that grows along: log odds over n", rival, L, sp.log(y + g) - sp.log(y)),
            equal("As many others as e^x: they keep", softmax_rest(x, sp.exp(x)), sp.Rational(1, 2)),
            tends("n grows with x: odds of a score y", sp.exp(x) * power(y, b=1, n=x) / power(x, b=1, n=x), x, sp.oo, 0),
            tends("b grows with x: k others at 0 keep", sp.exp(n * x) * ssa_rest(x, k, b=growing), x, sp.oo, k),
            tends("but the odds of a positive score y fall like", x**n * power(y, b=growing) / power(x, b=growing), x, sp.oo,
                  y**n)]
