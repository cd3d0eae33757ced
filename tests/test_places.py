"""A checkout and a machine that are not the developer's: everything that such a place may lack or forbid, in one run.

No C++ compiler, no home that can be written, a checkout that cannot be written, paths with blanks and letters beyond ASCII, one
thread, no terminal, no input, no colours, an ASCII locale. Other versions of Python and PyTorch: results/reliability.md.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from conftest import ROOT, TINY
from faults_programs import words

NOBODY = 65534
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2  # <linux/prctl.h>, <linux/capability.h>


@pytest.fixture
def place():
    """A temporary folder that anybody may enter (pytest's own may not be)."""
    with tempfile.TemporaryDirectory(prefix="ssa plätze ") as name:
        os.chmod(name, 0o755)
        yield Path(name)
        for folder in [Path(name), *filter(Path.is_dir, Path(name).rglob("*"))]:
            folder.chmod(0o755)


def obey_modes():
    """For a child of root that only root can start: from its exec on it may no longer override the modes of files."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        if prctl(PR_CAPBSET_DROP, capability, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")


def somebody():
    """What makes a child process an unprivileged user, or where only root can read this Python, a root without its power: root
    may write anywhere, whatever the modes say."""
    if os.name != "posix":
        pytest.skip("modes of folders mean something else on this system")
    if os.geteuid():
        return {}
    user = dict(user=NOBODY, group=NOBODY, extra_groups=[])
    try:
        runs = subprocess.run([sys.executable, "-c", "import numpy"], **user, capture_output=True).returncode == 0
    except PermissionError:
        runs = False
    return user if runs else dict(preexec_fn=obey_modes)


def read_only_checkout(place):
    checkout = place / "Kopie – 写"
    checkout.mkdir()
    for path in [*ROOT.glob("*.py"), ROOT / "ssa_cpu.cpp"]:
        shutil.copy(path, checkout)
    for path in [*checkout.iterdir(), checkout]:
        path.chmod(0o555)
    return checkout


def test_a_poor_place(place):
    user = somebody()
    checkout, work, home, temporary = read_only_checkout(place), place / "Arbeit æø", place / "home", place / "tmp"
    for folder in (work, home, temporary):
        folder.mkdir()
    words(work)
    if "user" in user:
        for path in (work, temporary):
            os.chown(path, NOBODY, NOBODY)
    home.chmod(0o555)
    for folder in (checkout, home):  # they are what they should be
        assert subprocess.run([sys.executable, "-c", "open('new', 'w')"], cwd=folder, stderr=subprocess.DEVNULL, **user).returncode
    before = sorted(checkout.rglob("*"))
    env = {"HOME": str(home), "TMPDIR": str(temporary), "PATH": str(home), "CXX": "", "LC_ALL": "C", "OMP_NUM_THREADS": "1",
           "NO_COLOR": "1", "TERM": "dumb"}
    done = subprocess.run([sys.executable, str(checkout / "train_gpt.py"), *TINY, "--threads=0", "--path=auto", "--out=Lauf ü"],
                          cwd=work, env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=200, **user)
    out, err = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
    assert done.returncode == 0 and "Traceback" not in err, err
    assert "path: plain (no C++ compiler" in out and "threads: 1" in out and "\x1b" not in out + err and "\r" not in err
    summary = json.loads((work / "Lauf ü" / "summary.json").read_text(encoding="utf-8"))
    assert summary["steps"] == 6 and summary["path"] == "plain"
    assert sorted(checkout.rglob("*")) == before and not list(home.iterdir())
