"""theory/: every proof runs, its statements hold in numbers, its checkers refuse wrong statements, wrong definitions break it.

That the formulas are true of ssa.py's functions is tested in test_theory_numbers.py.
"""

import functools
import random
import sys

import mpmath
import pytest
import sympy as sp
from conftest import ROOT
from sympy.core.function import AppliedUndef

sys.path.insert(0, str(ROOT / "theory"))
import alternatives  # noqa: E402
import consequences  # noqa: E402
import identity  # noqa: E402
import prove  # noqa: E402
import theorem1  # noqa: E402
import theorem2  # noqa: E402

MODULES = [identity, theorem1, theorem2, consequences, alternatives]
PROOFS = {f"{module.__name__}.{name}": f for module in MODULES for name, f in prove.proofs(module).items()}
CHECKERS = ["equal", "tends", "at_most", "less", "grows_past", "rises_to", "differ"]
OFF = sp.Rational(9, 8)  # what a wrong constant is wrong by


# ------------------------------------------------------------------------------------------------- proofs and checkers

def wrong(checker, args):
    """Arguments like a true statement's, but for a wrong constant or the wrong direction."""
    words, *rest = args
    if checker == "differ":
        yield [words, rest[0], rest[0]]
    elif checker in ("equal", "tends", "rises_to"):
        where = {"equal": 1, "tends": 3, "rises_to": 2}[checker]
        value = sp.sympify(rest[where])
        yield [words, *rest[:where], value * OFF if value.is_finite and value != 0 else sp.Integer(1), *rest[where + 1:]]
        if checker == "rises_to":
            yield [words, -rest[0], rest[1], -value]  # falls to its limit
    else:
        yield [words, rest[1], rest[0], *rest[2:]]
        if checker == "less":
            yield [words, rest[1], rest[1], *rest[2:]]  # equal is not less


@pytest.mark.parametrize("name", PROOFS)
def test_proof(name, monkeypatch):
    """It proves something; the same checks refuse a wrong constant or direction; and the statements hold at random points."""
    module, checked = sys.modules[PROOFS[name].__module__], []
    monkeypatch.setattr(sp, "limit", functools.lru_cache(sp.limit))  # the wrong statements ask for the same limits
    for checker in CHECKERS:
        if hasattr(module, checker):
            monkeypatch.setattr(module, checker, lambda *args, c=checker: checked.append((c, args)) or getattr(prove, c)(*args))
    statements = PROOFS[name]()
    assert statements and len(checked) >= len(statements)
    for checker, args in checked:
        for mutant in wrong(checker, args):
            with pytest.raises(prove.Unproved):
                print("accepted:", checker, getattr(prove, checker)(*mutant))
    for statement in statements:
        holds(statement, random.Random(0))


@mpmath.workdps(400)
def holds(statement, rng, points=3):
    """Evaluate a statement at random points of its domain with hundreds of digits; a limit at a point near it."""
    relation = statement.relation
    left, right = (side.subs(statement.where, simultaneous=True) for side in (relation.lhs, relation.rhs))
    left, right = (side.replace(lambda e: isinstance(e, AppliedUndef), lambda e: sp.sin(*e.args)) for side in (left, right))
    moving = {}
    if isinstance(left, sp.Limit):
        left, x, to, _ = left.args
        moving = {x: mpmath.mpf(10) ** 60 if to == sp.oo else mpmath.mpf(to) + mpmath.mpf(10) ** -60}
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    # by lambdify, because sympy's own substitution would work out (1 + 10^-60)^(10^60) exactly
    sides = sp.lambdify(symbols, [left.doit(), right.doit()], "mpmath")
    for _ in range(points):
        sizes = [mpmath.mpf(rng.randint(1, 4) if v.is_integer else rng.uniform(0.2, 3)) for v in symbols]
        values = [moving.get(v, size if v.is_nonnegative else size * rng.choice([-1, 1])) for v, size in zip(symbols, sizes)]
        left, right = (mpmath.mpf(side) for side in sides(*values))
        close = mpmath.mpf("0.03" if moving else "1e-300") * (1 + abs(right))
        if moving and right == mpmath.inf:
            assert left > 1e6, (statement, left)
        else:
            assert {sp.Eq: abs(left - right) <= close, sp.Le: left <= right + close, sp.Lt: left < right,
                    sp.Ne: abs(left - right) > close}[type(relation)], (statement, values, left, right)


# ----------------------------------------------------------------------------------------------------- wrong definitions

b, n = identity.b, identity.n
WRONG = {  # function: {what is wrong with it: (the wrong version, proofs that must notice)}
    "power": {
        "no sign": (lambda z, b=b, n=n: (1 + b * abs(z)) ** n,
                    "identity.power_is_exp_of_t identity.odd identity.smooth_once identity.b_to_infinity_is_ratios "
                    "theorem1.several_positive theorem1.assumptions alternatives.why_a_power"),
        "twice n": (lambda z, b=b, n=n: (1 + b * abs(z)) ** (2 * sp.sign(z) * n),
                    "identity.gradients identity.shift_matters identity.edge_is_softmax identity.b_to_zero_is_uniform "
                    "theorem1.several_positive_bounds theorem1.several_positive_rate theorem1.one_positive "
                    "theorem1.none_positive theorem1.ties theorem2.others_bounded theorem2.falling_score "
                    "theorem2.assumptions consequences.entropy_from_range "
                    "consequences.gradient_of_losers consequences.lipschitz alternatives.entmax alternatives.cosformer "
                    "alternatives.hardmax"),
        "no n": (lambda z, b=b, n=n: (1 + b * abs(z)) ** sp.sign(z), "consequences.n_can_grow"),
        "b outside": (lambda z, b=b, n=n: (b + abs(z)) ** (sp.sign(z) * n), "identity.scale_is_b")},
    "t_of": {
        "no sign": (lambda z, b=b, n=n: n * sp.log(1 + b * abs(z)), "identity.odd identity.increasing"),
        "no n": (lambda z, b=b, n=n: sp.sign(z) * sp.log(1 + b * abs(z)),
                 "identity.power_is_exp_of_t identity.smooth_once identity.n_to_infinity_is_hardmax "
                 "theorem1.context_mass theorem1.none_positive theorem2.assumptions consequences.entropy_from_range "
                 "consequences.shifted_scores"),
        "linear": (lambda z, b=b, n=n: n * b * z, "identity.shift_matters identity.edge_is_softmax"),
        "b outside": (lambda z, b=b, n=n: n * sp.sign(z) * sp.log(1 + abs(z)) * b, "identity.scale_is_b")},
    "share": {"adds S twice": (lambda S, W: S / (W + 2 * S),
                               "theorem1.softmax_bounds theorem1.context_mass theorem1.one_positive"),
              "of the others": (lambda S, W: W / (W + S), "theorem1.share_grows theorem1.softmax_rate alternatives.tail_decides "
                                "alternatives.temperature alternatives.cosformer")},
    "softmax_loser_bounds": {"no m": (lambda L, g, k, m=1: (1 / (1 + sp.exp(L * g)), k / (k + sp.exp(L * g))),
                                      "theorem1.softmax_bounds"),
                             "half the gap": (lambda L, g, k, m=1: (0, k / (k + sp.exp(L * g / 2))), "alternatives.hardmax")},
    "softmax_rest": {"x doubled": (lambda x, A: A / (A + sp.exp(2 * x)), "theorem2.softmax_collapse theorem2.score_for_share")},
    "ssa_rest": {"n + 1": (lambda x, B, b=b, n=n: B / (B + (1 + b * x) ** (n + 1)),
                           "theorem2.ssa_collapse theorem2.score_for_share theorem2.slower theorem2.assumptions "
                           "consequences.gradient_of_losers")},
    "softmax_score_for": {"odds inverted": (lambda share, A: sp.log(A * (1 - share) / share),
                                            "theorem2.score_for_share theorem2.context_length")},
    "ssa_score_for": {"n for 1/n": (lambda share, B, b=b, n=n: ((B * share / (1 - share)) ** n - 1) / b,
                                    "theorem2.score_for_share theorem2.context_length")},
    "binary_entropy": {"half": (lambda p: -p * sp.log(p) / 2, "consequences.entropy_at_collapse")},
    "largest_weight_bound": {"K for K - 1": (lambda K, d: 1 / (1 + K * sp.exp(-d)),
                                             "consequences.entropy_from_range consequences.bounded_scores_disperse")},
    "sa_factor": {"not clipped at 0": (lambda z, low, high: (z - low) / (high - low), "alternatives.sa_softmax")}}
CASES = [(f, what, proof) for f, versions in WRONG.items() for what, (_, names) in versions.items() for proof in names.split()]


@pytest.mark.parametrize("function, what, name", CASES)
def test_a_wrong_definition_breaks_the_proof(function, what, name, monkeypatch):
    for module in MODULES:
        if hasattr(module, function):
            monkeypatch.setattr(module, function, WRONG[function][what][0])
    with pytest.raises(prove.Unproved):
        PROOFS[name]()


def test_wrong_definitions_reach_every_proof_that_uses_them():
    used = {name: [f for f in ("power", "t_of") if f in proof.__code__.co_names] for name, proof in PROOFS.items()}
    reached = {(proof, f) for f, _, proof in CASES}
    assert not [(name, f) for name, fs in used.items() for f in fs if (name, f) not in reached]


# ----------------------------------------------------------------------------------- what sympy's own answers could hide

x, y = identity.x, identity.y


@pytest.mark.parametrize("checker, args", [
    ("equal", ((1 + x) ** 2, 1 + x**2)), ("equal", (sp.sqrt(identity.z**2), identity.z)),  # true for z > 0 alone
    ("tends", (sp.sin(x), x, sp.oo, 0)), ("tends", (x**n * sp.exp(-x), x, sp.oo, 1)), ("tends", (1 / x, x, 0, 0)),
    ("at_most", (x, x**2)), ("at_most", (x, y)), ("less", (x, x)), ("less", (0, identity.u)),  # u may be 0
    ("grows_past", (sp.log(1 + identity.u), identity.u / 2, identity.u)),  # true for large u only
    ("grows_past", (1, sp.exp(-identity.u), identity.u)),  # true at 0 only
    ("rises_to", (1 - sp.exp(-x), x, 2)), ("rises_to", (1 + sp.exp(-x), x, 1)),  # the second falls to 1
    ("differ", (sp.sin(1) ** 2 + sp.cos(1) ** 2, 1)), ("differ", (x, y))])  # x and y may be equal
def test_checkers_refuse(checker, args):
    with pytest.raises(prove.Unproved):
        getattr(prove, checker)("wrong", *args)


def test_what_a_notebook_shows():
    statement = prove.at_most("One", y, x, {x: y + identity.u})
    assert statement._repr_markdown_() == r"One: $\;\displaystyle y \leq x$ $\quad (\text{for } x = u + y, u \ge 0, y > 0)$"
    assert prove.equal("Half", sp.Rational(1, 2), sp.Rational(1, 2))._repr_markdown_() == r"Half: $\;\displaystyle \frac{1}{2}$"
