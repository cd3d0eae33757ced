"""One of two processes of a run is killed: the other must end soon and say so, and any number of processes goes on with the
same global batches, so that the curve is the undisturbed run's."""

import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path

from conftest import command
from faults_programs import words
from metrics import read_metrics
from test_distributed import MANY, Run, wait_for_lines

FLAGS = [*MANY, "--steps=60", "--save-every=10", "--eval-every=30"]


def curve(folder):
    return [line["loss"] for line in read_metrics(folder / "r" / "metrics.jsonl") if "loss" in line]


def killed_and_restarted(folder, undisturbed, rng):
    """-> a record: who was killed where, how long the other took to end, what it said, and how far the curve is off."""
    victim, lines, then = rng.randrange(2), rng.randrange(1, 60), rng.choice([1, 2, 4])
    shutil.rmtree(folder / "r", ignore_errors=True)
    run = Run(*FLAGS, cwd=folder)
    wait_for_lines(folder / "r", lines)
    start = time.monotonic()
    os.kill(run.children[victim], signal.SIGKILL)
    codes, _, errors = run.wait(check=False)
    seconds = time.monotonic() - start
    said = [line for line in errors[1 - victim].splitlines() if line.startswith("error: ")]
    codes_then, _, errors = Run("--out=r", "--resume", "--micro-batch=3", cwd=folder, count=then).wait(check=False)
    losses = curve(folder)
    off = max(abs(a - b) for a, b in zip(losses, undisturbed)) if len(losses) == len(undisturbed) else None
    return {"killed": victim, "after line": lines, "codes": codes, "seconds until the other ended": round(seconds, 2),
            "said": said, "traceback": "Traceback" in errors[0], "resumed by": then, "codes then": codes_then,
            "largest difference of a loss": off}


def long_form(n, seed=0):
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="ssa-faults-") as name:
        folder = Path(name)
        words(folder)
        command("train_gpt.py", *FLAGS, cwd=folder)
        undisturbed = curve(folder)
        return {"cases": [killed_and_restarted(folder, undisturbed, rng) for _ in range(n)]}
