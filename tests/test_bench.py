"""bench.py as a user runs it, at sizes that mean nothing: the rows it writes, and what it says to a wrong flag."""

import json
import math

import pytest
from conftest import command

KEYS = {"what", "scorer", "path", "dtype", "T", "head_dim", "direction", "ms", "softmax_ms", "ratio", "extra_bytes",
        "softmax_extra_bytes", "peak_fraction", "matmul_flops", "machine", "threads", "torch", "date", "command"}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    done = command("bench.py", "--quick", "--lengths=16,64", "--tokens=64", "--seconds=0.02", "--threads=1", cwd=folder)
    assert [p.name for p in (folder / "results").iterdir()] == ["bench-cpu.json"]  # whole, nothing left over
    rows = json.loads((folder / "results" / "bench-cpu.json").read_text(encoding="utf-8"))
    assert done.stdout.count("ratio") == len(rows)
    return rows


def test_every_row_is_complete(rows):
    for row in rows:
        assert KEYS <= set(row)
        assert row["scorer"] == "ssa" and row["path"] in ("plain", "blockwise")
        assert all(math.isfinite(row[key]) and row[key] > 0 for key in ("ms", "softmax_ms", "ratio", "peak_fraction"))


def test_every_case_is_there(rows):
    attention = [(r["dtype"], r["T"], r["direction"]) for r in rows if r["what"] == "attention"]
    assert attention == [(dtype, T, way) for dtype in ("float32", "bfloat16")
                         for T in (16, 64) for way in ("fwd", "fwd_bwd")]
    assert [r["preset"] for r in rows if r["what"] == "step" and r["dtype"] == "float32"] == ["laptop"]


def test_memory_counts_results_and_growth_is_fitted(rows):
    for row in rows:
        if row["what"] == "attention":
            one = row["B"] * row["T"] * 12 * row["head_dim"] * (4 if row["dtype"] == "float32" else 2)
            least = one if row["direction"] == "fwd" else 4 * one  # the output, and the gradients of q, k and v
            assert row["extra_bytes"] >= least and row["softmax_extra_bytes"] >= least
            assert math.isfinite(row["time_growth"]) and 0 < row["memory_growth"] < 2


def test_the_in_context_step_is_timed_against_gpt2(tmp_path):
    pytest.importorskip("transformers")
    command("bench.py", "--icl", "--quick", "--seconds=0.002", "--threads=1", cwd=tmp_path)
    row = json.loads((tmp_path / "results" / "bench-icl-cpu.json").read_text(encoding="utf-8"))[0]
    assert KEYS <= set(row) and row["what"] == "icl step" and row["T"] == 81  # 41 points; the last y is read by nobody
    assert row["times_as_fast"] == pytest.approx(1 / row["ratio"])
