"""What several test files need: a small text, a tiny run, and the trainers' real commands in subprocesses."""

import os
import random
import runpy
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import matplotlib.pyplot  # noqa: F401  (imported here for the forks of this process, see `command`)
import numpy
import pytest
import torch
import torch._dynamo  # noqa: F401
from numpy.lib import NumpyVersion

ROOT = Path(__file__).resolve().parent.parent

torch.set_num_threads(1)  # tensors this small only lose time between threads

# A model and a run so small that a whole training takes the time of importing torch.
TINY = ["--n-layer=2", "--n-head=2", "--n-kv-head=1", "--n-embd=16", "--context=16", "--batch-size=4", "--steps=6",
        "--warmup=2", "--save-every=2", "--eval-every=3", "--eval-tokens=200", "--sample-tokens=8", "--compile=off",
        "--dtype=float32", "--threads=1", "--ood=none", "--data=text.txt"]


def command(script, *flags, cwd, check=True, fresh=False, before=None, **env):
    """Run `python <script> <flags>` in a folder; -> the finished process, its output as text.

    Importing torch takes seconds. So the script runs in a fork of this process, which has imported it, with everything else
    as on the command line; `fresh`, or an operating system without fork, starts a new interpreter. before: what the fork
    calls first, to set limits or traps for itself.
    """
    argv, env = [str(ROOT / script), *map(str, flags)], {**os.environ, "PYTHONUTF8": "1", **env}
    if fresh or not hasattr(os, "fork"):
        done = subprocess.run([sys.executable, *argv], cwd=cwd, text=True, encoding="utf-8", capture_output=True,
                              timeout=300, env=env)
    else:
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            child = os.fork()
            if child == 0:
                _run_script(argv, cwd, env, out, err, before)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            texts = [(file.seek(0), file.read().decode("utf-8"))[1] for file in (out, err)]
        done = subprocess.CompletedProcess(argv, code, *texts)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done


def _run_script(argv, cwd, env, out, err, before=None):
    """In the child: become `python <argv>`, and never return."""
    code = 1
    try:
        os.chdir(cwd)
        os.environ.update(env)
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = open(1, "w", encoding="utf-8"), open(2, "w", encoding="utf-8")
        sys.argv = argv
        if before:
            before()
        runpy.run_path(argv[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        else:
            code = stop.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def start(script, *flags, cwd):
    """The same in the background; -> the running process."""
    return subprocess.Popen([sys.executable, str(ROOT / script), *map(str, flags)], cwd=cwd, text=True, encoding="utf-8",
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUTF8": "1"})


def snapshot(folder):
    """Every file below a folder with its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(done, part):
    """Exit code 2, one line on stderr that holds `part`, no traceback."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    assert len(lines) == 1 and done.stderr.splitlines()[-1] == lines[0] and "Traceback" not in done.stderr, done.stderr
    assert part in lines[0], lines[0]


def require_interpreter():
    """Skip where Triton's interpreter cannot run any kernel: NumPy 2.4 takes no one-element array for a number, which Triton's
    before 3.7 (PyTorch 2.11 brings it) relies on."""
    pytest.importorskip("triton", minversion="3.7" if NumpyVersion(numpy.__version__) >= "2.4.0" else None)


@pytest.fixture
def folder(tmp_path):
    """An empty folder but for text.txt: 6,000 characters of words in random order."""
    words = "the a key query value head score weight signed average softmax attends to and of more less far near".split()
    rng = random.Random(0)
    (tmp_path / "text.txt").write_text(" ".join(rng.choice(words) for _ in range(1200))[:6000], encoding="utf-8")
    return tmp_path
