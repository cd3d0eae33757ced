"""Intervals against hand-made numbers and simulation."""

import math

import numpy as np
import pytest

from intervals import bootstrap, mcnemar, paired_bootstrap, paired_t_interval, t_interval, wilson


def test_a_t_interval_by_hand_and_paired():
    result = t_interval([1.0, 2.0, 3.0])
    half = 4.302653 / math.sqrt(3)  # standard deviation 1
    assert (result["mean"], result["n"]) == (2.0, 3)
    assert (result["low"], result["high"]) == (pytest.approx(2 - half, abs=1e-5), pytest.approx(2 + half, abs=1e-5))
    assert t_interval([5]) == dict(mean=5.0, low=None, high=None, n=1)
    # Seeds that differ a lot, scorers that differ little: only the paired interval sees it.
    first, second = [10.0, 20.0, 30.0], [9.0, 19.1, 28.9]
    assert paired_t_interval(first, second)["low"] > 0
    assert t_interval(first)["low"] < t_interval(second)["mean"]
    with pytest.raises(ValueError):
        paired_t_interval([1], [1, 2])
    with pytest.raises(ValueError):
        t_interval([])


def test_bootstrap_intervals_cover_the_truth_about_as_often_as_they_say():
    generator, covered, covered_ratio = np.random.default_rng(1), 0, 0
    for trial in range(300):
        values, weights = generator.exponential(1.0, 60), generator.integers(1, 9, 60)
        plain = bootstrap(values, n_resamples=400, seed=trial)
        covered += plain["low"] <= 1.0 <= plain["high"]
        ratio = bootstrap(values * weights, weights, n_resamples=400, seed=trial)
        covered_ratio += ratio["low"] <= 1.0 <= ratio["high"]
    assert 0.88 <= covered / 300 <= 0.98 and 0.86 <= covered_ratio / 300 <= 0.98


def test_bootstrap_weighs_units_by_their_size_and_repeats_itself():
    result = bootstrap([10, 1], [10, 1])
    assert result["mean"] == result["low"] == result["high"] == 1.0
    assert bootstrap([30, 1], [10, 1])["mean"] == 31 / 11
    some = np.random.default_rng(0).normal(size=50)
    assert bootstrap(some, seed=3) == bootstrap(some, seed=3) != bootstrap(some, seed=4)
    with pytest.raises(ValueError):
        bootstrap([])


def test_pairing_takes_out_what_the_units_share():
    generator = np.random.default_rng(0)
    hard = generator.normal(0, 10, 200)  # documents differ by 10, the two runs by 0.5
    first, second = hard + 0.5 + generator.normal(0, 0.1, 200), hard
    paired = paired_bootstrap(first, second)
    assert 0.45 < paired["low"] < paired["mean"] < paired["high"] < 0.55
    assert bootstrap(first)["low"] < bootstrap(second)["mean"]
    # With denominators: bits a byte, of runs whose tokenizers give other numbers of tokens to the same documents.
    sizes = generator.integers(1, 100, 200)
    assert paired_bootstrap(3 * sizes, 2 * sizes, sizes)["mean"] == pytest.approx(1.0)
    assert paired_bootstrap(3 * sizes, 4 * sizes, sizes, 2 * sizes)["mean"] == pytest.approx(1.0)
    with pytest.raises(ValueError):
        paired_bootstrap([1, 2], [1])


def test_mcnemar_counts_only_what_differs():
    right, wrong = [True], [False]
    assert mcnemar(right * 5 + wrong * 5, right * 5 + wrong * 5) == 1.0
    assert mcnemar(right * 6, wrong * 6) == pytest.approx(2 / 2**6)
    assert mcnemar(right * 100 + right * 6, right * 100 + wrong * 6) == pytest.approx(2 / 2**6)
    # 1 against 5: P(at most 1 of 6) = 7/64, twice.
    assert mcnemar(right * 5 + wrong, wrong * 5 + right) == pytest.approx(14 / 64)


def test_wilson_by_hand_and_at_the_edges():
    result = wilson(8, 10)
    assert (result["low"], result["high"]) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert abs(wilson(0, 10)["low"]) < 1e-12 and 0.2 < wilson(0, 10)["high"] < 0.31
    assert wilson(10, 10)["high"] == pytest.approx(1.0)
    with pytest.raises(ValueError):
        wilson(3, 2)
