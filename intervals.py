"""Numbers with their uncertainty: over seeds, over documents or sentence pairs, and between two runs.

Two scorers are compared paired wherever that is possible: the same seed, the same document, the same item. Seeds, and
documents, differ more among themselves than scorers do, and pairing takes that out.

Every interval is a dict {"mean": ..., "low": ..., "high": ..., "n": ...}, so that it can go to JSON as it is.
"""

import math
from statistics import fmean, stdev

import numpy as np


def t_interval(values, level=0.95):
    """Mean and Student's t interval of a few independent values, such as one a seed. One value has no interval: low and high
    are None. Raises ValueError for none."""
    from scipy.stats import t  # here and below: importing scipy.stats takes a second, and not every command needs it

    values = [float(value) for value in values]
    if not values:
        raise ValueError("no values to take a mean of")
    mean = fmean(values)
    if len(values) == 1:
        return dict(mean=mean, low=None, high=None, n=1)
    half = float(t.ppf(0.5 + level / 2, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return dict(mean=mean, low=mean - half, high=mean + half, n=len(values))


def paired_t_interval(first, second, level=0.95):
    """The same of first - second, pair by pair (the same seed in both). Raises ValueError for unequal lengths."""
    return t_interval([a - b for a, b in zip(first, second, strict=True)], level)


def bootstrap(numerators, denominators=None, n_resamples=2000, level=0.95, seed=0):
    """sum(numerators) / sum(denominators), and its percentile interval when whole units are drawn with replacement.

    A unit is what is independent: a document (its nats, and its tokens or bytes), a pair of sentences (right or wrong, and 1).
    numerators, denominators: one number a unit; denominators default to 1, which makes this a mean.
    """
    top = np.asarray(numerators, dtype=np.float64)
    bottom = np.ones_like(top) if denominators is None else np.asarray(denominators, dtype=np.float64)
    return _bootstrap(lambda a, b, axis=-1: a.sum(axis) / b.sum(axis), (top, bottom), n_resamples, level, seed)


def paired_bootstrap(first, second, denominators=None, second_denominators=None, n_resamples=2000, level=0.95, seed=0):
    """The same of the ratio of `first` minus that of `second`, both measured on the same units, which are drawn together."""
    first, second = (np.asarray(values, dtype=np.float64) for values in (first, second))
    below = np.ones_like(first) if denominators is None else np.asarray(denominators, dtype=np.float64)
    below2 = below if second_denominators is None else np.asarray(second_denominators, dtype=np.float64)

    def difference(a, b, c, d, axis=-1):
        return a.sum(axis) / b.sum(axis) - c.sum(axis) / d.sum(axis)

    return _bootstrap(difference, (first, below, second, below2), n_resamples, level, seed)


def _bootstrap(statistic, columns, n_resamples, level, seed):
    from scipy.stats import bootstrap as resample

    sizes = {column.shape for column in columns}
    if len(sizes) > 1 or not columns[0].size:
        raise ValueError(f"units of shapes {sorted(sizes)}: there must be some, and equally many of each kind")
    n, mean = len(columns[0]), float(statistic(*columns))
    if n == 1:
        return dict(mean=mean, low=None, high=None, n=1)
    drawn = resample(columns, statistic, paired=True, vectorized=True, n_resamples=n_resamples, confidence_level=level,
                     method="percentile", batch=max(1, 2**22 // n), rng=np.random.default_rng(seed))
    low, high = drawn.confidence_interval
    return dict(mean=mean, low=float(low), high=float(high), n=n)


def mcnemar(first, second):
    """Two-sided exact p-value of McNemar's test: right or wrong on the same items, only those that differ count."""
    from scipy.stats import binomtest

    first, second = (np.asarray(values, dtype=bool) for values in (first, second))
    if first.shape != second.shape:
        raise ValueError(f"{first.size} and {second.size} items cannot be paired")
    only_first, only_second = int((first & ~second).sum()), int((second & ~first).sum())
    differ = only_first + only_second
    return float(binomtest(only_first, differ).pvalue) if differ else 1.0


def wilson(successes, n, level=0.95):
    """Wilson's interval of a share of n independent trials; unlike the usual one it is sensible at 0 and at n."""
    from scipy.stats import binomtest

    interval = binomtest(successes, n).proportion_ci(level, method="wilson")
    return dict(mean=successes / n, low=float(interval.low), high=float(interval.high), n=n)
