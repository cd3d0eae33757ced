"""The programs that the fault tests hurt, each so small that a whole run takes a second.

A newcomer's trainer joins them with a row in PROGRAMS: the kill, damage and disk tests then run on it too.
"""

import json
import random
import shutil
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import icl_shift  # noqa: F401  (these three are imported here for the forks of this process, see conftest.command)
import mlm_data  # noqa: F401
import shards
import training  # noqa: F401
from conftest import TINY, command
from files import write_atomically
from metrics import read_metrics
from tokens import get_tokenizer


@dataclass(frozen=True)
class Program:
    """script and flags: the command; again: the flags that continue an interrupted one; prepare: fills a folder with what it
    reads; result: what the folder holds at the end that no fault may change; damageable: what continuing reads, as globs of
    which the last file counts (of checkpoints, the newest)."""

    script: str
    flags: tuple
    prepare: Callable[[Path], None]
    result: Callable[[Path], dict]
    again: tuple = ()
    damageable: tuple = ()

    def run(self, folder, *more, **options):
        return command(self.script, *self.flags, *more, cwd=folder, **options)


# ------------------------------------------------------------------------------------------------- what they read and leave

def words(folder):
    """text.txt: 6,000 letters in random order, which no text of another test is."""
    rng = random.Random(1)
    (folder / "text.txt").write_text("".join(rng.choice("abcdefgh \n") for _ in range(6000)), encoding="utf-8")


def nothing(folder):
    """In-context tasks make their own numbers."""


def sentences(folder):
    """text.txt: 300 sentences of 3 to 12 words, one a line."""
    rng = random.Random(0)
    vocabulary = "you the it what do that to is a see at look want put on in your mommy dog cat ball book go".split()
    lines = [" ".join(rng.choice(vocabulary) for _ in range(rng.randrange(3, 12))) + " .\n" for _ in range(300)]
    (folder / "text.txt").write_text("".join(lines), encoding="utf-8")


def documents(folder):
    """docs.jsonl: 300 documents of 20 to 80 letters."""
    rng = random.Random(0)
    texts = ["".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(20, 80))) + str(i) for i in range(300)]
    lines = [json.dumps({"text": text, "id": f"d{i}"}) + "\n" for i, text in enumerate(texts)]
    (folder / "docs.jsonl").write_text("".join(lines), encoding="utf-8")


def trained(folder):
    """Weights, and metrics without what a clock has measured."""
    lines = [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in read_metrics(folder / "r" / "metrics.jsonl")]
    return {"weights": (folder / "r" / "model.safetensors").read_bytes(), "metrics": lines}


def tested(folder):
    """The same of train_icl.py, and what its tests have found."""
    return trained(folder) | {"shift": json.loads((folder / "r" / "shift.json").read_text(encoding="utf-8"))}


def token_files(folder):
    return {path.name: path.read_bytes() for path in sorted((folder / "cache").rglob("*")) if path.suffix in (".bin", ".json")}


RUN_FOLDER = ("r/config.json", "r/resume-*.pt", "r/resume-*.sha256", "r/metrics.jsonl")

SMALL = ("--batch-size=8", "--steps=6", "--warmup=2", "--save-every=2", "--eval-every=3", "--dtype=float32", "--compile=off",
         "--threads=1", "--out=r")

PROGRAMS = {
    "train_gpt": Program(
        "train_gpt.py", (*TINY, "--dropout=0.1", "--out=r"), words, trained, ("--resume",),
        (*RUN_FOLDER, "data/*/manifest.json", "data/*/train-*.bin", "data/*/val-*.bin", "text.txt")),
    "train_icl": Program(
        "train_icl.py",
        ("--task=linear", "--scorer=ssa", "--points=6", "--first-points=4", "--points-every=2", "--n-layer=2", "--n-head=2",
         "--n-embd=16", "--context=24", "--dropout=0.1", "--test-sequences=4", *SMALL),
        nothing, tested, ("--resume",), RUN_FOLDER),
    "train_babyberta": Program(
        "train_babyberta.py",
        ("--data=text.txt", "--vocab-size=300", "--n-layer=2", "--n-head=2", "--n-embd=16", "--context=32", "--dropout=0.1",
         *SMALL), sentences, trained, ("--resume",), (*RUN_FOLDER, "r/tokenizer.json", "text.txt")),
    "data": Program(
        "data.py", ("docs.jsonl", "--tokenizer=bytes", "--tokens=12000", "--shard-tokens=2000", "--cache-dir=cache",
                    "--workers=1"), documents, token_files),
}


# ------------------------------------------------------------------------------------------------------- short cuts in forks

def draw_nothing(folder, **_):
    """In place of metrics.plot_loss, which takes longer than the run and computes nothing that is read again."""
    write_atomically(folder / "loss.png", b"no picture")


def tokenise_here(documents, name, workers):
    """In place of shards.tokenised: no processes, which take a second to start (test_shards.py kills real ones)."""
    tokenizer = get_tokenizer(name)
    return ((number, split, tokenizer.document(text)) for number, split, text in documents)


def short_cuts():
    """For the fork that is about to run a program: leave out what takes long and is not at stake."""
    import metrics
    metrics.plot_loss = draw_nothing
    shards.tokenised = tokenise_here


@contextmanager
def folder_for(program):
    """A temporary folder with what the program reads."""
    with tempfile.TemporaryDirectory(prefix="ssa-faults-") as name:
        program.prepare(Path(name))
        yield Path(name)


@contextmanager
def copy_of(folder):
    with tempfile.TemporaryDirectory(prefix="ssa-faults-") as name:
        shutil.copytree(folder, name, dirs_exist_ok=True)
        yield Path(name)
