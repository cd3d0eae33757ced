"""Tests of an in-context model under distribution shift: a trained model in, numbers for JSON out.

    lengths       quantifiers: error over the length (10 .. 200) and the standard deviation (1 .. 30)
    deciders      quantifiers: error by the number of deciding elements, and by the place of a single one
    outlier       quantifiers: one element of magnitude 10^0 .. 10^6, its own place, before and after it told apart; and the
                  same with one thing changed in the model (clipped input, rescaled scores, another scorer)
    functions     linear: squared error over sigma_x and sigma_f (1 .. 10), and by the number of examples
    collapse      how concentrated attention is, by layer and head, as an outlier or all scores grow

Every set is drawn from a stream of random numbers that training never uses, and is the same for every run. Quantifier sets are
balanced: in `lengths` half of the answers are true, so a constant answer is wrong in half of the cases. With running labels
the answer before is undecided and the last element decides in half of the sequences, so that copying is wrong in half, too.
`trained`: whether training has reached all positions of the cell; beyond the position table a cell is None.
"""

import numpy as np
import torch

import icl_attention
import icl_tasks
from icl_tasks import TEST, generator, magnitudes, n_tokens, quantifier

LENGTHS = (10, 20, 40, 60, 80, 100, 120, 160, 200)
SIGMAS = (1, 2, 3, 5, 10, 20, 30)
LINEAR_SIGMAS = (1, 2, 3, 5, 7, 10)
OUTLIERS = tuple(10.0**k for k in range(7))
FACTORS = (0.01, 0.1, 0.5, 1, 2, 10, 100, 1000)
CLIP = 4.0  # of 25,000 numbers from N(0, 1) one or two are larger


def test(model, flags):
    """All tests that the task has, as a dict for JSON."""
    model.eval()
    task, labels = flags.task, flags.asked
    result = dict(task=task, labels=labels, sequences=flags.test_sequences, points=flags.points,
                  positions_reached=flags.reached(), context=flags.context, in_distribution=in_distribution(model, flags))
    if task == "linear":
        result["functions"] = functions(model, flags)
    else:
        result["lengths"] = lengths(model, flags)
    if task in ("every", "some"):
        result["deciders"] = deciders(model, flags)
        result["outlier"] = outlier(model, flags)
        result["interventions"] = {
            name: dict(outlier=outlier(changed, flags)["summary"], wide=lengths(changed, flags, (40,), SIGMAS[-1:]))
            for name, changed in interventions(model)}
    result["collapse"] = collapse(model, flags)
    return result


# --------------------------------------------------------------------------------------------------------------- answers

@torch.no_grad()
def answer(model, x, y, labels, tokens_at_once=2560):
    """The model's outputs at every x, (B, T) float32, so many rows at a time as a CPU's caches hold (measured: twice as fast as
    250 rows of 200 tokens). Raises ValueError beyond the position table."""
    training = model.training
    model.eval()
    device, tokens = next(model.parameters()).device, torch.from_numpy(icl_tasks.tokens(x, y, labels))
    rows = max(1, tokens_at_once // tokens.size(1))
    outputs = [icl_tasks.at_x(model(part.to(device))[0], labels).float().cpu() for part in tokens.split(rows)]
    model.train(training)
    return torch.cat(outputs).numpy()


def errors(task, outputs, y):
    """(B, T): squared error for `linear`, else 1.0 where the sign is wrong."""
    return np.square(outputs - y) if task == "linear" else ((outputs > 0) != (y > 0)).astype(np.float64)


def trained(flags, points):
    reached = flags.reached()
    return reached is None or n_tokens(points, flags.asked) <= reached


def in_distribution(model, flags):
    """The error on the held-out set from the training law, and those of answers that take no thought."""
    x, y = validation_set(flags)
    scored = scored_points(flags)
    if flags.task == "linear":
        found = {name: errors("linear", predict(x, y), y)[:, scored].mean().item()
                 for name, predict in icl_tasks.LINEAR_BASELINES.items()}
    else:
        found = baselines(y, scored, flags.asked)
    return dict(error=errors(flags.task, answer(model, x, y, flags.asked), y)[:, scored].mean().item(), baselines=found)


def validation_set(flags):
    """x, y (2000, T), from the training law: the same for all runs of a task."""
    return icl_tasks.draw(flags.task, flags.law, 2000, flags.points, generator(0, icl_tasks.VAL))


def scored_points(flags):
    """The points that count: for `linear` from the fourth on, when two examples fix the line and a third confirms it."""
    return slice(min(3, flags.points - 1) if flags.task == "linear" else 0, None)


# ------------------------------------------------------------------------------------------------------------ quantifiers

def lengths(model, flags, over_lengths=LENGTHS, over_sigmas=SIGMAS):
    """Error at the last point of balanced sets: a list of cells. For `mixed`: at all points of the training law."""
    cells = []
    for length in over_lengths:
        for sigma in over_sigmas:
            cell = dict(length=length, sigma=sigma, error=None, trained=trained(flags, length))
            if n_tokens(length, flags.asked) <= flags.context:
                rng = generator(0, TEST, 10_000 + 100 * length + sigma)
                if flags.task == "mixed":
                    x, y = icl_tasks.draw("mixed", "balanced", flags.test_sequences, length, rng, sigma_x=sigma)
                    scored = slice(None)
                else:
                    decides = balanced_at_last(flags.asked, flags.test_sequences, length, rng)
                    x, y = quantifier(decides, magnitudes(rng, decides.shape, sigma), flags.task == "every")
                    scored = slice(-1, None)
                wrong = errors(flags.task, answer(model, x, y, flags.asked), y)[:, scored]
                cell |= dict(error=wrong.mean().item(), **baselines(y, scored, flags.asked))
            cells.append(cell)
    return cells


def balanced_at_last(labels, count, length, rng):
    """Deciders (count, length): none in one half; in the other a single one, at any place (at the last, with running labels)."""
    decides = np.zeros((count, length), dtype=bool)
    half = count // 2
    decides[np.arange(half), length - 1 if labels == "running" else rng.integers(0, length, half)] = True
    return decides


def baselines(y, scored, labels):
    """Errors of answers that take no thought, at the scored points of y (B, T)."""
    true, copied = y[:, scored] > 0, icl_tasks.copy_last(y)[:, scored] > 0
    copy = (copied != true).mean().item() if labels == "running" else None  # there is nothing to copy otherwise
    return dict(constant_true=(~true).mean().item(), constant_false=true.mean().item(), copy_last=copy)


def deciders(model, flags):
    """Error at the last point by the number of deciders at random places; and by the place of a single one, there and at the
    last point."""
    T, n, every = flags.points, flags.test_sequences, flags.task == "every"
    by_number = []
    for k in sorted({0, 1, 2, 4, 8, 16, T} & set(range(T + 1))):
        rng = generator(0, TEST, 100 + k)
        decides = rng.random((n, T)).argsort(1) < k
        x, y = quantifier(decides, magnitudes(rng, (n, T)), every)
        wrong = errors(flags.task, answer(model, x, y, flags.asked), y)
        by_number.append(dict(number=k, error=wrong[:, -1].mean().item()))
    rng = generator(0, TEST, 99)
    place = np.arange(10 * n) % T
    x, y = quantifier(np.arange(T) == place[:, None], magnitudes(rng, (10 * n, T)), every)
    wrong = errors(flags.task, answer(model, x, y, flags.asked), y)
    by_place = [dict(place=d + 1, own=wrong[place == d, d].mean().item(), last=wrong[place == d, -1].mean().item())
                for d in range(T)]
    return dict(by_number=by_number, by_place=by_place)


# ---------------------------------------------------------------------------------------------------------------- outlier

def outlier_sets(flags, count):
    """{case: deciders (count, T)} around an outlier at place T // 2 (from 0), the magnitudes of the other elements, the place.

    decides          the outlier is the only decider: false from there on
    harmless         nothing decides: true everywhere
    decided before   the outlier does not decide, but one ordinary element before it did: false
    decided after    one ordinary element behind the outlier decides: scored from there on (running labels: there alone, since
                     behind it the answer can be copied)
    """
    T = flags.points
    rng, place, row = generator(0, TEST, 1), T // 2, np.arange(count)
    cases = {name: np.zeros((count, T), dtype=bool) for name in ("decides", "harmless", "decided before", "decided after")}
    cases["decides"][:, place] = True
    cases["decided before"][row, rng.integers(0, place, count)] = True
    cases["decided after"][row, rng.integers(place + 1, T, count)] = True
    return cases, magnitudes(rng, (count, T)), place


def outlier(model, flags):
    """Errors around an outlier, by case and magnitude, and a `summary`. Except in `missed` half of the answers are true:

    before   places before the outlier
    own      at a harmless outlier, with an ordinary decider before it in half of the sequences
    sign     at an outlier that decides in half of the sequences and before which nothing did
    after    behind a harmless outlier, with an ordinary decider before it (running labels: behind it) in half of the sequences
    missed   behind a deciding outlier: the answer is false
    """
    cases, magnitude, place = outlier_sets(flags, flags.test_sequences)
    running, behind = flags.asked == "running", slice(place + 1, None)
    scored = {name: np.ones_like(decides[:, behind]) for name, decides in cases.items()}
    scored["decided after"] = (cases["decided after"] if running else cases["decided after"].cumsum(1) > 0)[:, behind]
    result = {name: dict(before=[], own=[], after=[]) for name in cases}
    for size in OUTLIERS:
        magnitude[:, place] = size
        for name, decides in cases.items():
            x, y = quantifier(decides, magnitude, flags.task == "every")
            wrong = errors(flags.task, answer(model, x, y, flags.asked), y)
            for part, value in (("before", wrong[:, :place]), ("own", wrong[:, place]),
                                ("after", wrong[:, behind][scored[name]])):
                result[name][part].append(value.mean().item())

    def half_and_half(part, one, other):
        return [(a + b) / 2 for a, b in zip(result[one][part], result[other][part])]

    summary = dict(before=half_and_half("before", "harmless", "decided before"),
                   own=half_and_half("own", "harmless", "decided before"), sign=half_and_half("own", "harmless", "decides"),
                   after=half_and_half("after", "harmless", "decided after" if running else "decided before"),
                   missed=result["decides"]["after"])
    return dict(magnitudes=OUTLIERS, place=place + 1, cases=result, summary=summary)


def interventions(model):
    """(name, model with one thing changed) pairs."""
    other = "softmax" if type(model.scorers()[0]).__name__ != "Softmax" else "ssa"
    yield f"input clipped at {CLIP:g}", icl_attention.clipped(model, CLIP)
    for factor in (0.5, 0.1):
        yield f"scores x {factor:g}", icl_attention.watched(model, factor)
    yield f"scorer swapped for {other}", icl_attention.swapped(model, other)


# ----------------------------------------------------------------------------------------------------------------- linear

def functions(model, flags):
    """Squared error of y = a x + b at the points from the fourth on, with baselines: a list of cells over sigma_x, sigma_f; and
    by the number of examples, up to twice as many as in training."""
    T, cells, by_examples = flags.points, [], []
    longest = max(t for t in range(T, 2 * T + 1) if n_tokens(t, flags.asked) <= flags.context)
    for i, sigma_x in enumerate(LINEAR_SIGMAS):
        for j, sigma_f in enumerate(LINEAR_SIGMAS):
            rng = generator(0, TEST, 5000 + 100 * i + j)
            x, y = icl_tasks.draw("linear", "iid", flags.test_sequences, longest, rng, sigma_x, sigma_f)
            predictions = {"model": answer(model, x, y, flags.asked)}
            predictions |= {name: predict(x, y) for name, predict in icl_tasks.LINEAR_BASELINES.items()}
            squared = {name: errors("linear", p, y).mean(0) for name, p in predictions.items()}  # (longest,) each
            cells.append(dict(sigma_x=sigma_x, sigma_f=sigma_f, variance=sigma_f**2 * (sigma_x**2 + 1), trained=trained(flags, T),
                              **{name: e[min(3, T - 1):T].mean().item() for name, e in squared.items()}))
            if sigma_x in (1, 3, 10) and sigma_f in (1, 3, 10):
                by_examples.append(dict(sigma_x=sigma_x, sigma_f=sigma_f, **{name: e.tolist() for name, e in squared.items()}))
    return dict(cells=cells, by_examples=by_examples, trained=[trained(flags, t + 1) for t in range(longest)])


# --------------------------------------------------------------------------------------------------------------- collapse

@torch.no_grad()
def collapse(model, flags, count=32):
    """Concentration of attention, by layer and head, averaged over sequences and queries: against the magnitude of a harmless
    outlier (at its own query, and at those behind it), and against a factor on all scores without one."""
    T, labels = flags.points, flags.asked
    stride = 1 if labels == "final" else 2  # tokens a point
    place = T // 2
    own, behind = slice(stride * place, stride * place + 1), slice(stride * (place + 1), None, stride)

    def look(size, factor):
        x, y = with_outlier(flags, count, place, size)
        copy = icl_attention.watched(model, factor)
        copy(torch.from_numpy(icl_tasks.tokens(x, y, labels)).to(next(model.parameters()).device))
        return icl_attention.weights(copy).cpu()  # (layers, count, H, Q, K)

    def measures(weights, queries):
        part = weights[:, :, :, queries]  # (layers, count, H, queries, K)
        found = icl_attention.concentration(part) | dict(on_outlier=part[..., stride * place])
        return {name: value.mean((1, 3)).tolist() for name, value in found.items()}  # (layers, H)

    by_magnitude = []
    for size in OUTLIERS:
        weights = look(size, 1.0)
        picture = weights[:, 0, :, -1]  # the last query of the first sequence: (layers, H, K)
        by_magnitude.append(dict(magnitude=size, own=measures(weights, own), behind=measures(weights, behind),
                                 picture=np.round(picture.numpy().astype(float), 4).tolist()))
    by_factor = [dict(factor=factor, behind=measures(look(1.0, factor), behind)) for factor in FACTORS]
    return dict(place=place + 1, by_magnitude=by_magnitude, by_factor=by_factor)


def with_outlier(flags, count, place, size):
    """x, y (count, T) of sequences with |x| = size at one place, where it decides nothing."""
    rng = generator(0, TEST, 2)
    if flags.task != "linear":
        decides = np.zeros((count, flags.points), dtype=bool)
        decides[np.arange(count), rng.integers(0, place, count)] = True
        magnitude = magnitudes(rng, decides.shape)
        magnitude[:, place] = size
        return quantifier(decides, magnitude, flags.task != "some")
    a, b = rng.standard_normal((2, count, 1))
    x = rng.standard_normal((count, flags.points))
    x[:, place] = size
    return x.astype(np.float32), (a * x + b).astype(np.float32)
