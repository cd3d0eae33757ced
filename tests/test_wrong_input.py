"""Wrong flags and files, through the real command: one line on stderr, exit code 2, nothing written or lost.

A newcomer adds a row to WRONG, and with a script of its own an entry. (What needs a trained run or a data set is in test_eval.py,
test_tasks.py, test_icl.py and test_grammar.py.)
"""

import os
import re
import shutil
import time
from pathlib import Path

import pytest

import flags
from conftest import ROOT, TINY, command, refused, snapshot, start
from metrics import read_metrics
from trained import RunFlags

SCRIPT = "train_gpt.py"


def train(folder, *flags, **more):
    return command(SCRIPT, *TINY, *flags, cwd=folder, **more)


# script -> the flags that each of its rows begins with, and its rows: (more flags, what the line must say). One row a mistake;
# those that need no torch take a tenth of a second.
WRONG = {
    "train_gpt.py": (TINY, [
        ("--scorer=sofmax", "'sofmax'"),
        ("--preset=huge", "--preset=huge: unknown; choose one of laptop"),
        ("--steps=-3", "--steps=-3: must be at least 1"),
        ("--steps=many", "'many'"),
        ("--steps", "--steps"),
        ("--stepz=3", "--stepz=3"),
        ("--batch-size=0", "--batch-size=0"),
        ("--batch-size=10 --micro-batch=3", "multiple of --micro-batch=3"),
        ("--lr=nan", "--lr=nan"),
        ("--lr=-1", "--lr=-1.0"),
        ("--min-lr=5", "--min-lr=5.0: must be at most"),
        ("--beta2=1", "--beta2=1.0"),
        ("--dropout=1", "--dropout=1.0"),
        ("--seed=-1", "--seed=-1"),
        ("--n-head=3", "--n-head=3: does not divide"),
        ("--n-head=2 --n-kv-head=4", "--n-kv-head=4: does not divide"),
        ("--n-embd=6 --n-head=2", "rotating dimensions"),
        ("--n-layer=0", "--n-layer=0"),
        ("--context=1", "--context=1: must be at least 2"),
        ("--ssa-b=0", "--ssa-b=0.0"),
        ("--ssa-b=1e39", "--ssa-b=1e+39: must be between"),
        ("--batch-size=1000000000000", "must be at most 1e+06"),
        ("--threads=1000000000", "must be at most 1024"),
        ("--n-embd=1000000000", "must be a whole number, at most 10000000"),
        ("--n-embd=1000000", "does not fit into memory"),
        ("--n-layer=1000000000", "must be a whole number, at most 1000"),
        ("--ssa-n=1", "--ssa-n=1.0: must be greater than 1"),
        ("--scorer=softmax --ssa-b=2", "only --scorer=ssa has it"),
        ("--tau=2", "only --scorer=temperature has it"),
        ("--resume --overwrite", "--overwrite=True: contradicts --resume"),
        ("--init-from=nowhere", "--init-from=nowhere: no such folder"),
        ("--tokenizer=words", "--tokenizer=words"),
        ("--data=", "--data="),
        ("--data=nowhere.txt", "nowhere.txt"),
        ("--data=empty.txt", "empty.txt"),
        ("--data=empty-folder", "empty-folder"),
        ("--data=latin1.txt", "latin1.txt"),
        ("--data=broken.jsonl", "broken.jsonl"),
        ("--data=short.txt", "short"),
        ("--context=8000", "too few for one window of --context=8000"),
        ("--ood=nowhere.txt", "nowhere.txt"),
        ("--path=sdpa", "--path=sdpa: the fused kernel of PyTorch computes softmax"),
        ("--out=text.txt", "--out=text.txt: is a file"),
        ("--out=text.txt/run", "--out=text.txt/run"),
        ("--out=.", "not a run folder"),
        ("--cache-dir=text.txt/data", "text.txt"),
        ("--init-from=empty-folder", "config.json"),
    ]),
    "data.py": (["docs.jsonl", "--tokenizer=bytes", "--tokens=60000", "--workers=1"], [
        ("--tokens=0", "--tokens=0.0: must be at least 100"),
        ("--tokens=x", "'x'"),
        ("--tokens=nan", "--tokens=nan"),
        ("--tokens=1e14", "50,000 files"),
        ("--workers=-1", "--workers=-1"),
        ("--shard-tokens=1", "--shard-tokens=1.0"),
        ("--tokenizer=words", "'words'"),
        ("--cache-dir=docs.jsonl/x", "docs.jsonl/x"),
        ("other.jsonl", "other.jsonl"),
    ]),
    "bench.py": ([], [
        ("--lengths=many", "--lengths=many"),
        ("--seconds=0", "--seconds=0.0"),
        ("--threads=-1", "--threads=-1"),
        ("--tokens=0", "--tokens=0"),
        ("--devise=cpu", "--devise=cpu"),
        ("--out=text.txt", "--out=text.txt: cannot be written"),
    ]),
    "bench_babyberta.py": (["--data=text.txt", "--tokenizer=text.txt"], [
        ("--data=nowhere.txt", "--data=nowhere.txt: no such file"),
        ("--n-embd=40", "--n-embd=40: must be a multiple of 32"),
        ("--seconds=0", "--seconds=0.0"),
        ("--threads=one", "'one'"),
        ("", "text.txt: is not a file of the library `tokenizers`"),
    ]),
    "babyberta_hf.py": ([], [
        ("", "got nothing; takes export RUN DIR, or import DIR RUN"),
        ("copy a b", "got copy a b; takes"),
        ("export empty-folder b", "empty-folder/config.json: cannot be read"),
        ("import empty-folder b", "empty-folder: cannot be read"),
    ]),
    "swap.py": (["."], [
        ("", ".: no stories260K.bin there"),
        ("--texts=1", "--texts=1: must be between 8 and"),
        ("--lr=nan", "--lr=nan: must be between 0 and 1"),
        ("--lerningrate=1", "--lerningrate=1"),
    ]),
    "eval.py": ([], [
        ("", "SUBCOMMAND: missing; choose one of perplexity"),
        ("perplexitty runs", "perplexitty: unknown subcommand"),
        ("perplexity", "RUN: missing"),
        ("perplexity nowhere", "nowhere: no such folder"),
        ("perplexity text.txt", "text.txt: is a file"),
        ("perplexity empty-folder", "empty-folder: has no config.json"),
        ("perplexity empty-folder --threads=-1", "--threads=-1"),
        ("sample empty-folder --tokens=many", "'many'"),
        ("tasks empty-folder --limit=-1", "--limit=-1"),
        ("zorro empty-folder --add-k=0", "--add-k=0.0"),
        ("blimp empty-folder", "empty-folder: has no config.json"),
        ("lm-eval", "RUN: missing"),
    ]),
    "notebooks/run_all.py": ([], [
        ("99", "99: no notebook begins so"),
        ("--wright", "--wright"),
    ]),
    "tests/faults.py": ([], [
        ("--only=kil", "--only=kil: 'kil' is unknown; choose among kill, damage"),
        ("--programs=train_bert", "--programs=train_bert: 'train_bert' is unknown"),
        ("--kills=-1", "--kills=-1: must be at least 0"),
    ]),
}
ELSEWHERE = {"train_babyberta.py", "train_icl.py"}  # below; test_icl.py


def test_every_script_has_rows():
    scripts = {str(path.relative_to(ROOT)) for folder in (".", "notebooks", "theory", "tests") for path in (ROOT / folder).glob("*.py")
               if re.search(r"""^if __name__ == "__main__":""", path.read_text(encoding="utf-8"), re.M)}
    assert scripts == set(WRONG) | ELSEWHERE and sum(len(rows) for _, rows in WRONG.values()) >= 60


@pytest.mark.parametrize("script, flags, part", [(script, *row) for script, (_, rows) in WRONG.items() for row in rows])
def test_wrong_input_gets_one_line_and_leaves_nothing(folder, script, flags, part):
    (folder / "empty.txt").touch()
    (folder / "empty-folder").mkdir()
    (folder / "latin1.txt").write_bytes("déjà vu ".encode("latin-1") * 100)
    (folder / "broken.jsonl").write_text('{"text": "one"}\n{"text": \n', encoding="utf-8")
    (folder / "docs.jsonl").write_text("".join(f'{{"text": "document {i}"}}\n' for i in range(40)), encoding="utf-8")
    (folder / "short.txt").write_text("short", encoding="utf-8")
    before = snapshot(folder)
    done = command(script, *WRONG[script][0], *flags.split(), cwd=folder, check=False)
    refused(done, part)
    left = {name for name in snapshot(folder) if name not in before and not name.startswith("data/")}  # data/: a cache
    assert not left and all(snapshot(folder)[name] == content for name, content in before.items())


# The same for train_babyberta.py, with sentences.
WRONG_SENTENCES = [
    ("--data=", "--data=: name sentences"),
    ("--data=nowhere.txt", "nowhere.txt: cannot be read"),
    ("--data=sentences.txt,nowhere.txt", "nowhere.txt: cannot be read"),
    ("--data=empty.txt", "empty.txt: has no sentence"),
    ("--data=latin1.txt", "latin1.txt: not UTF-8 at byte 1"),
    ("--data=long.txt", "no sentence is left of 1: 0 have fewer than 3 words, 1 more than 32 tokens"),
    ("--data=short.txt", "no sentence is left of 1: 1 have fewer than 3 words"),
    ("--ood=nowhere.txt", "nowhere.txt: cannot be read"),
    ("--tokenizer=sentences.txt", "sentences.txt: is not a file of the library `tokenizers`"),
    ("--tokenizer=nowhere.json", "nowhere.json: cannot be read"),
    ("--tokenizer=bare.json", "bare.json: has no token <mask>"),
    ("--tokenizer=bare.json --vocab-size=400", "--vocab-size=400: comes with --tokenizer"),
    ("--scorer=softmax --export-hf=empty-folder/..", "--export-hf=empty-folder/..: is not empty"),
    ("--vocab-size=10", "--vocab-size=10: must be between 300 and 65536"),
    ("--order=random", "'random'"),
    ("--leave-unmasked=1", "--leave-unmasked=1.0"),
    ("--context=3", "--context=3: must be at least 4"),
    ("--n-head=3", "--n-head=3: does not divide"),
    ("--export-hf=hf", "--export-hf=hf: RobertaForMaskedLM computes softmax, not ssa"),
    ("--scorer=softmax --export-hf=empty.txt", "--export-hf=empty.txt: is a file"),
    ("--scorer=softmax --out=x --export-hf=x", "--export-hf=x: is the run's own folder"),
    ("--import-hf=nowhere", "--import-hf=nowhere: no such folder"),
    ("--import-hf=nowhere --init-from=empty-folder", "--import-hf=nowhere: contradicts --init-from"),
]


@pytest.mark.parametrize("flags, part", WRONG_SENTENCES)
def test_wrong_sentences_get_one_line_and_leave_nothing(folder, flags, part):
    from tokenizers import Tokenizer, models

    from test_babyberta import TINY as SMALL
    from test_babyberta import speech
    small = [flag for flag in SMALL if not flag.startswith("--tokenizer")]
    small += ["--vocab-size=300"] * ("--tokenizer" not in flags)
    (folder / "sentences.txt").write_text("\n".join(speech(300)), encoding="utf-8")
    (folder / "empty.txt").touch()
    (folder / "empty-folder").mkdir()
    (folder / "latin1.txt").write_bytes("déjà vu ici\n".encode("latin-1") * 100)
    (folder / "long.txt").write_text("see the " * 5000, encoding="utf-8")
    (folder / "short.txt").write_text("see .", encoding="utf-8")
    Tokenizer(models.BPE()).save(str(folder / "bare.json"))
    before = snapshot(folder)
    refused(command("train_babyberta.py", *small, *flags.split(), cwd=folder, check=False), part)
    assert snapshot(folder) == before


def test_a_device_that_is_not_there_is_named(folder):
    refused(train(folder, "--device=cuda", check=False, fresh=True, CUDA_VISIBLE_DEVICES=""), "--device=cuda")


def test_a_folder_that_may_not_be_read_is_named(monkeypatch, tmp_path):
    def denied(path):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(Path, "iterdir", denied)
    for reader in (lambda: flags._begun(tmp_path), RunFlags(runs=str(tmp_path)).folders):
        with pytest.raises(flags.UserError, match="cannot be read .Permission denied"):
            reader()


def test_resuming_where_config_json_is_gone_says_so(folder):
    train(folder, "--out=r")
    (folder / "r" / "config.json").unlink()
    for script in (SCRIPT, "train_babyberta.py"):
        refused(command(script, "--out=r", "--resume", cwd=folder, check=False), "config.json is gone; restore it, replace it with --overwrite")


def test_a_config_that_disagrees_with_the_checkpoint_is_named(folder):
    train(folder, "--out=a")
    for number, other in enumerate(("--n-embd=32", "--ssa-freeze=b")):
        train(folder, other, f"--out=b{number}")
        shutil.copy(folder / f"b{number}" / "config.json", folder / "a" / "config.json")
        before = snapshot(folder / "a")
        refused(command(SCRIPT, "--out=a", "--resume", cwd=folder, check=False), "of another run than config.json describes")
        assert snapshot(folder / "a") == before


def test_damage_to_the_metrics_is_named_and_the_rest_kept(folder):
    train(folder, "--out=r")
    lines = (folder / "r" / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "r" / "metrics.jsonl").write_text("".join(lines[:4]) + "{broken\n" + "".join(lines[4:]), encoding="utf-8")
    assert "metrics.jsonl: damaged" in command(SCRIPT, "--out=r", "--resume", cwd=folder, check=False).stderr


def test_flags_are_checked_before_torch_is_imported(folder):
    (folder / "torch.py").write_text("raise SystemExit('torch was imported')", encoding="utf-8")
    refused(command(SCRIPT, "--steps=-3", cwd=folder, check=False, fresh=True, PYTHONPATH=str(folder)), "--steps=-3")
    assert "--ssa-freeze" in command(SCRIPT, "--help", cwd=folder, fresh=True, PYTHONPATH=str(folder)).stdout


def test_an_existing_run_is_kept_unless_told_otherwise(folder):
    train(folder, "--out=r")
    before = snapshot(folder / "r")
    refused(train(folder, "--out=r", check=False), "--out=r: holds a run already; continue it with --resume")
    refused(train(folder, "--out=r", "--resume", "--lr=0.5", check=False), "--lr=0.5: the run in r was started with")
    refused(train(folder, "--out=r", "--resume", "--n-layer=3", check=False), "--n-layer=3")
    assert snapshot(folder / "r") == before
    train(folder, "--out=r", "--overwrite", "--steps=2")
    assert len([m for m in read_metrics(folder / "r" / "metrics.jsonl") if "loss" in m]) == 2
    refused(train(folder, "--init-from=r", "--n-embd=32", check=False), "model.safetensors")
    (folder / "text.txt").write_text("other words " * 500, encoding="utf-8")
    refused(command(SCRIPT, "--out=r", "--resume", cwd=folder, check=False), "have changed since this run began")


def test_folders_of_others_are_not_overwritten(folder):
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text("{}", encoding="utf-8")
    (folder / "hf" / "model.safetensors").write_bytes(b"precious")
    refused(train(folder, "--out=hf", "--overwrite", check=False), "--out=hf: is not empty and not a run folder")
    assert (folder / "hf" / "model.safetensors").read_bytes() == b"precious"


def test_lost_checkpoints_are_named_and_not_trained_over(folder):
    train(folder, "--out=r")
    for path in (folder / "r").glob("resume-*"):
        path.unlink()
    before = snapshot(folder / "r")
    refused(command(SCRIPT, "--out=r", "--resume", cwd=folder, check=False), "no whole checkpoint is left")
    assert snapshot(folder / "r") == before


def test_two_processes_do_not_train_in_one_folder(folder):
    first = start(SCRIPT, *TINY, "--steps=100000", "--save-every=100000", "--eval-every=100000", "--out=r", cwd=folder)
    while not (folder / "r" / "config.json").exists():
        assert first.poll() is None, first.stderr.read()
        time.sleep(0.05)
    refused(command(SCRIPT, "--out=r", "--resume", cwd=folder, check=False), "another process is training in it")
    first.kill()
    first.communicate()


def test_weights_with_another_vocabulary_are_refused(folder):
    cache = os.environ.get("SSA_DATA_DIR")
    if not cache:
        pytest.skip("SSA_DATA_DIR is not set: no tokenizer files without a network")
    train(folder, "--out=r")
    refused(train(folder, "--tokenizer=gpt2", "--init-from=r", check=False,
                  TIKTOKEN_CACHE_DIR=os.path.join(cache, "tiktoken_cache")), "embed.weight is (320, 16), the model needs (50304")
