"""What train_gpt.py chooses and foretells without flags: the preset for the hardware found, and --dry-run."""

import re
import stat

import pytest

from conftest import command
from test_model import tiny

import run


def dry(cwd, *flags, **env):
    return command("train_gpt.py", "--dry-run", *flags, cwd=cwd, **env).stdout


def fake_driver(folder, answer):
    """An nvidia-smi on PATH that finds what `answer` says."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\necho '{answer}'\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(folder)


@pytest.mark.parametrize("answer, flags, wanted", [
    ("GPU 0: NVIDIA H200", [], r"preset nemotron-114m on fineweb with scorer ssa -> .* \(the default where there is a CUDA GPU\)"),
    ("GPU 0: NVIDIA H200", ["--device=cpu"], r"preset laptop on pydocs .* \(the default without a CUDA GPU\)"),
    ("GPU 0: NVIDIA H200", ["--device", "cpu"], r"preset laptop on pydocs "),
    ("No devices were found", [], r"preset laptop on pydocs .* \(the default: no CUDA GPU found\)"),
    ("GPU 0: NVIDIA H200", ["--preset=laptop"], r"preset laptop on pydocs .* \(asked for\)")])
def test_the_first_line_says_which_preset_and_why(tmp_path, answer, flags, wanted):
    path = fake_driver(tmp_path, answer)
    # A run that stops at once: --dry-run of the large preset measures products, which takes a second.
    out = dry(tmp_path, *flags, "--micro-batch=1", "--batch-size=1", "--dtype=float32", "--threads=1", PATH=path)
    assert re.match(wanted, out.splitlines()[0]), out
    assert [p.name for p in tmp_path.iterdir()] == ["nvidia-smi"]  # nothing else was written


def test_a_dry_run_tells_parameters_memory_and_time(tmp_path):
    out = dry(tmp_path, "--preset=nemotron-114m", "--device=cpu", "--dtype=float32", "--threads=1", "--micro-batch=1")
    assert "parameters: 114,150,720, 38,633,472 of them the embedding" in out
    assert "tokens: 786,432 a step, 17.3 billion in 22,000 steps" in out
    assert re.search(r"memory of a process: 1\.70 GB for weights.* this machine has \d+\.\d+ GB", out)
    assert re.search(r"time: .* GFLOP/s measured, .* a step, .* in all, [\d,]+ tokens/s", out)


def test_shares_of_a_batch():
    flags = type("Flags", (), {"batch_size": 12, "micro_batch": 0, "typical_length": 0})
    assert [run.share_of_batch(flags, n) for n in (1, 2, 3, 12)] == [12, 6, 4, 1]
    with pytest.raises(run.UserError, match="must be a multiple of 5"):
        run.share_of_batch(flags, 5)
    assert run._pick_micro_batch(flags, tiny().config, "cpu", 3)[0] == 4
