"""metrics.jsonl of a run, and the picture drawn from it.

One JSON object a line. A training step has step, loss, lr, grad_norm and its speed; an evaluation has step and its results.
"""

import io
import json
import os
import sys

from files import write_atomically
from flags import UserError


class Metrics:
    """metrics.jsonl, one JSON object a line; opened at a step, the lines after it (of a run that was killed) are cut off."""

    def __init__(self, folder, step, process=0):
        self.path = folder / "metrics.jsonl"
        if process:  # process 0 of the run writes them
            self.file = open(os.devnull, "w", encoding="utf-8")
            return
        kept = [line for line in read_metrics(self.path) if line["step"] <= step] if step else []
        if step and (not kept or kept[-1]["step"] < step):
            print(f"warning: {self.path}: damaged or cut short; its lines after step {kept[-1]['step'] if kept else 0} are "
                  "lost", file=sys.stderr)
        write_atomically(self.path, "".join(json.dumps(line) + "\n" for line in kept).encode("utf-8"))
        self.file = open(self.path, "a", encoding="utf-8")

    def write(self, **values):
        try:
            self.file.write(json.dumps(values) + "\n")
            self.file.flush()
        except OSError as error:
            raise UserError(f"{self.path}: cannot be written ({error.strerror}); free some space, then --resume") from None

    def sync(self):
        """Put the lines on disk; called before a checkpoint, which must never be ahead of them."""
        os.fsync(self.file.fileno())


def read_metrics(path):
    """The whole lines of a metrics.jsonl; a last line that a kill cut short is left out, and nothing after it is read."""
    lines = []
    if path.exists():
        for line in path.read_bytes().splitlines(keepends=True):
            try:
                values = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or not isinstance(values, dict) or "step" not in values:
                break
            lines.append(values)
    return lines


def plot_loss(folder, baseline=None):
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
    axes.set(xlabel="step", ylabel="loss (nats a token)")
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, format="png")
    plt.close(figure)
    write_atomically(folder / "loss.png", buffer.getvalue())
