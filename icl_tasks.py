"""In-context tasks: what a sequence is, what the right answers are, and what answers without any thought would score.

    quantifiers   y_i = +1 if every (some) x_1 .. x_i is positive, else -1
    linear        y_i = a x_i + b, with a, b ~ N(0, 1) drawn anew for each sequence
    mixed         every or some, each for half of the sequences; only the answers in the context tell which

A quantifier's *decider* is an element that settles the answer for good: a negative one for `every`, a positive one for
`some`. Two laws of the training sequences; magnitudes are those of N(0, sigma^2) in both:

    iid           every element decides with probability 1/2: plain N(0, sigma^2), as published. After four elements
                  15 answers in 16 are settled, and a constant answer is nearly always right.
    balanced      the first decider stands at a place uniform over the positions 1 .. T and "never"; every element after it
                  decides with a probability that is drawn for each sequence, uniform in (0, 1), so that any number of
                  deciders is met. No element before it decides.

Two ways to ask. `running` labels (as published): x_1, y_1, x_2, y_2, ..., so that the model reads the earlier answers and a
quantifier is only "copy the last answer unless x_i decides". `final` labels: x_1, x_2, ..., the answer asked at every
prefix, so that the model must look at all of them.

B sequences, T points. Everything is numpy here and a pure function of its arguments.
"""

import numpy as np

TASKS = ("every", "some", "linear", "mixed")
LAWS = ("balanced", "iid")
LABELS = ("running", "final")
TRAIN, VAL, TEST, OFFSET = range(4)  # streams of random numbers that never meet, whatever the seeds and steps


def generator(seed, stream, number=0):
    """The random numbers of one batch or test set. Philox turns a key and a counter into numbers: another stream is
    another key, another step another stretch of 2^128 counters."""
    return np.random.Generator(np.random.Philox(key=[seed, stream], counter=[0, 0, number, 0]))


# -------------------------------------------------------------------------------------------------------------- sequences

def quantifier(decides, magnitude, every=True):
    """x, y float32 (B, T) of `every` (or `some`) whose deciders are the True in decides (B, T). every: also (B, 1)."""
    x = np.where(decides, -magnitude, magnitude)
    y = 1.0 - 2.0 * (np.cumsum(decides, axis=1) > 0)  # -1 from the first decider on
    sign = np.where(every, 1.0, -1.0)  # some(x) = -every(-x)
    return (sign * x).astype(np.float32), (sign * y).astype(np.float32)


def magnitudes(rng, shape, sigma=1.0):
    """|N(0, sigma^2)|."""
    return sigma * np.abs(rng.standard_normal(shape))


def draw(task, law, count, points, rng, sigma_x=1.0, sigma_f=1.0):
    """x, y float32 (count, points). sigma_x: standard deviation of x; sigma_f: of a and b (`linear` only)."""
    shape = (count, points)
    if task == "linear":
        a, b = sigma_f * rng.standard_normal((2, count, 1))
        x = sigma_x * rng.standard_normal(shape)
        return x.astype(np.float32), (a * x + b).astype(np.float32)
    magnitude, chance = magnitudes(rng, shape, sigma_x), rng.random(shape)
    if law == "iid":
        decides = chance < 0.5
    else:
        first, share = rng.integers(0, points + 1, (count, 1)), rng.random((count, 1))
        place = np.arange(points)  # first == points: never
        decides = (place == first) | ((place > first) & (chance < share))
    every = rng.random((count, 1)) < 0.5 if task == "mixed" else task == "every"
    return quantifier(decides, magnitude, every)


def batch(task, law, seed, step, rows, batch_size, points):
    """The given rows of the global training batch number `step`: x, y float32 (len(rows), points).

    A pure function: whatever process asks, and after whatever interruption, gets the same rows.
    """
    x, y = draw(task, law, batch_size, points, generator(seed, TRAIN, step))
    return x[list(rows)], y[list(rows)]


# ------------------------------------------------------------------------------------------------------ tokens and answers

def tokens(x, y, labels):
    """What the model reads: (B, T) x and y -> (B, 2T - 1, 1) for running labels (nothing follows the last x, so its y is
    left out), (B, T, 1) for final ones."""
    if labels == "final":
        return x[..., None]
    pairs = np.stack([x, y], axis=2).reshape(len(x), -1)  # (B, T, 2) -> (B, 2T): x_1 y_1 x_2 y_2 ...
    return pairs[:, :-1, None]


def n_tokens(points, labels):
    """Tokens of a sequence of so many points."""
    return points if labels == "final" else 2 * points - 1


def at_x(outputs, labels):
    """The outputs at the x positions: (B, tokens, 1) -> (B, T)."""
    return outputs[:, :: 1 if labels == "final" else 2, 0]


# -------------------------------------------------------------------------------------------------------------- baselines

def copy_last(y):
    """The answer before, (B, T); before the first one, that of a sequence without deciders would be: +1 (every)."""
    return np.concatenate([np.ones_like(y[:, :1]), y[:, :-1]], axis=1)


def least_squares(x, y):
    """For every i the prediction of y_i by the line of least squares through the points before it: (B, T). With one point
    the line of least norm through it; with none 0."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    mean_x, mean_y = _mean_before(x), _mean_before(y)
    covariance = _mean_before(x * y) - mean_x * mean_y
    variance = _mean_before(x * x) - mean_x**2
    with np.errstate(divide="ignore", invalid="ignore"):
        predictions = mean_y + covariance / variance * (x - mean_x)
    predictions[:, :1] = 0
    predictions[:, 1:2] = y[:, :1] * (x[:, :1] * x[:, 1:2] + 1) / (x[:, :1] ** 2 + 1)
    return predictions


def averaging(x, y):
    """The same with the mean of y_j (x_j, 1) as the line's coefficients: Garg et al.'s averaging estimator."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    return _mean_before(x * y) * x + _mean_before(y)


def three_nearest(x, y):
    """The mean of y at the three nearest x before (as many as there are; 0 at the first point): (B, T)."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    predictions = np.zeros_like(y)
    for i in range(1, x.shape[1]):
        nearest = np.argsort(np.abs(x[:, :i] - x[:, i : i + 1]), axis=1)[:, :3]
        predictions[:, i] = np.take_along_axis(y[:, :i], nearest, axis=1).mean(1)
    return predictions


def _mean_before(values):
    """The mean of values[:, :i] for every i, 0 for i = 0: (B, T)."""
    total = np.cumsum(values, axis=1) - values
    return total / np.maximum(1, np.arange(values.shape[1]))


LINEAR_BASELINES = {"zero": lambda x, y: np.zeros_like(y), "least squares": least_squares, "3 nearest": three_nearest,
                    "averaging": averaging}
