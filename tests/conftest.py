"""What several test files need: a small text, a tiny run, and the trainers' real commands in subprocesses."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)  # tensors this small only lose time between threads

# A model and a run so small that a whole training takes the time of importing torch.
TINY = ["--n-layer=2", "--n-head=2", "--n-kv-head=1", "--n-embd=16", "--context=16", "--batch-size=4", "--steps=6",
        "--warmup=2", "--save-every=2", "--eval-every=3", "--eval-tokens=200", "--sample-tokens=8", "--compile=off",
        "--dtype=float32", "--threads=1", "--ood=none", "--data=text.txt"]


def command(script, *flags, cwd, check=True, **env):
    """Run `python <script> <flags>` in a folder; -> the finished process, its output as text."""
    done = subprocess.run([sys.executable, str(ROOT / script), *map(str, flags)], cwd=cwd, text=True, encoding="utf-8",
                          capture_output=True, timeout=300, env={**os.environ, "PYTHONUTF8": "1", **env})
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def start(script, *flags, cwd):
    """The same in the background; -> the running process."""
    return subprocess.Popen([sys.executable, str(ROOT / script), *map(str, flags)], cwd=cwd, text=True, encoding="utf-8",
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUTF8": "1"})


@pytest.fixture
def folder(tmp_path):
    """An empty folder but for text.txt: 6,000 characters of words in random order."""
    words = "the a key query value head score weight signed average softmax attends to and of more less far near".split()
    rng = random.Random(0)
    (tmp_path / "text.txt").write_text(" ".join(rng.choice(words) for _ in range(1200))[:6000], encoding="utf-8")
    return tmp_path
