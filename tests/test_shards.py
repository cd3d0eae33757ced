"""python data.py: token files planned in advance, the same whatever the number of processes and interruptions, and
training on them while they are being written."""

import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import data
import shards
from conftest import ROOT, TINY, command
from files import read_json, write_json
from flags import UserError
from metrics import read_metrics
from sources import HELD_OUT, is_held_out

PLAN = ["docs.jsonl", "--tokenizer=bytes", "--tokens=60000", "--shard-tokens=7000", "--cache-dir=cache"]


@pytest.fixture
def docs(tmp_path):
    """docs.jsonl: 1,500 documents of 20 to 80 letters, about 75,000 tokens with their ends."""
    rng = random.Random(0)
    texts = ["".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(20, 80))) + str(i) for i in range(1500)]
    lines = [json.dumps({"text": text, "id": f"d{i}"}) + "\n" for i, text in enumerate(texts)]
    (tmp_path / "docs.jsonl").write_text("".join(lines), encoding="utf-8")
    return tmp_path


def prepare(cwd, *flags, **more):
    return command("data.py", *PLAN, *flags, cwd=cwd, **more)


def planned(cwd, cache="cache"):
    [folder] = [path for path in (cwd / cache).iterdir() if "-shards-" in path.name]
    return folder


def expected(docs, split):
    """All tokens of a split, one after the other, by the rule of the hash."""
    ids = []
    for line in (docs / "docs.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if is_held_out(record["id"]) == (split == "val"):
            ids += [*record["text"].encode("utf-8"), 256]
    return np.array(ids)


def tokens_of(folder, split):
    return np.concatenate([np.fromfile(path, "<u2") for path in sorted(folder.glob(f"{split}-*.bin"))])


def bins(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != ".lock"}


# ---- The files ------------------------------------------------------------------------------------------------------


def test_every_token_is_where_the_plan_says(docs):
    done = prepare(docs, "--workers=1")
    folder = planned(docs)
    manifest = read_json(folder / "manifest.json", "")
    assert manifest["complete"] and "train: 57,000 tokens" in done.stdout and "tokens/s" in done.stdout
    for split, wanted in (("train", [7000] * 8 + [1000]), ("val", [3000])):
        entry = manifest["splits"][split]
        assert [shard["tokens"] for shard in entry["shards"]] == wanted
        found = tokens_of(folder, split)
        assert np.array_equal(found, expected(docs, split)[:sum(wanted)])
        assert entry["documents"] == np.count_nonzero(found[:-1] == 256) + 1
        for shard in entry["shards"]:
            content = (folder / shard["file"]).read_bytes()
            assert shard["sha256"] == hashlib.sha256(content).hexdigest()
            assert shard["bytes"] == np.count_nonzero(np.frombuffer(content, "<u2") != 256)
    assert prepare(docs, "--workers=1").stdout.count("complete") == 1  # nothing to do


def test_neither_workers_nor_chunks_change_a_byte(docs, monkeypatch):
    prepare(docs, "--workers=1")
    monkeypatch.setattr(shards, "CHUNK", 100)
    for workers in (1, 2):
        flags = shards.Flags(str(docs / "docs.jsonl"), "bytes", 60000, 7000, workers, str(docs / f"cache{workers}"))
        shards.prepare_shards(flags)
        assert bins(planned(docs, f"cache{workers}")) == bins(planned(docs))


@pytest.mark.parametrize("stop_after", [0, 1, 4, 9])
def test_interrupted_it_continues_without_a_hole_or_a_double_document(docs, monkeypatch, stop_after):
    flags = shards.Flags(str(docs / "docs.jsonl"), "bytes", 60000, 7000, 1, str(docs / "cache"))
    finish, finished = shards.SplitWriter.finish, []

    def stop(self, *where):  # the power fails just before the file gets its name
        if len(finished) == stop_after:
            raise KeyboardInterrupt
        finished.append(where)
        finish(self, *where)

    monkeypatch.setattr(shards, "tokenised", lambda documents, name, workers: (
        (number, split, data.get_tokenizer(name).document(text)) for number, split, text in documents))
    with monkeypatch.context() as patch:
        patch.setattr(shards.SplitWriter, "finish", stop)
        with pytest.raises(KeyboardInterrupt):
            shards.prepare_shards(flags)
    assert len(list(planned(docs).glob("*.bin"))) == stop_after
    shards.prepare_shards(flags)
    shutil.move(docs / "cache", docs / "interrupted")
    shards.prepare_shards(flags)
    assert bins(planned(docs, "interrupted")) == bins(planned(docs))


def test_killed_for_real_it_continues(docs):
    """kill -9 while files are being written; the workers notice and end by themselves."""
    lines = (docs / "docs.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    more = [{"text": r["text"] * 20, "id": f"{r['id']}-{k}"} for k in range(6) for r in records]
    (docs / "docs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in more), encoding="utf-8")
    plan = [*PLAN, "--tokens=5e6", "--shard-tokens=3e5", "--workers=1"]
    process = subprocess.Popen([sys.executable, str(ROOT / "data.py"), *plan], cwd=docs, start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and len(list(docs.glob("cache/*/train-*.bin"))) < 3:
        time.sleep(0.005)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        for _ in range(300):  # 30 seconds
            os.killpg(process.pid, 0)
            time.sleep(0.1)
    assert re.search(r"continuing after [\d,]+ tokens, from document ", command("data.py", *plan, cwd=docs).stdout)
    shutil.move(docs / "cache", docs / "killed")
    command("data.py", *plan, cwd=docs)
    assert bins(planned(docs, "killed")) == bins(planned(docs))


def test_a_corpus_that_ends_early_is_finished_and_said_so(docs):
    done = prepare(docs, "--tokens=200000")
    manifest, all_train = read_json(planned(docs) / "manifest.json", ""), expected(docs, "train")
    assert "the corpus ended early: it has" in done.stdout and manifest["complete"]
    assert sum(s["tokens"] for s in manifest["splits"]["train"]["shards"]) == len(all_train)
    assert np.array_equal(tokens_of(planned(docs), "train"), all_train)
    assert np.array_equal(tokens_of(planned(docs), "val"), expected(docs, "val")[:10000])


def test_a_large_plan_holds_out_fewer_documents_and_no_other_ones(docs):
    tokenizer, source = data.get_tokenizer("bytes"), data.find_source(str(docs / "docs.jsonl"))
    manifest = shards.make_plan(source, tokenizer, 10_000_000_000, 100_000_000)
    sizes = {split: [s["tokens"] for s in entry["shards"]] for split, entry in manifest["splits"].items()}
    assert sizes == {"train": [100_000_000] * 99 + [98_000_000], "val": [2_000_000]} and manifest["held_out"] == 0.01
    few = {i for i in range(5000) if is_held_out(str(i), 0.01)}
    assert 20 < len(few) < 90 and few <= {i for i in range(5000) if is_held_out(str(i), HELD_OUT)}


def refused(done, part):
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert part in line, line


def test_another_plan_another_process_and_a_single_text_are_refused(docs):
    prepare(docs)
    refused(prepare(docs, "--tokens=50000", check=False), "was planned with --tokens=60000 --shard-tokens=7000")
    with shards.filelock.FileLock(planned(docs) / ".lock"):
        refused(prepare(docs, check=False), "another process is filling it")
    (docs / "a.txt").write_text("some text " * 99, encoding="utf-8")
    refused(command("data.py", "a.txt", "--tokenizer=bytes", cwd=docs, check=False), "is a single text")
    refused(command("data.py", "nowhere", cwd=docs, check=False), "NAME=nowhere")


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-2]),
                                  lambda path: path.write_bytes(b"x" + path.read_bytes()[1:])], ids=["gone", "short", "changed"])
def test_a_finished_file_that_is_no_longer_whole_is_named_before_anybody_trains(docs, harm):
    prepare(docs)
    harm(planned(docs) / "train-00003.bin")
    refused(prepare(docs, check=False), "train-00003.bin: ")


def test_the_writer_never_imports_torch(docs):
    (docs / "torch.py").write_text("raise SystemExit('torch was imported')", encoding="utf-8")
    prepare(docs, "--workers=1", fresh=True, PYTHONPATH=str(docs))


# ---- Training on them -----------------------------------------------------------------------------------------------


def unfinish(folder, keep):
    """The folder as it was when `keep` training files were finished (and the validation file)."""
    manifest = read_json(folder / "manifest.json", "")
    for shard in manifest["splits"]["train"]["shards"][keep:]:
        (folder / shard["file"]).rename(folder / f"later-{shard['file']}")
        shard |= {"sha256": None, "bytes": None}
    write_json(folder / "manifest.json", {**manifest, "complete": False})


def finish(folder, whole):
    for path in folder.glob("later-*"):
        path.rename(folder / path.name.removeprefix("later-"))
    write_json(folder / "manifest.json", whole)


def test_positions_do_not_move_and_a_missing_file_is_waited_for(docs, capsys):
    prepare(docs)
    folder, source = planned(docs), str(docs / "docs.jsonl")
    whole, manifest = data.prepare(source, "bytes", docs / "cache"), read_json(planned(docs) / "manifest.json", "")
    wanted = [whole.batch(1, step, range(8), 8, 50) for step in range(17)]  # 136 windows: all of the first file's 140
    unfinish(folder, keep=2)
    part = data.prepare(source, "bytes", docs / "cache", timeout=0.2)
    assert part.digest == whole.digest and part.n_tokens("train") == whole.n_tokens("train")
    for step, (x, y) in enumerate(wanted):
        assert (part.batch(1, step, range(8), 8, 50)[0] == x).all()
    assert (part.batch(1, 3, [5, 2], 8, 50)[1] == wanted[3][1][[5, 2]]).all()
    with pytest.raises(UserError, match="train-0000[2-8].bin: has not come within --data-timeout=0.2 seconds; is `pyth"):
        part.batch(1, 60, range(8), 8, 50)
    patient = data.prepare(source, "bytes", docs / "cache", timeout=30)
    timer = threading.Timer(0.5, finish, (folder, manifest))
    timer.start()
    assert (patient.batch(1, 60, range(8), 8, 50)[0] == whole.batch(1, 60, range(8), 8, 50)[0]).all()
    timer.join()
    assert re.search(r"waiting for .*train-0000\d.bin", capsys.readouterr().out)


def test_every_window_comes_once_an_epoch(docs):
    prepare(docs)
    corpus = data.prepare(str(docs / "docs.jsonl"), "bytes", docs / "cache")
    n = (57000 - 1 - 49) // 50
    for epoch in (0, 1):
        starts = corpus._starts(3, np.arange(epoch * n, (epoch + 1) * n), 50)
        assert np.array_equal(np.sort(starts), starts.min() + 50 * np.arange(n)) and starts.min() < 50
        first = starts[:140]
        assert (first.max() < 7050) == (epoch == 0) and not np.array_equal(first, np.sort(first))


def test_when_the_corpus_turns_out_shorter_the_trainer_says_so(docs):
    prepare(docs, "--tokens=200000")
    whole = read_json(planned(docs) / "manifest.json", "")
    source = data.find_source(str(docs / "docs.jsonl"))
    plan = shards.make_plan(source, data.get_tokenizer("bytes"), 200000, 7000)
    plan["splits"]["val"] = whole["splits"]["val"]
    write_json(planned(docs) / "manifest.json", plan)
    corpus = data.prepare(str(docs / "docs.jsonl"), "bytes", docs / "cache", timeout=5)
    write_json(planned(docs) / "manifest.json", whole)
    with pytest.raises(UserError, match="will not come, since the corpus ended before it"):
        corpus.tokens("train", 180_000, 180_001)


def test_the_trainer_uses_planned_files_and_gives_up_with_a_line(docs):
    prepare(docs)
    flags = [*TINY, "--data=docs.jsonl", "--cache-dir=cache"]
    command("train_gpt.py", *flags, "--out=r", cwd=docs)
    unfinish(planned(docs), keep=1)
    command("train_gpt.py", *flags, "--out=early", cwd=docs)
    curves = [[line["loss"] for line in read_metrics(docs / name / "metrics.jsonl") if "loss" in line]
              for name in ("r", "early")]
    assert curves[0] == curves[1] and not [path for path in (docs / "cache").iterdir() if "-shards-" not in path.name]
    done = command("train_gpt.py", *flags, "--out=late", "--steps=400", "--eval-every=400", "--save-every=50",
                   "--data-timeout=0.3", cwd=docs, check=False)
    refused(done, "has not come within --data-timeout=0.3 seconds")
    assert "waiting for" in done.stdout and list((docs / "late").glob("resume-*.pt"))


@pytest.mark.skipif("SSA_DATA_DIR" not in os.environ, reason="SSA_DATA_DIR names no folder with the real data")
def test_fineweb_documents_train_and_are_evaluated_in_and_out_of_distribution(tmp_path):
    real = Path(os.environ["SSA_DATA_DIR"])
    env = {"TIKTOKEN_CACHE_DIR": str(real / "tiktoken_cache")}
    source = real / "fineweb" / "fineweb_unique.jsonl.gz"
    command("data.py", source, "--tokens=8e4", "--shard-tokens=5e4", "--workers=1", cwd=tmp_path, **env)
    wiki = (real / "wikitext2" / "test.txt").read_text(encoding="utf-8")[:9000]
    (tmp_path / "wiki.txt").write_text(wiki, encoding="utf-8")
    command("train_gpt.py", *TINY, f"--data={source}", "--tokenizer=gpt2", "--ood=wiki.txt", "--out=r", "--steps=2",
            cwd=tmp_path, **env)
    last = json.loads((tmp_path / "r" / "metrics.jsonl").read_text().splitlines()[-1])
    for split in ("val", "ood"):
        assert last[f"{split}_ppl"] == pytest.approx(np.exp(last[f"{split}_loss"])) and 2.5 < last[f"{split}_bpb"] < 5
