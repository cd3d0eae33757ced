"""train_gpt.py through its real command: the main job small, the scorer in effect, faults, and wrong input."""

import json
import math
import os
import random
import re
import shlex
import shutil
import signal
import time

import pytest
import torch

import run
from checkpoint import load_run
from conftest import ROOT, TINY, command, refused, snapshot, start
from flags import SharedFlags
from metrics import read_metrics

SCRIPT = "train_gpt.py"
# Long enough to be killed in the middle, with dropout so that the random state matters.
LONG = [*TINY, "--steps=400", "--save-every=20", "--eval-every=50", "--dropout=0.1", "--out=r"]


def train(folder, *flags, **more):
    return command(SCRIPT, *TINY, *flags, cwd=folder, **more)


def without_timing(path):
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in read_metrics(path / "metrics.jsonl")]


# ---------------------------------------------------------------------------------------------------------------- the job

def test_a_run_leaves_what_the_readme_promises(folder):
    done = train(folder, fresh=True)
    out = folder / "runs" / "train_gpt-laptop-ssa-s0"
    assert "preset laptop on text.txt with scorer ssa" in done.stdout.splitlines()[0]
    for decision in ("device", "threads", "micro_batch", "dtype", "path", "compile"):
        assert len(re.findall(rf"^{decision}: .+ \(.+\)$", done.stdout, re.M)) == 1, decision
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["decisions"]["path"] in ("blockwise", "plain") and config["model"]["scorer"] == "ssa"
    lines = read_metrics(out / "metrics.jsonl")
    steps, evaluations = [m for m in lines if "loss" in m], [m for m in lines if "val_loss" in m]
    assert [m["step"] for m in steps] == [1, 2, 3, 4, 5, 6] and [m["step"] for m in evaluations] == [3, 6]
    assert all({"lr", "grad_norm", "tokens_per_s"} <= set(m) for m in steps)
    assert all(len(m["b"]) == len(m["n"]) == 2 and len(m["b"][0]) == 2 for m in evaluations)
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["val_bpb"] == pytest.approx(summary["val_loss"] / math.log(2))  # a byte a token
    assert {"scorer", "path", "steps", "unigram_bpb", "ood_bpb", "tokens_per_s", "parameters", "seconds"} <= set(summary)
    assert summary["max_change_b"] > 0 and summary["max_change_n"] > 0
    assert (out / "loss.png").stat().st_size > 5000 and (out / "sample.txt").exists()
    assert len(list(out.glob("resume-*.pt"))) == 2 and not list(out.glob("*.tmp"))
    model, _ = load_run(out)
    assert model.n_parameters() == summary["parameters"]


def test_training_learns(folder):
    train(folder, "--steps=300", "--lr=0.01", "--batch-size=16", "--eval-every=150", "--save-every=150", "--out=r")
    summary = json.loads((folder / "r" / "summary.json").read_text(encoding="utf-8"))
    assert summary["val_bpb"] < 0.75 * summary["unigram_bpb"]


def test_out_of_distribution_text_is_evaluated_beside(folder):
    (folder / "other.txt").write_text("0123456789 " * 100, encoding="utf-8")
    train(folder, "--ood=other.txt", "--out=r")
    summary = json.loads((folder / "r" / "summary.json").read_text(encoding="utf-8"))
    assert summary["ood_bpb"] > summary["val_bpb"] > 0


def test_micro_batches_change_memory_and_nothing_else(folder):
    for size in (1, 2, 4):
        train(folder, f"--micro-batch={size}", f"--out={size}")
    losses = [[m["loss"] for m in read_metrics(folder / str(size) / "metrics.jsonl") if "loss" in m] for size in (1, 2, 4)]
    assert losses[0] == pytest.approx(losses[2], abs=1e-5) and losses[1] == pytest.approx(losses[2], abs=1e-5)


def test_gpt2_tokens_give_bits_per_byte_of_text(folder):
    cache = os.environ.get("SSA_DATA_DIR")
    if not cache:
        pytest.skip("SSA_DATA_DIR is not set: no tokenizer files without a network")
    train(folder, "--tokenizer=gpt2", "--steps=2", "--out=r", TIKTOKEN_CACHE_DIR=os.path.join(cache, "tiktoken_cache"))
    summary = json.loads((folder / "r" / "summary.json").read_text(encoding="utf-8"))
    # Near uniform over 50,304 tokens, and words here take a token each, of about five bytes.
    assert summary["val_loss"] == pytest.approx(math.log(50304), abs=0.5)
    assert 2 < summary["val_loss"] / math.log(2) / summary["val_bpb"] < 7


# --------------------------------------------------------------------------------------------------- the scorer in effect

@pytest.mark.parametrize("scorer", ["ssa", "temperature"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trained_scalars_move_through_the_real_command(folder, scorer, dtype):
    train(folder, f"--scorer={scorer}", f"--dtype={dtype}", "--out=r")
    changes = {k: v for k, v in json.loads((folder / "r" / "summary.json").read_text(encoding="utf-8")).items()
               if k.startswith("max_change")}
    assert set(changes) == ({"max_change_b", "max_change_n"} if scorer == "ssa" else {"max_change_tau"})
    assert all(value > 1e-5 for value in changes.values())


def test_a_frozen_run_beside_a_free_one(folder):
    for freeze in ("none", "b", "n", "both"):
        train(folder, f"--ssa-freeze={freeze}", "--lr=0.1", "--warmup=0", f"--out={freeze}")
    moved = {}
    for freeze in ("none", "b", "n", "both"):
        summary = json.loads((folder / freeze / "summary.json").read_text(encoding="utf-8"))
        moved[freeze] = summary["max_change_b"] > 0, summary["max_change_n"] > 0
    assert moved == {"none": (True, True), "b": (False, True), "n": (True, False), "both": (False, False)}
    first_losses = {f: read_metrics(folder / f / "metrics.jsonl")[0]["loss"] for f in moved}
    last_losses = {f: read_metrics(folder / f / "metrics.jsonl")[-2]["loss"] for f in moved}
    assert len(set(first_losses.values())) == 1 and len(set(last_losses.values())) == 4


def test_all_scorers_train_and_no_two_alike(folder):
    scorers = SharedFlags.__annotations__["scorer"].__args__
    losses = {}
    for scorer in scorers:
        more = ["--tau=2"] if scorer == "temperature" else []
        train(folder, f"--scorer={scorer}", *more, "--steps=2", "--lr=0.1", "--warmup=0", f"--out={scorer}")
        losses[scorer] = [m["loss"] for m in read_metrics(folder / scorer / "metrics.jsonl") if "loss" in m][-1]
    assert len(set(losses.values())) == len(scorers), losses


def test_a_scorer_without_gradient_stops_the_run():
    class Model:
        def scorers(self):
            from ssa import SSA
            return [SSA(2)]
    with pytest.raises(SystemExit, match="not in effect"):
        run.require_scorer_in_effect(Model())


# ----------------------------------------------------------------------------------------------------- faults and resuming

@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A LONG run that nothing disturbed; tests copy the folder."""
    folder = tmp_path_factory.mktemp("undisturbed")
    rng = random.Random(1)
    (folder / "text.txt").write_text("".join(rng.choice("abcdefgh \n") for _ in range(6000)), encoding="utf-8")
    command(SCRIPT, *LONG, cwd=folder)
    return folder


def same_end(folder, undisturbed):
    assert (folder / "r" / "model.safetensors").read_bytes() == (undisturbed / "r" / "model.safetensors").read_bytes()
    assert without_timing(folder / "r") == without_timing(undisturbed / "r")


def wait_for_lines(process, path, count):
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < count):
        time.sleep(0.002)


def test_killed_anywhere_and_resumed_ends_byte_for_byte_the_same(folder, undisturbed):
    shutil.copy(undisturbed / "text.txt", folder / "text.txt")
    for lines in (7, 230, 391):
        process = start(SCRIPT, *LONG, "--resume", cwd=folder)  # --resume starts the run where there is none
        wait_for_lines(process, folder / "r" / "metrics.jsonl", lines)
        process.kill()
        assert process.wait() == -signal.SIGKILL, process.stderr.read()
        process.communicate()
    (folder / "r" / ".model.safetensors.1.tmp").write_bytes(b"half")  # as a kill in the middle of writing leaves it
    done = command(SCRIPT, "--out=r", "--resume", cwd=folder)
    assert re.search(r"^resumed after step 3[68]0$", done.stdout, re.M), done.stdout
    same_end(folder, undisturbed)
    assert not list((folder / "r").glob(".*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_prints_the_command_that_resumes(folder, undisturbed, number):
    shutil.copy(undisturbed / "text.txt", folder / "text.txt")
    process = start(SCRIPT, *LONG, cwd=folder)
    wait_for_lines(process, folder / "r" / "metrics.jsonl", 33)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    script, *flags = shlex.split(output.splitlines()[-1])[1:]
    assert number.name in output and "Traceback" not in errors
    command(script, *flags, cwd=folder)
    same_end(folder, undisturbed)


def test_interrupted_while_it_samples_a_run_is_whole_and_resume_finishes_it(folder):
    flags = [*TINY, "--out=r", "--sample-tokens=1000000"]
    process = start(SCRIPT, *flags, cwd=folder)
    for line in process.stdout:
        if line.startswith("step 6/6"):
            break
    while not (folder / "r" / "resume-00000006.pt.sha256").exists():
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and "Traceback" not in errors, errors
    assert load_run(folder / "r") and not (folder / "r" / "sample.txt").exists()


def test_a_reader_that_leaves_ends_the_run_with_one_line(folder):
    process = start(SCRIPT, *LONG, cwd=folder)
    process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    errors = process.stderr.read()
    assert process.wait(timeout=60) == 1 and "stdout was closed" in errors and "Traceback" not in errors, errors
    assert "BrokenPipe" not in errors


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(folder):
    done = train(folder, "--lr=1e30", "--min-lr=0", "--clip=1e30", "--warmup=0", "--save-every=1", "--out=r", check=False)
    assert done.returncode == 1 and re.search(r"^error: step \d+: ", done.stderr, re.M) and "Traceback" not in done.stderr
    weights = [p for path in (folder / "r").glob("model.safetensors") for p in load_run(path.parent)[0].parameters()]
    assert all(p.isfinite().all() for p in weights)


def test_weights_of_a_compiled_run_load_without_the_compiler(folder):
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("no C++ compiler: torch.compile cannot run on this CPU")
    train(folder, "--compile=on", "--n-layer=1", "--steps=3", "--out=compiled")
    train(folder, "--n-layer=1", "--steps=3", "--out=eager")
    model, _ = load_run(folder / "compiled")
    assert not any("_orig_mod" in name for name in model.state_dict())
    for name, tensor in load_run(folder / "eager")[0].state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-3, atol=1e-4)


def test_weights_of_another_run_are_a_start(folder):
    train(folder, "--scorer=softmax", "--out=a")
    done = train(folder, "--scorer=ssa", "--init-from=a", "--steps=1", "--lr=1e-9", "--min-lr=0", "--out=b")
    first, second = (load_run(folder / name)[0].state_dict() for name in "ab")
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first), done.stdout


def test_files_of_another_run_of_the_same_shape_are_not_taken_for_this_ones(folder):
    train(folder, "--out=a")
    train(folder, "--out=b", "--seed=1")
    before = snapshot(folder / "a")
    shutil.copy(folder / "b" / "model.safetensors", folder / "a")
    refused(train(folder, "--init-from=a", "--out=c", check=False), "holds the weights of another run")
    for path in (folder / "b").glob("resume-00000006.pt*"):
        shutil.copy(path, folder / "a")
    done = train(folder, "--out=a", "--resume")
    assert "resume-00000006.pt: is a checkpoint of another run than config.json describes; the checkpoint before it is used" in done.stderr
    assert snapshot(folder / "a")["model.safetensors"] == before["model.safetensors"]
    for path in (folder / "b").glob("resume-*"):
        shutil.copy(path, folder / "a")
    refused(train(folder, "--out=a", "--resume", check=False), "no whole checkpoint is left")
    (folder / "a").rename(folder / "moved")  # a name makes no other run
    shutil.rmtree(folder / "b")
    train(folder, "--out=moved", "--overwrite")
    assert snapshot(folder / "moved")["model.safetensors"] == before["model.safetensors"]


def test_b_and_n_of_another_run_go_on_unless_flags_say_where_to_start(folder):
    train(folder, "--scorer=ssa", "--steps=30", "--lr=0.03", "--out=a")
    still = ("--init-from=a", "--steps=1", "--lr=1e-9", "--min-lr=0")
    done = train(folder, *still, "--ssa-b=5", "--out=b")
    old, new = (load_run(folder / name)[0].scorers()[0] for name in "ab")
    assert "note: n of ssa as in a" in done.stdout and (old.n - 1.5).abs().max() > 0.01
    torch.testing.assert_close(new.n, old.n)
    torch.testing.assert_close(new.b, torch.full_like(old.b, 5.0))
    train(folder, *still, "--ssa-n=1", "--ssa-freeze=n", "--out=c")
    assert (load_run(folder / "c")[0].scorers()[0].n == 1).all()


# ------------------------------------------------------------------------------------------------------------------ parts

def test_the_learning_rate_rises_to_lr_and_falls_to_min_lr():
    flags = SharedFlags(lr=1.0, min_lr=0.1, warmup=10, steps=110)
    rates = [run.learning_rate(step, flags) for step in range(111)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0) and rates[110] == pytest.approx(0.1)
    assert rates[60] == pytest.approx(0.55) and all(a >= b for a, b in zip(rates[10:], rates[11:]))


def test_weight_decay_falls_on_matrices_alone():
    from test_model import tiny
    model = tiny(positions="learned", bias=True)
    optimizer = run.make_optimizer(model, SharedFlags(weight_decay=0.1))
    names = {id(p): name for name, p in model.named_parameters()}
    decayed = {names[id(p)] for p in optimizer.param_groups[0]["params"]}
    assert decayed == {f"blocks.{i}.{part}.weight" for i in (0, 1) for part in ("attn.qkv", "attn.proj", "ff.up", "ff.proj")}
    assert len(decayed) + len(optimizer.param_groups[1]["params"]) == len(names)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]


def test_the_command_printed_needs_no_guess_at_where_the_script_is():
    assert (ROOT / SCRIPT).exists()
