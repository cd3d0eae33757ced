"""What theory/ proves about formulas is true of ssa.py's functions: limits, bounds, rates and constants, on random rows."""

import math
import sys
from itertools import product

import pytest
import torch
from conftest import ROOT

from ssa import CosFormer, Entmax15, SASoftmax, Softmax, Sparsemax, Temperature, ssa

sys.path.insert(0, str(ROOT / "theory"))
import consequences  # noqa: E402
import identity  # noqa: E402
import theorem1  # noqa: E402
import theorem2  # noqa: E402

EPS = 1e-9  # rounding of float64, generously
BN = [(0.8, 1.5), (2.72, 1.0), (0.3, 3.0)]


def rows(count, K, size=3.0, seed=0):
    """(count, K) random scores between -size and size, float64."""
    return (2 * torch.rand(count, K, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) - 1) * size


def weights(scorer, *scores, **options):
    """Weights of one row of scores by a scorer's class, float64."""
    return scorer(1, **options)(torch.tensor([[scores]], dtype=torch.float64))[0, 0]


def tensor(scores):
    return torch.tensor([float(s) for s in scores], dtype=torch.float64)


@pytest.mark.parametrize("b, n", BN)
def test_the_definitions_are_those_of_ssa_py(b, n):
    scores = [-2.5, -0.1, 0, 0.7, 30]
    torch.testing.assert_close(tensor(identity.ssa(scores, b, n)), ssa(tensor(scores), b, n))
    torch.testing.assert_close(tensor(identity.t_of(s, b, n) for s in scores).softmax(-1), ssa(tensor(scores), b, n))


def test_edge_of_softmax():
    """Every weight is within exp(+-R^2/n) of softmax's, and for scores R and -R that is nearly attained."""
    z, R, n = rows(200, 6), 3.0, 400.0
    ratio = (ssa(z, 1 / n, n) / z.softmax(-1)).log().abs()
    assert 0 < ratio.max() <= R**2 / n
    pair = torch.tensor([R, -R], dtype=torch.float64)
    odds = ssa(pair, 1 / n, n).log().diff().abs().item()
    assert (2 * R - odds) == pytest.approx(R**2 / n, rel=0.01)


# --------------------------------------------------------------------------------------------------------- theorem 1

@pytest.mark.parametrize("b, n", BN)
@pytest.mark.parametrize("signs", list(product([-1, 0, 1], repeat=3)) + [(1,), (0,), (-1,)])
def test_limit_in_every_case(signs, b, n):
    z = tensor(signs) * torch.tensor([1.0, 2.5, 2.5], dtype=torch.float64)[:len(signs)]  # the last two may tie
    expected = tensor(theorem1.ssa_limit(z.tolist(), n))
    assert (ssa(1e12 * z, b, n) - expected).abs().max() < 1e-9


@pytest.mark.parametrize("m", [1, 2])
def test_softmax_bounds(m):
    z = rows(40, 5)
    z = torch.cat([z, z.amax(-1, keepdim=True).repeat(1, m - 1)], -1)  # m tied winners
    ordered = z.sort(descending=True).values
    for L in (0.5, 2.0, 5.0):
        lost = ordered.mul(L).softmax(-1)[:, m:].sum(-1)
        for mass, gap in zip(lost.tolist(), (ordered[:, 0] - ordered[:, m]).tolist()):
            lower, upper = theorem1.softmax_loser_bounds(L, gap, 4, m)
            assert lower <= mass + EPS and mass <= upper + EPS


@pytest.mark.parametrize("b, n", BN)
def test_several_positive(b, n):
    """Two-sided bounds and context mass at every scale; the constant of the 1/L rate."""
    z = torch.tensor([3.0, 2.0, 0.5, -1.0], dtype=torch.float64)
    positive = z.clamp_min(0)
    limit = positive**n / (positive**n).sum()
    for L in (0.1, 1.0, 10.0, 1e3):
        P, e = ssa(L * z, b, n), 1 / (b * L * 0.5)
        D = (1 + b * L) ** -n / ((1 + b * L * positive[:3]) ** n).sum()
        assert (limit / (1 + e) ** n / (1 + D) <= P + EPS)[:3].all() and (P <= limit * (1 + e) ** n + EPS)[:3].all()
        assert P[0] < limit[0]  # so the mass off the winner is never below its limit
    L = 1e5
    rate = L * (ssa(L * z, b, n) / limit - 1)[:3]
    assert torch.allclose(rate, n / b * (1 / z - (limit[:3] / z[:3]).sum())[:3], rtol=1e-3)


@pytest.mark.parametrize("n, row, extra", [(0.5, [3.0, 2.0, -1.0, -4.0], 1.5 / (3**0.5 + 2**0.5)),
                                           (1.0, [3.0, 2.0, 0.0, 0.0, -1.0], 2 / 5)])
def test_rate_where_nonpositive_scores_count(n, row, extra):
    """At n = 1/2 negative scores are of the 1/L order, at n = 1 zeros: they shift its constant."""
    z, b, L = tensor(row), 0.8, 1e6
    limit = z.clamp_min(0) ** n / (z.clamp_min(0) ** n).sum()
    rate = L * (ssa(L * z, b, torch.tensor(n, dtype=torch.float64)) / limit - 1)[:2]
    alone = n / b * (1 / z[:2] - (limit[:2] / z[:2]).sum())
    assert torch.allclose(rate, alone - extra / b, rtol=1e-3)


@pytest.mark.parametrize("b, n", BN)
def test_one_and_none_positive(b, n):
    L, x, y, h = 1e4, 2.0, 1.0, 3.0
    zeros, negative, none = ([L * x, 0.0, 0.0, -L * y], [L * x, -L * y, -L * h], [0.0, 0.0, -L * y, -L * h])
    mass = 1 - ssa(tensor(zeros), b, n)[0].item()
    top = (1 + b * L * x) ** n
    assert 2 / (2 + top) <= mass + EPS and mass <= 3 / (3 + top) + EPS
    assert ssa(tensor(zeros), b, n)[1:].sum().item() * (b * L * x) ** n == pytest.approx(2, rel=1e-2)
    lost = ssa(tensor(negative), b, n)[1:].sum().item()
    base = [((1 + b * L * x) * (1 + b * L * v)) ** n for v in (y, h)]
    assert 2 / (2 + base[1]) <= lost <= 2 / (2 + base[0])
    assert lost == pytest.approx(sum((b * b * L * L * x * v) ** -n for v in (y, h)), rel=1e-2)
    fading = ssa(tensor(none), b, n)[2:].sum().item()
    assert fading * L**n == pytest.approx(sum((b * v) ** -n for v in (y, h)) / 2, rel=1e-2)


# --------------------------------------------------------------------------------------------------------- theorem 2

@pytest.mark.parametrize("b, n", BN)
def test_one_score_grows(b, n):
    others, x_0 = [1.0, 0.0, -2.0], 1 / b
    A, B = sum(math.exp(v) for v in others), sum((1 + b * abs(v)) ** (math.copysign(n, v)) for v in others)
    for x in (x_0, 2 * x_0 + 1, 20.0 + x_0, 1e3):
        soft = tensor([x, *others]).softmax(-1)[1:].sum().item()
        rest = ssa(tensor([x, *others]), b, n)[1:].sum().item()
        assert soft == pytest.approx(float(theorem2.softmax_rest(x, A)), rel=1e-9)
        assert rest == pytest.approx(float(theorem2.ssa_rest(x, B, b, n)), rel=1e-9)
        assert (b * x) ** -n * B / (2**n + B) <= rest * (1 + EPS) and rest <= B * (1 + b * x) ** -n * (1 + EPS)
        assert A * math.exp(-x) / (1 + A * math.exp(-x_0)) <= soft * (1 + EPS) and soft <= A * math.exp(-x) * (1 + EPS)


def test_score_table():
    """At the score that the table names, the winner has 99 %."""
    for K, soft, signed in theorem2.score_table(lengths=(16, 1024), ns=(1, 1.5, 5), bs=(0.8, 2.72)):
        zeros = torch.zeros(K, dtype=torch.float64)
        zeros[0] = soft
        assert zeros.softmax(-1)[0].item() == pytest.approx(0.99)
        for (b, n), score in signed.items():
            zeros[0] = score
            assert ssa(zeros, b, n)[0].item() == pytest.approx(0.99)


# ------------------------------------------------------------------------------------------------------- consequences

@pytest.mark.parametrize("b, n", BN)
def test_entropy_bounds(b, n):
    s, K = 3.0, 6
    z, signed = rows(300, K, s), float(consequences.spread_of_t(s, b, n))
    for P, spread in [(ssa(z, b, n), signed), (z.softmax(-1), 2 * s)]:
        H, M = -(P * P.log()).sum(-1), P.amax(-1)
        assert (H >= -M.log() - EPS).all() and (H >= -M * M.log() - (1 - M) * (1 - M).log() - EPS).all()
        assert (M <= float(consequences.largest_weight_bound(K, spread)) + EPS).all()
        assert (H >= math.log(1 + (K - 1) * math.exp(-spread)) - EPS).all() and (H >= math.log(K) - spread - EPS).all()


@pytest.mark.parametrize("b, n", BN)
def test_lipschitz_and_gradients(b, n):
    for scorer, constant in [(lambda z: z.softmax(-1), 0.5), (lambda z: ssa(z, b, n), n * b / 2)]:
        z, step = rows(300, 5, seed=1), rows(300, 5, 0.5, seed=2)
        for order in (1, 2, math.inf):
            moved = (scorer(z + step) - scorer(z)).norm(order, -1)
            assert (moved <= constant * step.norm(order, -1) + EPS).all()
        tiny = torch.tensor([1e-5, -1e-5], dtype=torch.float64)
        assert (scorer(tiny) - scorer(0 * tiny)).norm().item() == pytest.approx(constant * tiny.norm().item(), rel=1e-4)
    x, y = 1e6, 2.0
    z = torch.tensor([x, y, -1.0], dtype=torch.float64, requires_grad=True)
    loser = torch.autograd.grad(ssa(z, b, n)[1], z)[0][1].item()
    assert loser * x**n == pytest.approx((1 + b * y) ** n / b**n * n * b / (1 + b * y), rel=1e-3)


@pytest.mark.parametrize("b, n", BN)
def test_an_absolute_error_of_one_score(b, n):
    """The log odds against a score of 0 move by n b e / (1 + b size) at most, and by more than that of the larger size."""
    for small, e in [(0.5, 0.5), (1.0, 0.1), (20.0, 3.0)]:
        near, far = (ssa(tensor([size, 0]), b, n).log().diff().item() for size in (small, small + e))
        assert n * b * e / (1 + b * (small + e)) < near - far < n * b * e / (1 + b * small)


@pytest.mark.parametrize("b, n", BN)
def test_rounding_to_bfloat16(b, n):
    z, e = rows(300, 8, 100.0), 2.0**-8
    rounded = z.bfloat16().double()
    assert ((rounded / z - 1).abs() <= e).all()
    change = (ssa(rounded, b, n) / ssa(z, b, n)).log().abs().max().item()
    soft = (rounded.log_softmax(-1) - z.log_softmax(-1)).abs().max().item()
    assert change <= -2 * n * math.log1p(-e) < 2 * e * 100 and soft <= 2 * e * 100
    assert soft > -2 * n * math.log1p(-e)  # softmax leaves SSA's bound behind


# ------------------------------------------------------------------------------------------------------- alternatives

def test_one_hot_at_a_finite_gap():
    for scorer, threshold in [(Sparsemax, 1.0), (Entmax15, 2.0)]:
        assert weights(scorer, threshold, 0, -0.5)[0] == 1 and weights(scorer, threshold - 1e-3, 0, -0.5)[0] < 1
    for row in rows(200, 4, 0.7).sort(descending=True).values:
        gap, lost = (row[0] - row[1]).item(), 1 - weights(Sparsemax, *row.tolist())[0].item()
        assert max(1 - gap, 0) / 2 - EPS <= lost <= 3 * max(1 - gap, 0) / 4 + EPS
    assert weights(Sparsemax, 0.3, 0, 0, 0)[0].item() == pytest.approx(1 - 3 * 0.7 / 4)
    d = 0.999  # L g / 2
    assert weights(Entmax15, 2 * d, 0)[1].item() == pytest.approx((1 - d) ** 2, rel=1e-2)


def test_temperature_and_sa_softmax():
    hot = weights(Temperature, 9.0, 1.0, 1.0, tau=2.0)
    torch.testing.assert_close(hot, weights(Softmax, 4.5, 0.5, 0.5), rtol=1e-6, atol=0)
    two = weights(SASoftmax, 5.0, 2.0)
    assert (two[1] / two[0]).item() == pytest.approx(2 / 5 * math.exp(-3))
    x = 30.0
    assert weights(SASoftmax, x, 0.5, -2)[1].item() * x * math.exp(x) == pytest.approx(2.5 * math.exp(0.5), rel=0.1)
    assert weights(SASoftmax, -100.0, -400.0)[0].item() == pytest.approx(1 - 100 / 400)
    assert weights(SASoftmax, -1.0, -1.0).tolist() == [0, 0]


def test_cosformer_ignores_scale_and_one_key_grows_polynomially():
    q, k = rows(3, 4, seed=3), rows(3, 4, seed=4)
    scorer = CosFormer(1, horizon=8)
    base = scorer.weights(q[None], k[None])
    torch.testing.assert_close(scorer.weights(1e3 * q[None], 1e3 * k[None]), base)
    q, k = torch.ones(1, 2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)
    lost = []
    for x in (1e4, 2e4):
        grown = torch.cat([k[:2], x * k[2:]])
        lost.append(scorer.weights(q[None], grown[None])[0, 0, :2].sum().item())
    assert lost[0] / lost[1] == pytest.approx(2, rel=1e-3)
