"""How theory/ proves things: a few checkers that raise Unproved unless sympy establishes a statement on its whole domain.

A proof is a function marked @proof. It derives something, ends in calls of the checkers below, and returns the Statements
that they established, so that a notebook can show them and pytest can run them. The domain of a statement is what its
symbols say (positive, nonnegative, real, integer) and, where that is not enough, `where`: {x: y + g} with g positive says
x > y. What sympy does not prove (mostly the step from K tokens to a lemma about one or two numbers) stands in the
docstring of the proof behind the words "By hand".

    equal      left = right, because the difference simplifies to 0
    tends      expr -> value, by sympy's limit
    at_most    left <= right, because right - left can be written with a manifest sign
    less       left < right, likewise
    grows_past left <= right for x >= 0, because it holds at x = 0 and right - left does not fall
    rises_to   expr < bound for x > 0, because expr increases and bound is its limit
    differ     two closed expressions are not equal (counterexamples)

A checker that finds nothing raises: "not proved" is never taken for "true". Sympy itself is trusted; as a guard against its
mistakes, tests/test_theory.py also evaluates every statement at random points in high precision, and hands every checker
wrong statements, which it must refuse.
"""

from dataclasses import dataclass, field

import sympy as sp


class Unproved(AssertionError):
    """Sympy could not establish the statement: it is wrong, or it needs another formulation."""


@dataclass(frozen=True)
class Statement:
    """Words, the sympy relation that was proved, and the substitutions that express its domain."""

    words: str
    relation: sp.Basic
    where: dict = field(default_factory=dict)

    def _repr_markdown_(self):
        """What a notebook shows: words, relation, domain. Where sympy has already written both sides alike, one of them."""
        left, right = self.relation.args
        shown = sp.latex(left if left == right else self.relation)
        given = [f"{sp.latex(symbol)} = {sp.latex(value)}" for symbol, value in self.where.items()]
        free = set().union(*(sp.sympify(value).free_symbols for value in self.where.values())) - set(self.where)
        given += [sp.latex(v) + (" > 0" if v.is_positive else r" \ge 0") for v in sorted(free, key=str)]
        domain = f" $\\quad (\\text{{for }} {', '.join(given)})$" if given else ""
        return f"{self.words}: $\\;\\displaystyle {shown}${domain}"


def proof(function):
    """Mark a function as a proof: no arguments, returns Statements, raises Unproved. Tests run whatever is marked."""
    function.is_proof = True
    return function


def proofs(module):
    """{name: function} of all proofs that a module defines, in the order of the file."""
    return {name: f for name, f in vars(module).items() if getattr(f, "is_proof", False) and f.__module__ == module.__name__}


def show(*statements):
    """Display statements, or a proof's list of them, one below the other in a notebook."""
    from IPython.display import Markdown, display  # here, because pytest does not need it

    for statement in sp.flatten(statements):
        display(Markdown(statement._repr_markdown_()))


# ---------------------------------------------------------------------------------------------------------- checkers

def equal(words, left, right, where=None):
    """Prove left = right."""
    difference = _inside(sp.sympify(left) - right, where)
    for rewrite in (sp.expand, _logs_apart, sp.simplify, lambda d: sp.simplify(_logs_apart(d))):
        if rewrite(difference) == 0:
            return Statement(words, sp.Eq(left, right, evaluate=False), where or {})
        if abs(_value_somewhere(difference) or 0) > sp.Float("1e-20"):
            break
    raise Unproved(f"{words}: {left} = {right} is not proved")


def tends(words, expr, x, to, value, side="+"):
    """Prove that expr tends to value as x tends to `to` (from the right, where `to` is a number)."""
    try:
        found = sp.limit(expr, x, to, side)
    except NotImplementedError as error:
        raise Unproved(f"{words}: sympy does not know the limit of {expr}") from error
    value = sp.sympify(value)
    if found != value and not (found.is_finite is not False and value.is_finite and sp.simplify(found - value) == 0):
        raise Unproved(f"{words}: the limit of {expr} is {found}, not {value}")
    return Statement(words, sp.Eq(sp.Limit(expr, x, to, side), value, evaluate=False))


def at_most(words, left, right, where=None):
    """Prove left <= right: some way of writing right - left shows that it is nonnegative."""
    if not _manifestly("is_nonnegative", _inside(sp.sympify(right) - left, where)):
        raise Unproved(f"{words}: {left} <= {right} is not proved")
    return Statement(words, sp.Le(left, right, evaluate=False), where or {})


def less(words, left, right, where=None):
    """Prove left < right: some way of writing right - left shows that it is positive."""
    if not _manifestly("is_positive", _inside(sp.sympify(right) - left, where)):
        raise Unproved(f"{words}: {left} < {right} is not proved")
    return Statement(words, sp.Lt(left, right, evaluate=False), where or {})


def grows_past(words, left, right, x):
    """Prove left <= right for all x >= 0 (x a nonnegative or positive symbol): true at 0, and right - left does not fall."""
    difference = sp.sympify(right) - left
    if not (_manifestly("is_nonnegative", difference.subs(x, 0)) and _manifestly("is_nonnegative", difference.diff(x))):
        raise Unproved(f"{words}: {left} <= {right} does not follow by growth in {x}")
    return Statement(words, sp.Le(left, right, evaluate=False))


def rises_to(words, expr, x, bound):
    """Prove expr < bound for all x > 0: expr increases in x, and bound is its limit for x -> infinity."""
    if not _manifestly("is_positive", sp.diff(expr, x)):
        raise Unproved(f"{words}: {expr} is not proved to increase in {x}")
    tends(words, expr, x, sp.oo, bound)
    return Statement(words, sp.Lt(expr, bound, evaluate=False))


def differ(words, left, right):
    """Prove that two expressions without a free parameter, or of manifestly different size, are not equal."""
    difference = sp.sympify(left) - right
    if sp.simplify(difference).is_zero is not False:
        raise Unproved(f"{words}: {left} != {right} is not proved")
    return Statement(words, sp.Ne(left, right, evaluate=False))


def _inside(expr, where):
    return expr.subs(where, simultaneous=True) if where else expr


def _logs_apart(expr):
    return sp.expand(sp.expand_log(expr))


def _value_somewhere(expr):
    """The value at one point of the domain, or None. Good enough to refute, which saves simplify's minutes, never to prove."""
    point = {v: sp.Integer(i + 2) if v.is_integer else sp.Rational(7 + 3 * i, 11)
             for i, v in enumerate(sorted(expr.free_symbols, key=str))}
    value = expr.subs(point).evalf(30)
    return value if value.is_Float or value.is_Rational else None


def _manifestly(sign, expr):
    """Does one of a few ways of writing expr have the sign that sympy derives from its symbols alone?"""
    expr = sp.sympify(expr)
    if (_value_somewhere(expr) or 0) < -sp.Float("1e-20"):
        return False
    forms = (lambda e: e, lambda e: sp.factor(sp.together(e)), sp.expand, sp.simplify, lambda e: sp.factor(sp.simplify(e)))
    return any(getattr(form(expr), sign) is True for form in forms)
