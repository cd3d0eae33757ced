"""Train small Transformers from scratch on in-context tasks, and test them far outside the training distribution.

    python train_icl.py                                    every; SSA and softmax: trained, tested, a table and figures
    python train_icl.py --compare=ssa,softmax --task=linear --preset=small --seeds=0,1
    python train_icl.py --scorer=ssa --task=some           one run: trained and tested
    python train_icl.py --preset=paper --scorer=ssa        the published size

A sequence is numbers, one a token: x_1, y_1, x_2, y_2, ... (icl_tasks.py says what y is). They go through a linear read-in, a
causal Transformer and a linear read-out, which at every x answers with y. A run is a folder, as for train_gpt.py, with the
tests' numbers in shift.json (icl_shift.py). A comparison is several runs, each a process of its own, with a JSON a run, figures
and one table. See --help for all flags.
"""

import signal
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

from config import ModelConfig
from flags import SharedFlags, UserError, fail, flag, parse, require
from icl_tasks import n_tokens


@dataclass
class Flags(SharedFlags):
    """Train small Transformers on in-context tasks, and test them outside the training distribution."""

    task: Literal["every", "some", "linear", "mixed"] = "every"
    """what y is"""
    labels: Literal["auto", "running", "final"] = "auto"
    """running: the answers so far stand in the context; final: x alone does (auto: final for every and some, else running)"""
    law: Literal["balanced", "iid"] = "balanced"
    """quantifiers: where deciding elements stand (iid: as published, where nearly all answers are the same)"""
    points: int = 41
    """points of a training sequence at the end"""
    first_points: int = 11
    """points at the beginning"""
    points_every: int = 2000
    """steps after which a sequence gets two points more"""
    n_layer: int = 0
    """layers"""
    n_head: int = 0
    """heads"""
    n_embd: int = 0
    """width; the feed-forward layer is four times as wide"""
    context: int = 256
    """rows of the position table: the most tokens that the model can read"""
    positions: Literal["learned", "none", "random-offset"] = "learned"
    """random-offset: learned, each batch starting at a random place of the table, so that all of it is trained"""
    attention_only: bool = False
    """no feed-forward layers"""
    no_norm: bool = False
    """no LayerNorm"""
    test_sequences: int = 500
    """sequences in every cell of the tests"""
    compare: str = ""
    """scorers to train, test and compare, such as ssa,softmax (the default where no --scorer is given)"""
    seeds: str = ""
    """seeds to train with in a comparison, such as 0,1,2 (--seed alone if empty)"""
    jobs: int = 0
    """runs of a comparison at a time (0: one a CPU core)"""
    results: str = ""
    """folder for the tables and figures of a comparison (its run folder if empty)"""

    @property
    def asked(self):
        """The labels, `auto` resolved."""
        automatic = "running" if self.task in ("linear", "mixed") else "final"
        return automatic if self.labels == "auto" else self.labels

    @property
    def name(self):
        """Of this experiment, without scorer and seed, for folders and files."""
        changed = [("iid", self.law == "iid"), (self.positions, self.positions != "learned"),
                   ("attention-only", self.attention_only), ("no-norm", self.no_norm)]
        return "-".join([self.preset, self.task, self.asked] + [word for word, holds in changed if holds])

    def default_out(self, script):
        run = f"{script}-{self.name}"
        return f"runs/{run}" if self.compare else f"runs/{run}/{self.scorer}-s{self.seed}"

    def check(self):
        require(self, "jobs", self.jobs >= 0, "must be at least 0")
        if self.compare:
            for one in self.runs():
                one.check()
            return
        super().check()
        for name, least in {"points": 2, "first_points": 1, "points_every": 1, "test_sequences": 2}.items():
            require(self, name, getattr(self, name) >= least, f"must be at least {least}")
        require(self, "seeds", not self.seeds, "only --compare takes several; use --seed")
        require(self, "jobs", not self.jobs, "only --compare has several runs; leave it out")
        require(self, "results", not self.results, "only --compare writes tables; leave it out")
        require(self, "law", self.law == "balanced" or self.task != "linear", "is of quantifiers; --task=linear has none")
        require(self, "first_points", self.first_points <= self.points, f"must be at most --points={self.points}")
        require(self, "points", n_tokens(self.points, self.asked) <= self.context,
                f"makes {n_tokens(self.points, self.asked)} tokens, more than --context={self.context}")
        require(self, "labels", self.asked == "running" or self.task in ("every", "some"),
                f"--task={self.task} cannot be answered without earlier answers; use --labels=running")
        self.micro_batch = self.micro_batch or self.batch_size  # sequences this short need not be split
        try:
            self.model_config()
        except ValueError as error:
            raise UserError("--" + str(error).replace("_", "-", 2)) from None

    def model_config(self):
        """GPT-2's shape, reading and writing one number a token."""
        return ModelConfig(n_layer=self.n_layer, n_head=self.n_head, n_kv_head=self.n_head, n_embd=self.n_embd,
                           n_ff=0 if self.attention_only else 4 * self.n_embd, context=self.context, n_in=1, n_out=1,
                           positions="none" if self.positions == "none" else "learned", activation="gelu",
                           norm="none" if self.no_norm else "pre", norm_offset=False, bias=True, dropout=self.dropout,
                           scorer=self.scorer, scorer_options=self.scorer_options(), path=self.path)

    def runs(self):
        """The single runs of a comparison."""
        try:
            seeds = [int(seed) for seed in self.seeds.split(",")] if self.seeds else [self.seed]
        except ValueError:
            raise UserError(f"--seeds={self.seeds}: must be whole numbers, such as 0,1,2") from None
        scorers = [scorer.strip() for scorer in self.compare.split(",")]
        known = SharedFlags.__annotations__["scorer"].__args__
        for scorer in scorers:
            require(self, "compare", scorer in known, f"{scorer!r} is no scorer; choose among {', '.join(known)}")
        for name, values in (("compare", scorers), ("seeds", seeds)):
            require(self, name, len(set(values)) == len(values), "names one twice")
        same = dict(compare="", seeds="", jobs=0, results="", labels=self.asked, threads=self.threads or 1,
                    micro_batch=self.micro_batch or self.batch_size)
        return [replace(self, scorer=scorer, seed=seed, out=f"{self.out}/{scorer}-s{seed}", **same, **self._not_of(scorer))
                for seed in seeds for scorer in scorers]

    def _not_of(self, scorer):
        """Flags of other scorers, put back to their defaults."""
        names = [n for n in ("ssa_b", "ssa_n", "ssa_freeze", "tau", "tau_freeze")
                 if not n.startswith({"ssa": "ssa", "temperature": "tau"}.get(scorer, "-"))]
        return {name: SharedFlags.__dataclass_fields__[name].default for name in names}

    def command(self):
        """The command of this run, every flag spelled out."""
        values = {flag(f.name): getattr(self, f.name) for f in fields(self)}
        return [sys.executable, str(Path(__file__).resolve())] + [
            name if value is True else f"{name}={value}" for name, value in values.items() if value is not False and value != ""]

    def points_at(self, step):
        """Points of the sequences of the step-th batch, counted from 0."""
        return min(self.points, self.first_points + 2 * (step // self.points_every))

    def reached(self):
        """Token positions that training has seen (None: there is no position table, all are alike)."""
        if self.positions == "none":
            return None
        return self.context if self.positions == "random-offset" else n_tokens(self.points_at(self.steps - 1), self.asked)


# float32: the answers are wanted to a thousandth. No compilation: the length of the sequences changes all the time.
COMMON = dict(dtype="float32", compile="off", weight_decay=0.0)
PRESETS = {
    # Ours, both, found by trying: one minute a run and about ten on one core.
    "laptop": dict(n_layer=3, n_head=4, n_embd=64, points=21, points_every=100, batch_size=32, steps=1500, lr=1e-3,
                   min_lr=5e-5, warmup=200, save_every=500, eval_every=500, test_sequences=200, **COMMON),
    "small": dict(n_layer=4, n_head=4, n_embd=64, points=41, points_every=50, batch_size=32, steps=3000, lr=1e-3,
                  min_lr=5e-5, warmup=200, save_every=250, eval_every=500, **COMMON),
    # As published (Garg et al. 2022 for the parts that the paper takes over): Adam at a constant 1e-4, no clipping.
    "paper": dict(n_layer=12, n_head=8, n_embd=256, labels="running", points=41, points_every=2000, batch_size=64, steps=500_000,
                  lr=1e-4, min_lr=1e-4, warmup=0, beta2=0.999, clip=1e9, save_every=1000, eval_every=5000, **COMMON),
}

if __name__ == "__main__":  # a wrong flag is answered here, before the seconds that importing torch takes
    signal.signal(signal.SIGINT, lambda *_: fail("interrupted before training began; nothing was saved", code=130))
    names = {word.split("=")[0] for word in sys.argv}
    if {"--scorer", "--compare"} <= names:
        fail("--scorer: contradicts --compare, which names all scorers; give one of them")
    if not names & {"--scorer", "--compare"} and not {"--out", "--resume"} <= names:  # the latter resumes a single run
        sys.argv.append("--compare=ssa,softmax")
    flags, saved = parse(Flags, PRESETS, default_preset="laptop")
    if flags.compare:  # the parent of a comparison trains nothing itself
        import icl_compare
        try:
            sys.exit(icl_compare.main(flags))
        except UserError as error:
            fail(error)

import time

import numpy as np
import torch
import torch.nn.functional as F

import icl_shift
import icl_tasks
import run
from distributed import Processes, errors_in_one_line
from files import read_json, write_json
from metrics import median_speed, plot_loss, read_metrics
from model import Transformer
from training import Training


def main(flags, saved):
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # logs show each line at once, terminals any text
    torch.set_flush_denormal(True)  # once a task is solved, gradients fade: as denormals they make a step a fifth slower
    processes = Processes(flags.device)  # one, unless torchrun has started more
    print(f"preset {flags.preset}, {flags.task} with {flags.asked} labels, scorer {flags.scorer} -> {flags.out}")
    training = Training(flags, saved, processes, lambda: Transformer(flags.model_config()))
    model, decisions, device = training.model, training.decisions, training.device
    print(f"parameters: {model.n_parameters():,}")

    while training.goes_on():
        training.begin_step()
        points, loss = flags.points_at(training.step), 0.0
        first_position = offset(flags, training.step, points)
        for rows in training.micro_batches():
            x, y = icl_tasks.batch(flags.task, flags.law, flags.seed, training.step, rows, flags.batch_size, points)
            tokens = torch.from_numpy(icl_tasks.tokens(x, y, flags.asked)).to(device)  # (rows, tokens, 1)
            with run.autocast(decisions):
                outputs, _ = training.forward(tokens, first_position=first_position)
            part = losses(flags.task, icl_tasks.at_x(outputs, flags.asked).float(), torch.from_numpy(y).to(device)).mean()
            part = part * len(rows) / len(training.rows)
            part.backward()
            loss += part.detach()
        loss, grad_norm = training.end_step(loss)

        tokens_per_s = flags.batch_size * tokens.size(1) / (time.perf_counter() - training.step_start)
        training.metrics.write(step=training.step, loss=loss, lr=training.lr, grad_norm=grad_norm, points=points,
                               tokens_per_s=round(tokens_per_s, 1))
        training.bar.set_postfix(loss=f"{loss:.4f}", points=points, refresh=False)
        if training.due(flags.eval_every):
            result = evaluate(model, flags)
            training.metrics.write(step=training.step, **result, **run.scorer_values(model))
            training.bar.write(f"step {training.step}/{flags.steps}: val_loss {result['val_loss']:.5f}, {error_name(flags.task)} "
                               f"{result['val_error']:.5f}", file=sys.stdout)
        if training.due(flags.save_every) or training.stop:
            training.save()

    if training.end():
        finish(training)


def offset(flags, step, points):
    """The position of the first token: with random-offset drawn for each batch, else 0."""
    if flags.positions != "random-offset":
        return 0
    spare = flags.context - n_tokens(points, flags.asked)
    return int(icl_tasks.generator(flags.seed, icl_tasks.OFFSET, step).integers(0, spare + 1))


def losses(task, outputs, y):
    """Squared error for `linear`, logistic loss for the quantifiers: (B, T) each -> (B, T)."""
    return (outputs - y).square() if task == "linear" else F.softplus(-y * outputs)


def error_name(task):
    return "squared error from the fourth point on" if task == "linear" else "share of wrong answers"


def evaluate(model, flags):
    """Loss and error on a held-out set from the training law; mean and largest over the points that count, and by point."""
    x, y = icl_shift.validation_set(flags)
    outputs = icl_shift.answer(model, x, y, flags.asked)
    loss = losses(flags.task, torch.from_numpy(outputs), torch.from_numpy(y)).mean().item()
    error = icl_shift.errors(flags.task, outputs, y).mean(0)  # (T,)
    scored = error[icl_shift.scored_points(flags)]
    return dict(val_loss=loss, val_error=scored.mean().item(), val_worst=scored.max().item(),
                val_by_point=np.round(error, 6).tolist())


def finish(training):
    """Tests, loss curve and summary of a run that has reached its last step."""
    folder, flags, model = training.folder, training.flags, training.model
    tested = folder / "shift.json"
    if tested.exists() and read_json(tested, "delete it, then --resume")["sequences"] == flags.test_sequences:
        print(f"this run was complete; everything is in {folder}")
        return
    last = training.metrics.last_evaluation("val_loss", "val_error")
    plot_loss(folder, ylabel="loss (squared error)" if flags.task == "linear" else "loss (nats an answer)")
    start = time.perf_counter()
    result = icl_shift.test(model, flags)
    summary = dict(
        preset=flags.preset, task=flags.task, labels=flags.asked, law=flags.law, scorer=flags.scorer, seed=flags.seed,
        path=training.decisions["path"], steps=flags.steps, positions_reached=flags.reached(),
        **{key: value for key, value in last.items() if key.startswith("val")}, parameters=model.n_parameters(),
        tokens_per_s=median_speed(read_metrics(folder / "metrics.jsonl")),
        seconds=round(training.seconds, 1), test_seconds=round(time.perf_counter() - start, 1),
        machine=run.machine(training.device), date=time.strftime("%Y-%m-%d"), **training.scorer_changes())
    write_json(folder / "summary.json", summary)
    write_json(tested, result)
    print(f"{error_name(flags.task)}: {summary['val_error']:.5f}; {summary['seconds']:.0f} s; everything is in {folder}")


if __name__ == "__main__":
    with errors_in_one_line():
        main(flags, saved)
