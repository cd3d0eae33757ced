"""metrics.jsonl of a run, and the picture drawn from it.

One JSON object a line. A training step has step, loss, lr, grad_norm and its speed; an evaluation has step and its results.
"""

import hashlib
import io
import json
import os
import statistics
import sys
from pathlib import Path

from files import sha256, write_atomically
from flags import UserError


class Metrics:
    """metrics.jsonl, one JSON object a line; opened at a step, the lines after it (of a run that was killed) are cut off.

    mark: what `mark()` gave when the checkpoint of that step was saved, so that damage to the lines before it is noticed, and
    the last evaluation does not hang on them.
    """

    def __init__(self, folder, step, process=0, mark=None):
        self.path = folder / "metrics.jsonl"
        if process:  # process 0 of the run writes them
            self.path = Path(os.devnull)
        content = self.path.read_bytes() if step and self.path.exists() else b""
        kept = content[:mark[0]] if mark else content
        if step and not process and not (mark and sha256(kept) == mark[1]):
            lines = [line for line in read_metrics(self.path) if line["step"] <= step]
            kept = "".join(json.dumps(line) + "\n" for line in lines).encode("utf-8")
            print(f"warning: {self.path}: damaged, its lines up to step {step} are not what was written; {len(lines)} are still "
                  "legible and kept", file=sys.stderr)
        if not process:
            write_atomically(self.path, kept)
        self.size, self.digest = len(kept), hashlib.sha256(kept)
        self.evaluation = mark[2] if mark else {}
        self.file = open(self.path, "ab")

    def write(self, **values):
        line = (json.dumps(values) + "\n").encode("utf-8")
        try:
            self.file.write(line)
            self.file.flush()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}); free some space, then --resume") from None
        self.size += len(line)
        self.digest.update(line)
        if "val_loss" in values:
            self.evaluation = values

    def mark(self):
        """Size and sha256 of what has been written so far, and the last evaluation in it."""
        return [self.size, self.digest.hexdigest(), self.evaluation]

    def last_evaluation(self, *names):
        """The last evaluation. Raises UserError where one of the named values is missing."""
        if not all(isinstance(self.evaluation.get(name), float) for name in names):
            raise UserError(f"{self.path.parent}: its checkpoint lacks the last evaluation; the weights are whole, so evaluate "
                            "them, or train anew with --overwrite")
        return self.evaluation

    def sync(self):
        """Put the lines on disk; called before a checkpoint, which must never be ahead of them."""
        os.fsync(self.file.fileno())


def read_metrics(path):
    """The whole lines of a metrics.jsonl: not a last one that a kill cut short, nor one that is damaged beyond reading."""
    lines = []
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if line.endswith(b"\n") and isinstance(values, dict) and isinstance(values.get("step"), int):
                lines.append(values)
    return lines


def median_speed(lines):
    """Tokens a second in the median step of the lines that `read_metrics` gave; None where damage has left none."""
    speeds = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line]
    return statistics.median(speeds) if speeds else None


def plot_loss(folder, baseline=None, ylabel="loss (nats a token)"):
    """loss.png from metrics.jsonl: training loss of every step, evaluations, and the unigram baseline, in nats a token."""
    import matplotlib
    matplotlib.use("Agg")  # no screen needed
    import matplotlib.pyplot as plt

    lines = read_metrics(folder / "metrics.jsonl")
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    steps = [m for m in lines if "loss" in m]
    axes.plot([m["step"] for m in steps], [m["loss"] for m in steps], lw=0.6, alpha=0.6, label="training batch")
    for name in ("val", "ood"):
        points = [(m["step"], m[f"{name}_loss"]) for m in lines if f"{name}_loss" in m]
        if points:
            axes.plot(*zip(*points), marker="o", ms=3, label=name)
    if baseline is not None:
        axes.axhline(baseline, color="grey", ls="--", lw=1, label="unigram baseline (val)")
    axes.set(xlabel="step", ylabel=ylabel)
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, format="png")
    plt.close(figure)
    write_atomically(folder / "loss.png", buffer.getvalue())
