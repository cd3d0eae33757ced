"""Flags: one flat dataclass a script, turned into --help by tyro, and one line on stderr that answers a wrong one.

No torch here: a wrong flag is answered in a fraction of a second.
"""

import contextlib
import io
import math
import os
import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, Literal, get_args

import tyro


# Flags that may differ when a run is resumed, since they do not change what is trained.
NOT_TRAINING = ("out", "resume", "overwrite", "data_timeout", "dry_run", "test_sequences", "jobs", "results", "export_hf")


class UserError(Exception):
    """What a user did that cannot work: one line naming the thing, its value and the remedy. Scripts exit with code 2."""


def fail(error, code=2):
    """Print an error as one line on stderr and exit. 2: the command was wrong. 1: the run went wrong."""
    print("error: " + " ".join(str(error).split()), file=sys.stderr)
    sys.exit(code)


@dataclass
class SharedFlags:
    """What every trainer takes. A script's own dataclass inherits this and adds its flags."""

    preset: str = "auto"
    """a named recipe; every other flag overrides one of its values"""
    scorer: Literal["softmax", "ssa", "temperature", "sparsemax", "entmax15", "cosformer", "sa_softmax", "hardmax"] = "ssa"
    """what turns attention scores into weights"""
    ssa_b: float = 0.8
    """SSA: where b starts, in every head"""
    ssa_n: float = 1.5
    """SSA: where n starts, in every head"""
    ssa_freeze: Literal["none", "b", "n", "both"] = "none"
    """SSA: which of b and n stay where they start"""
    tau: float = 1.0
    """temperature: where tau starts, in every head"""
    tau_freeze: bool = False
    """temperature: tau stays where it starts"""
    out: str = ""
    """run folder (a name under runs/ made from the flags if empty)"""
    steps: int = 1000
    """optimiser steps"""
    batch_size: int = 32
    """sequences in one optimiser step, all micro-batches together"""
    micro_batch: int = 0
    """sequences in one forward pass, a divisor of the batch size (0: chosen for the device)"""
    lr: float = 1e-3
    """highest learning rate"""
    min_lr: float = 1e-4
    """learning rate at the end of the cosine"""
    warmup: int = 100
    """steps over which the learning rate rises from 0"""
    weight_decay: float = 0.1
    """AdamW's, on matrices only"""
    beta2: float = 0.99
    """AdamW's second beta"""
    clip: float = 1.0
    """largest norm of the gradient"""
    dropout: float = 0.0
    """probability of dropping; above 0 attention takes a path that keeps its weights"""
    seed: int = 0
    """seeds weights, batches, dropout and samples"""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """where to train"""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the matrix products; weights and scores stay float32 (auto: bfloat16 where it is measured faster)"""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile (auto: where it can work and pays)"""
    path: Literal["auto", "plain", "sdpa", "blockwise", "triton"] = "auto"
    """attention implementation (auto: the fastest for the scorer)"""
    threads: int = 0
    """CPU threads (0: PyTorch's choice)"""
    save_every: int = 200
    """steps between checkpoints"""
    eval_every: int = 200
    """steps between evaluations"""
    resume: bool = False
    """continue the run in --out from its last checkpoint, or start it"""
    overwrite: bool = False
    """replace the run in --out"""
    init_from: str = ""
    """start from the weights of this run folder"""

    typical_length: ClassVar[int] = 0  # tokens of a usual sequence, where those are far shorter than the context

    def check(self):
        """Raise UserError for a value that cannot work."""
        at_least = {"steps": 1, "batch_size": 1, "micro_batch": 0, "warmup": 0, "seed": 0, "threads": 0, "save_every": 1,
                    "eval_every": 1}
        for name, least in at_least.items():
            require(self, name, getattr(self, name) >= least, f"must be at least {least}")
        for name, most in {"batch_size": 10**6, "threads": 1024, "steps": 10**12, "ssa_n": 1e6}.items():
            require(self, name, getattr(self, name) <= most, f"must be at most {most:g}")
        for name in ("lr", "clip"):
            require(self, name, 0 < getattr(self, name) < math.inf, "must be a number greater than 0")
        for name in ("tau", "ssa_b"):
            require(self, name, 1e-6 <= getattr(self, name) <= 1e6, "must be between 1e-6 and 1e6")
        for name in ("min_lr", "weight_decay"):
            require(self, name, 0 <= getattr(self, name) < math.inf, "must be a number, at least 0")
        require(self, "min_lr", self.min_lr <= self.lr, f"must be at most --lr={self.lr}")
        require(self, "beta2", 0 <= self.beta2 < 1, "must be at least 0 and below 1")
        require(self, "dropout", 0 <= self.dropout < 1, "must be at least 0 and below 1")
        require(self, "seed", self.seed < 2**63, "must be below 2^63")
        require(self, "batch_size", not self.micro_batch or self.batch_size % self.micro_batch == 0,
                f"must be a multiple of --micro-batch={self.micro_batch}")
        n_frozen = self.ssa_freeze in ("n", "both")
        require(self, "ssa_n", 1 < self.ssa_n < math.inf or (self.ssa_n == 1 and n_frozen),
                "must be greater than 1 (exactly 1 only with --ssa-freeze=n or both)")
        for name, scorer in (("ssa_b", "ssa"), ("ssa_n", "ssa"), ("ssa_freeze", "ssa"), ("tau", "temperature"),
                             ("tau_freeze", "temperature")):
            changed = getattr(self, name) != SharedFlags.__dataclass_fields__[name].default
            require(self, name, not changed or self.scorer == scorer, f"only --scorer={scorer} has it; leave it out")
        require(self, "overwrite", not (self.overwrite and self.resume), "contradicts --resume; give one of them")
        require(self, "init_from", self.resume or not self.init_from or Path(self.init_from).is_dir(),
                "no such folder; name a run folder")

    def default_out(self, script):
        """The run folder where --out names none."""
        return f"runs/{script}-{self.preset}-{self.scorer}-s{self.seed}"

    def scorer_options(self):
        """The chosen scorer's options, for ssa.make_scorer."""
        return {"ssa": dict(b=self.ssa_b, n=self.ssa_n, freeze=self.ssa_freeze),
                "temperature": dict(tau=self.tau, freeze=self.tau_freeze)}.get(self.scorer, {})


@dataclass
class TextFlags(SharedFlags):
    """What every trainer takes that reads text."""

    data: str = ""
    """training text: a known name or a path"""
    cache_dir: str = "data"
    """folder for tokenised text"""
    data_timeout: float = 600
    """seconds to wait for token files that `python data.py` is still writing"""
    eval_tokens: int = 65536
    """tokens in an evaluation on the way (0: all); the last one always sees all"""

    def check(self):
        super().check()
        require(self, "eval_tokens", self.eval_tokens >= 0, "must be at least 0")
        require(self, "cache_dir", self.cache_dir, "name a folder")
        require(self, "data_timeout", 0 <= self.data_timeout < math.inf, "must be a number of seconds, at least 0")


def flag(name):
    return "--" + name.replace("_", "-")


def require(config, name, holds, remedy):
    """Raise UserError naming the flag, its value and the remedy unless `holds`."""
    if not holds:
        raise UserError(f"{flag(name)}={getattr(config, name)}: {remedy}")


def parse(Config, presets, default_preset, argv=None, script=None):
    """(config, saved): the checked flags; saved is the config.json of the run to resume, or None.

    Config: a dataclass that inherits SharedFlags. presets: name -> dict of its values. default_preset: what `auto` means
    on this machine. With --resume the saved flags win, and a flag on the command line that differs is an error. On any
    error this prints one line and exits with code 2; --help exits with 0.
    """
    argv = sys.argv[1:] if argv is None else argv
    script = script or Path(sys.argv[0]).stem
    try:
        config = _with_preset(Config, presets, default_preset, argv)
        config.out = config.out or config.default_out(script)
        saved = None
        if config.resume and _begun(config.out):
            config, saved = _resumed(Config, config.out, argv)
        config.check()
        return config, saved
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":  # of the many processes that torchrun has started one says so
            sys.exit(2)
        fail(error)


def _begun(out):
    """Whether there is a run to resume."""
    try:
        content = {path.name for path in Path(out).iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise UserError(f"--out={out}: cannot be read ({error.strerror}); check its permissions") from None
    if "config.json" not in content and "model.safetensors" in content:
        raise UserError(f"--out={out}: holds a run whose config.json is gone; restore it, replace it with --overwrite, or choose "
                        "another folder")
    return "config.json" in content


def _with_preset(Config, presets, default_preset, argv):
    # tyro wants the defaults before it parses, and they depend on --preset: so that one flag is read ahead.
    ahead = re.search(r"(?:^|\x00)--preset[=\x00]([^\x00]+)", "\x00".join(argv))
    name = ahead.group(1) if ahead else "auto"
    if name == "auto":
        name = default_preset
    if name not in presets:
        raise UserError(f"--preset={name}: unknown; choose one of {', '.join(presets)}")
    config = tyro_cli(Config, argv, replace(Config(), preset=name, **presets[name]))
    config.preset = name
    return config


def _resumed(Config, out, argv):
    from files import read_json  # here, because files.py needs UserError from this file
    saved = read_json(Path(out) / "config.json", "restore it, or start anew with --overwrite")
    flags = _checked(Config, saved, Path(out) / "config.json")
    before = replace(Config(), **{**flags, "resume": True, "overwrite": False})
    config = tyro_cli(Config, argv, before)
    if config.preset == "auto":
        config.preset = before.preset
    config.out = out
    for f in fields(Config):
        then, now = getattr(before, f.name), getattr(config, f.name)
        if f.name not in NOT_TRAINING and then != now:
            raise UserError(f"{flag(f.name)}={now}: the run in {out} was started with {flag(f.name)}={then}; leave the flag "
                            "out to continue it, or choose another --out")
    return config, saved


def _checked(Config, saved, path):
    """The flags in config.json that this version has. A checksum proves that a file is whole, not that it means well: so
    every value must be of its flag's type."""
    flags, given = {}, saved.get("flags")
    for f in fields(Config):
        if isinstance(given, dict) and f.name in given:
            value = flags[f.name] = given[f.name]
            same = type(value) is type(f.default) or {type(value), type(f.default)} == {int, float}
            choices = get_args(f.type)
            if not same or (choices and value not in choices):
                raise UserError(f"{path}: {flag(f.name)}={value}: cannot be right; restore it, or start anew with --overwrite")
    return flags


def tyro_cli(Config, argv, default):
    """tyro.cli, its boxes of several lines made into the one line of a UserError."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(Config, args=argv, default=default)
    except SystemExit as stop:
        if not stop.code:
            raise  # --help
        lines = re.sub(r"\x1b\[[0-9;]*m", "", printed.getvalue()).splitlines()
        lines = [line.strip("│ ") for line in lines if line.startswith("│")]
        rule = next((i for i, line in enumerate(lines) if line.startswith("─")), len(lines))
        raise UserError(" ".join(lines[:rule]).rstrip(".") + "; see --help") from None
