"""train_icl.py through its real command: what a run leaves, all scorers in effect, resuming, comparing, wrong flags."""

import json
import re
import shutil
import signal

import numpy as np
import pytest

import icl_compare
from checkpoint import load_run
from conftest import ROOT, command, refused, snapshot, start
from flags import SharedFlags
from metrics import read_metrics

SCRIPT = "train_icl.py"
TINY = ["--points=6", "--first-points=4", "--points-every=2", "--n-layer=2", "--n-head=2", "--n-embd=16", "--context=24",
        "--batch-size=8", "--steps=6", "--warmup=2", "--save-every=2", "--eval-every=3", "--test-sequences=8", "--threads=1"]


def train(folder, *flags, **more):
    return command(SCRIPT, *TINY, *flags, cwd=folder, **more)


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def test_a_run_leaves_its_numbers_and_learns(tmp_path):
    done = train(tmp_path, "--scorer=ssa", "--steps=300", "--lr=0.01", "--batch-size=32", "--eval-every=150", "--save-every=150",
                 "--n-embd=32", "--points-every=20", "--test-sequences=100")
    out = tmp_path / "runs" / "train_icl-laptop-every-final" / "ssa-s0"
    assert f"every with final labels, scorer ssa -> {out.relative_to(tmp_path)}" in done.stdout
    summary, shift = read(out / "summary.json"), read(out / "shift.json")
    assert summary["val_error"] < 0.06 < 0.4 < min(v for v in shift["in_distribution"]["baselines"].values() if v)
    assert shift["in_distribution"]["error"] == pytest.approx(summary["val_error"], abs=1e-6)
    assert summary["max_change_b"] > 0 and summary["max_change_n"] > 0 and summary["positions_reached"] == 6
    assert [m["points"] for m in read_metrics(out / "metrics.jsonl") if "loss" in m][::20] == [4] + [6] * 14
    assert len(shift["collapse"]["by_magnitude"][0]["picture"]) == 2 and (out / "loss.png").stat().st_size > 5000
    again = command(SCRIPT, f"--out={out}", "--resume", cwd=tmp_path)
    assert "this run was complete" in again.stdout
    model, config = load_run(out)
    assert model.n_parameters() == summary["parameters"] and config["flags"]["task"] == "every"


def test_all_scorers_train_and_no_two_alike(tmp_path):
    losses, moved = {}, {}
    for scorer in SharedFlags.__annotations__["scorer"].__args__:
        more = ["--tau=2"] if scorer == "temperature" else []
        train(tmp_path, f"--scorer={scorer}", *more, "--steps=3", "--lr=0.1", "--warmup=0", f"--out={scorer}")
        losses[scorer] = [m["loss"] for m in read_metrics(tmp_path / scorer / "metrics.jsonl") if "loss" in m][-1]
        moved[scorer] = {k: v > 1e-5 for k, v in read(tmp_path / scorer / "summary.json").items() if k.startswith("max_change")}
    assert len(set(losses.values())) == 8, losses
    assert moved.pop("ssa") == dict(max_change_b=True, max_change_n=True)
    assert moved.pop("temperature") == dict(max_change_tau=True)
    assert not any(moved.values())


@pytest.mark.parametrize("flags", ["--task=some --law=iid", "--task=linear", "--task=mixed", "--labels=running",
                                   "--attention-only --no-norm --positions=none", "--dtype=bfloat16"])
def test_tasks_and_ablations_run(tmp_path, flags):
    train(tmp_path, "--scorer=ssa", *flags.split(), "--out=r")
    summary, config = read(tmp_path / "r" / "summary.json"), read(tmp_path / "r" / "config.json")
    assert summary["max_change_b"] > 0 and np.isfinite(summary["val_loss"])
    if "attention-only" in flags:
        assert config["model"]["n_ff"] == 0 and config["model"]["norm"] == "none" and summary["positions_reached"] is None


LONG = [*TINY, "--scorer=ssa", "--positions=random-offset", "--steps=200", "--save-every=20", "--eval-every=50",
        "--dropout=0.1", "--out=r"]


def test_killed_and_resumed_ends_byte_for_byte_the_same(tmp_path):
    command(SCRIPT, *LONG, cwd=tmp_path)
    shutil.move(tmp_path / "r", tmp_path / "undisturbed")
    process = start(SCRIPT, *LONG, cwd=tmp_path)
    path = tmp_path / "r" / "metrics.jsonl"
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < 70):
        pass
    process.kill()
    assert process.wait() == -signal.SIGKILL, process.stderr.read()
    process.communicate()
    done = command(SCRIPT, "--out=r", "--resume", cwd=tmp_path)
    assert re.search(r"^resumed after step \d+0$", done.stdout, re.M), done.stdout
    for name in ("model.safetensors", "shift.json"):
        assert (tmp_path / "r" / name).read_bytes() == (tmp_path / "undisturbed" / name).read_bytes()
    first, second = ([{k: v for k, v in line.items() if k != "tokens_per_s"}
                      for line in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("r", "undisturbed"))
    assert first == second and first[-1]["step"] == 200


def test_a_comparison_trains_tests_and_prints_one_table(tmp_path):
    done = train(tmp_path, "--compare=ssa,softmax", "--ssa-b=1", "--results=tables")
    folder = tmp_path / "tables" / "laptop-every-final"
    table = (folder / "table.txt").read_text(encoding="utf-8")
    assert table in done.stdout and re.search(r"^in distribution +\d+\.\d\d +\d+\.\d\d +-?\d+\.\d\d +\d+\.\d\d$", table, re.M)
    assert {p.name for p in folder.iterdir()} == {"ssa-s0.json", "softmax-s0.json", "comparison.json", "table.txt", *(
        f"{name}.png" for name in ("lengths", "deciders", "outlier", "interventions", "collapse", "weights"))}
    for scorer in ("ssa", "softmax"):
        config = read(tmp_path / "runs" / "train_icl-laptop-every-final" / f"{scorer}-s0" / "config.json")
        assert config["flags"]["ssa_b"] == (1.0 if scorer == "ssa" else 0.8) and config["flags"]["scorer"] == scorer
    again = train(tmp_path, "--compare=ssa", "--ssa-b=1", check=False)  # what a run has to say reaches the user
    assert again.returncode == 2 and "holds a run already" in again.stderr and "Traceback" not in again.stderr
    refused(train(tmp_path, "--compare=ssa", "--path=triton", "--out=new", check=False), "--path=triton")
    assert not (tmp_path / "new").exists()  # what this machine cannot do is said before any run begins
    assert "ssa-s0: this run was complete" in train(tmp_path, "--compare=ssa", "--ssa-b=1", "--resume").stdout


def test_a_comparison_keeps_its_logs_and_the_files_of_others(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "table.txt").write_text("precious", encoding="utf-8")
    refused(train(tmp_path, "--compare=ssa", "--out=mine", check=False), "--out=mine: is not empty and holds no run")
    assert snapshot(tmp_path / "mine") == {"table.txt": b"precious"}
    train(tmp_path, "--compare=softmax", "--out=c")
    log = (tmp_path / "c" / "softmax-s0.log").read_text(encoding="utf-8")
    done = train(tmp_path, "--compare=softmax", "--out=c", "--points=5", "--resume", check=False)  # what a mistake leaves
    assert done.returncode == 2 and "softmax-s0: error: --points=5: the run in" in done.stderr
    assert (tmp_path / "c" / "softmax-s0.log").read_text(encoding="utf-8").startswith(log)


def test_differences_are_paired_by_seed():
    def result(error):
        return dict(task="mixed", lengths=[], in_distribution=dict(error=error, baselines=dict(constant_true=0.5)))
    row, = icl_compare.compare({"ssa": [result(e) for e in (0.1, 0.5, 0.9)], "softmax": [result(e) for e in (0.2, 0.6, 1.0)]})
    assert row["scorers"]["ssa"]["mean"] == pytest.approx(0.5) and row["scorers"]["ssa"]["high"] > 1
    difference = row["differences"]["softmax"]
    assert [difference[key] for key in ("mean", "low", "high")] == pytest.approx([-0.1] * 3)


def test_without_flags_it_compares_ssa_with_softmax():
    from train_icl import PRESETS, Flags
    flags = Flags(preset="laptop", compare="ssa,softmax", seeds="0,1", out="x", **PRESETS["laptop"])
    flags.check()
    assert [(run.scorer, run.seed, run.out) for run in flags.runs()] == [
        ("ssa", 0, "x/ssa-s0"), ("softmax", 0, "x/softmax-s0"), ("ssa", 1, "x/ssa-s1"), ("softmax", 1, "x/softmax-s1")]
    assert "--compare=ssa,softmax" in (ROOT / SCRIPT).read_text(encoding="utf-8")
    paper = Flags(preset="paper", **PRESETS["paper"])
    assert [paper.points_at(step) for step in (0, 1999, 2000, 29999, 30000, 400_000)] == [11, 11, 13, 39, 41, 41]


# (flags after TINY, what the line must say), as in test_wrong_input.py.
WRONG = [
    ("--task=most", "'most'"),
    ("--scorer=ssa --task=linear --labels=final", "--labels=final: --task=linear cannot be answered"),
    ("--scorer=ssa --points=30", "--points=30: makes 30 tokens, more than --context=24"),
    ("--scorer=ssa --points=3", "--first-points=4: must be at most --points=3"),
    ("--scorer=ssa --n-head=3", "--n-head=3: does not divide"),
    ("--scorer=ssa --seeds=0,1", "--seeds=0,1: only --compare"),
    ("--scorer=ssa --jobs=2", "--jobs=2: only --compare"),
    ("--scorer=ssa --results=tables", "--results=tables: only --compare"),
    ("--scorer=ssa --task=linear --law=iid", "--law=iid: is of quantifiers"),
    ("--scorer=ssa --compare=ssa,softmax", "--scorer: contradicts --compare"),
    ("--compare=ssa --jobs=-1", "--jobs=-1"),
    ("--compare=ssa,sofmax", "'sofmax' is no scorer"),
    ("--compare=ssa,ssa", "--compare=ssa,ssa: names one twice"),
    ("--compare=ssa --seeds=one", "--seeds=one: must be whole numbers"),
    ("--compare=softmax --steps=0", "--steps=0: must be at least 1"),
    ("--scorer=ssa --test-sequences=0", "--test-sequences=0"),
    ("--scorer=softmax --ssa-b=2", "only --scorer=ssa has it"),
    ("--scorer=ssa --path=sdpa", "--path=sdpa: the fused kernel of PyTorch computes softmax"),
    ("--compare=ssa --out=text.txt", "text.txt"),
    ("--scorer=ssa --data=x", "--data=x"),
]


@pytest.mark.parametrize("flags, part", WRONG)
def test_wrong_input_gets_one_line_and_leaves_nothing(folder, flags, part):
    before = snapshot(folder)
    refused(train(folder, *flags.split(), check=False), part)
    assert snapshot(folder) == before


def committed(name):
    """A comparison of results/icl as icl_figures takes it."""
    folder = ROOT / "results" / "icl" / name
    scorers = read(folder / "comparison.json")["rows"][0]["scorers"]
    return {scorer: [read(path) for path in sorted(folder.glob(f"{scorer}-s*.json"))] for scorer in scorers}


def test_figures_name_what_they_show_and_can_be_read():
    import icl_figures
    from matplotlib.colors import to_rgb
    figure = icl_figures.interventions(committed("small-every-final"))
    legends = [[text.get_text() for text in ax.get_legend().get_texts()] for ax in figure.axes if ax.get_legend()]
    assert [names[-1] for names in legends] == ["scorer swapped for softmax", "scorer swapped for ssa"]
    linear = committed("small-linear-running")
    figure = icl_figures.functions(linear)
    for ax in (ax for ax in figure.axes if ax.texts):
        image = ax.images[0]
        for text in ax.texts:
            j, i = text.get_position()
            cell = image.cmap(image.norm(image.get_array()[i, j]))[:3]
            assert abs(np.dot(np.subtract(cell, to_rgb(text.get_color())), (0.299, 0.587, 0.114))) > 0.35, text.get_text()
            assert len(text.get_text()) <= 5
    assert not [ax for ax in icl_figures.examples(linear).axes if any("Fill" in type(c).__name__ for c in ax.collections)]


def test_more_than_four_scorers_stand_in_rows():
    import icl_figures
    figure, axes = icl_figures.panels_of(dict.fromkeys("abcdef"), 2)  # two rows of scorers, two panels each
    assert [len(column) for column in axes] == [2] * 6 and figure.get_size_inches()[0] < 14
    places = [[ax.get_subplotspec().rowspan.start for ax in column] for column in axes]
    assert places == [[0, 1]] * 4 + [[2, 3]] * 2
    assert sum(ax.get_visible() for ax in figure.axes) == 12 and len(figure.axes) == 16
