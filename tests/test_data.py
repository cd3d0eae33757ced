"""What data.py promises: exact tokens, honest splits, batches without state, and one clear line for every mistake."""

import hashlib
import json
import os
import random
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import data
import sources
from files import read_json, write_json
from flags import UserError

REAL = Path(os.environ.get("SSA_DATA_DIR", "absent"))
real_data = pytest.mark.skipif(not REAL.is_dir(), reason="SSA_DATA_DIR names no folder with the real data")
some = settings(max_examples=60, deadline=None, derandomize=True, database=None)
BYTES = data.get_tokenizer("bytes")


@pytest.fixture
def gpt2(monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(REAL / "tiktoken_cache"))
    return data.get_tokenizer("gpt2")


def texts(n, seed=0):
    """n different texts of 20 to 80 letters and spaces."""
    rng = random.Random(seed)
    return ["t" + "".join(rng.choice("abcde fgé") for _ in range(rng.randrange(20, 80))) + str(i) for i in range(n)]


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def write_parquet(path, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=7)
    return str(path)


@pytest.fixture
def corpus(tmp_path):
    """200 documents in files of 300 tokens or a little more."""
    source = write_jsonl(tmp_path / "docs.jsonl", [{"text": text} for text in texts(200)])
    return data.prepare(source, "bytes", tmp_path / "cache", shard_tokens=300)


def folder_of(tmp_path):
    [folder] = (tmp_path / "cache").iterdir()
    return folder


def raises_line(*parts):
    """pytest.raises for a UserError of one line that has all parts, in this order."""
    return pytest.raises(UserError, match=r"(?s)\A(?=[^\n]*\Z).*" + ".*".join(re.escape(str(part)) for part in parts))


def held_out(doc_id):
    return int.from_bytes(hashlib.sha256(doc_id.encode()).digest()[:4], "big") / 2**32 < 0.1


# ---- Tokenizers


@some
@given(st.text(alphabet="a \n\0é\u3000日\ufeff😀\ud7ff\U0010ffff"))
def test_bytes_give_back_any_text_and_count_its_bytes(text):
    ids = BYTES.encode(text)
    assert ids.tolist() == list(text.encode("utf-8")) and BYTES.decode(ids) == text
    assert BYTES.count_bytes(ids) == len(text.encode("utf-8"))


def test_bytes_have_257_ids_and_decode_everything():
    assert (BYTES.name, BYTES.vocab_size, BYTES.eot) == ("bytes", 257, 256)
    assert BYTES.byte_lengths.tolist() == [1] * 256 + [0]
    assert BYTES.decode(torch.tensor([97, 256, 98])) == "a\n\nb"
    assert BYTES.decode([0xC3, 97, 300]) == "\ufffda\ufffd"  # half a letter; an id beyond the vocabulary
    assert BYTES.count_bytes(torch.tensor([[97, 256], [98, 99]])) == 3


@real_data
def test_gpt2_ids_are_the_published_ones(gpt2):
    assert (gpt2.name, gpt2.vocab_size, gpt2.eot) == ("gpt2", 50257, 50256)
    assert gpt2.encode("hello world").tolist() == [31373, 995]
    for text in ("a <|endoftext|> b", "naïve 日本 \u3000 don't\r\n\n  x", ""):
        ids = gpt2.encode(text)
        assert gpt2.eot not in ids and gpt2.decode(ids) == text and gpt2.count_bytes(ids) == len(text.encode("utf-8"))
    assert gpt2.byte_lengths[gpt2.eot] == 0 and gpt2.decode([64, 50256, 65, 50300]) == "a\n\nb\ufffd"


@real_data
def test_gpt2_takes_a_long_word_in_linear_time(gpt2):
    assert len(gpt2.encode("a" * 1_000_000)) == 250_000  # quadratic time would be a quarter of an hour


def test_a_tokenizer_that_cannot_be_had_says_what_to_do(monkeypatch, tmp_path):
    with raises_line("--tokenizer=gpt3", "bytes or gpt2"):
        data.get_tokenizer("gpt3")
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr("requests.get", lambda *_, **__: (_ for _ in ()).throw(OSError("no\nnetwork")))
    with raises_line("--tokenizer=gpt2", "TIKTOKEN_CACHE_DIR", "--tokenizer=bytes", "no network"):
        data.get_tokenizer("gpt2")
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with raises_line("--tokenizer=gpt2", "pip install tiktoken"):
        data.get_tokenizer("gpt2")


# ---- Splits and preparation


def test_a_single_txt_is_cut_after_nine_tenths(tmp_path):
    text = "".join(texts(9)) + "é"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    for source in (tmp_path / "a.txt", tmp_path / "*.txt"):
        corpus, cut = data.prepare(str(source), "bytes", tmp_path / "cache"), int(0.9 * len(text))
        assert BYTES.decode(corpus.tokens("train", 0, corpus.n_tokens("train"))) == text[:cut]
        assert BYTES.decode(corpus.tokens("val", 0, corpus.n_tokens("val"))) == text[cut:]
        assert corpus.splits == ("train", "val")


def split_texts(corpus):
    return [set(BYTES.decode(corpus.tokens(split, 0, corpus.n_tokens(split))).split("\n\n")) - {""}
            for split in ("train", "val")]


def test_documents_stay_in_their_split_in_any_order_file_and_company(tmp_path):
    records = [{"text": text} for text in texts(300)]
    train, val = split_texts(data.prepare(write_jsonl(tmp_path / "a.jsonl", records), "bytes", tmp_path / "cache"))
    assert not train & val and len(train | val) == 300 and 15 < len(val) < 50
    for order in (records[::-1], records + records, records + [{"text": text} for text in texts(100, seed=1)]):
        again = split_texts(data.prepare(write_jsonl(tmp_path / "b.jsonl", order), "bytes", tmp_path / "cache"))
        assert train <= again[0] and val <= again[1] and not again[0] & again[1]


@pytest.mark.parametrize("n", [2, 3, 9, 31, 98])
def test_of_a_few_documents_some_are_held_out_whatever_their_hashes(tmp_path, n):
    for seed in range(5):
        records = [{"text": text} for text in texts(n, seed=seed)]
        corpora = [data.prepare(write_jsonl(tmp_path / f"{name}.jsonl", order), "bytes", tmp_path / "cache")
                   for name, order in (("a", records), ("b", records[::-1] + records[:1]))]
        train, val = split_texts(corpora[0])
        assert len(val) == max(1, n // 10) and not train & val and len(train | val) == n
        assert split_texts(corpora[1])[1] == val  # neither order nor a repetition matters


def test_a_single_document_is_split_by_position(tmp_path):
    text = " ".join(texts(30))
    corpus = data.prepare(write_jsonl(tmp_path / "a.jsonl", [{"text": text}]), "bytes", tmp_path / "cache")
    train, val = (BYTES.decode(corpus.tokens(split, 0, corpus.n_tokens(split)).tolist()[:-1]) for split in ("train", "val"))
    assert train + val == text and len(train) == int(0.9 * len(text))


@pytest.mark.parametrize("name, content, split", [
    ("a.jsonl", b"", "train"), ("a.txt", b"x", "train"),
    ("a.txt", b"xxx", "val")])
def test_a_split_without_text_is_named(tmp_path, name, content, split):
    (tmp_path / name).write_bytes(content)
    with raises_line("too little text", f"its {split} split", "give more"):
        data.prepare(str(tmp_path / name), "bytes", tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_manifest_tells_what_the_files_hold(corpus, tmp_path):
    folder = folder_of(tmp_path)
    assert re.fullmatch(r"docs-jsonl-bytes-[0-9a-f]{12}", folder.name)
    manifest = read_json(folder / "manifest.json", "")
    assert manifest == corpus.manifest and manifest["python"] is None
    assert [manifest[key] for key in ("name", "tokenizer", "vocab_size", "dtype")] == ["docs-jsonl", "bytes", 257, "uint16"]
    names, sizes = {"manifest.json"}, Counter()
    for split, entry in manifest["splits"].items():
        assert len(entry["shards"]) > 1 and all(shard["tokens"] >= 300 for shard in entry["shards"][:-1])
        for shard in entry["shards"]:
            content = (folder / shard["file"]).read_bytes()
            ids = np.frombuffer(content, dtype="<u2")
            assert shard["sha256"] == hashlib.sha256(content).hexdigest() and shard["tokens"] == len(ids)
            assert shard["bytes"] == np.count_nonzero(ids != 256)
            names.add(shard["file"])
            sizes[split] += len(ids)
        assert corpus.n_tokens(split) == sizes[split]
    assert {path.name for path in folder.iterdir()} == names
    assert sum(entry["documents"] for entry in manifest["splits"].values()) == 200


def test_a_finished_folder_is_reused_in_silence_and_a_changed_text_is_not(tmp_path, monkeypatch, capsys):
    source = tmp_path / "docs.jsonl"
    write_jsonl(source, [{"text": text} for text in texts(200)])
    corpus = data.prepare(str(source), "bytes", tmp_path / "cache", shard_tokens=300)
    assert "tokenising docs-jsonl" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(data, "write_shard", None)  # to tokenise again would fail
        again = data.prepare(str(source), "bytes", tmp_path / "cache", shard_tokens=300)
    assert capsys.readouterr() == ("", "") and again.digest == corpus.digest and len(again.digest) == 64
    source.write_text(source.read_text(encoding="utf-8").replace(': "t', ': "T', 1), encoding="utf-8")
    changed = data.prepare(str(source), "bytes", tmp_path / "cache", shard_tokens=300)
    assert changed.digest != corpus.digest and len(list((tmp_path / "cache").iterdir())) == 2


def test_ood_is_whole_and_beside_the_training_text(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in texts(50)])
    (tmp_path / "b.txt").write_text("other text", encoding="utf-8")
    corpus = data.prepare(a, "bytes", tmp_path / "cache", ood=str(tmp_path / "b.txt"))
    assert corpus.splits == ("train", "val", "ood") and len(list((tmp_path / "cache").iterdir())) == 2
    assert BYTES.decode(corpus.tokens("ood", 0, corpus.n_tokens("ood"))) == "other text"
    assert corpus.digest == data.prepare(a, "bytes", tmp_path / "cache").digest


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_an_interrupted_preparation_leaves_nothing(tmp_path, monkeypatch, error):
    source = write_jsonl(tmp_path / "docs.jsonl", [{"text": text} for text in texts(200)])
    write, calls = data.write_shard, []

    def write_two(*args):
        calls.append(args)
        if len(calls) > 2:
            raise error
        return write(*args)

    monkeypatch.setattr(data, "write_shard", write_two)
    full_disk = raises_line("cache", "No space left", "choose another folder")
    with pytest.raises(KeyboardInterrupt) if error is KeyboardInterrupt else full_disk:
        data.prepare(source, "bytes", tmp_path / "cache", shard_tokens=300)
    assert len(calls) == 3 and list((tmp_path / "cache").iterdir()) == []
    monkeypatch.undo()
    assert len(set.union(*split_texts(data.prepare(source, "bytes", tmp_path / "cache", shard_tokens=300)))) == 200


def test_what_a_killed_preparation_leaves_is_never_used(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "docs.jsonl", [{"text": text} for text in texts(200)])
    with monkeypatch.context() as patch:
        patch.setattr(data, "write_json", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        patch.setattr(data.shutil, "rmtree", lambda *_, **__: None)  # a killed process does not clean up
        with pytest.raises(KeyboardInterrupt):
            data.prepare(source, "bytes", tmp_path / "cache", shard_tokens=300)
    assert ".unfinished-" in folder_of(tmp_path).name and len(list(folder_of(tmp_path).iterdir())) > 20
    assert len(set.union(*split_texts(data.prepare(source, "bytes", tmp_path / "cache", shard_tokens=300)))) == 200
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_two_preparations_at_once_end_with_one_folder(tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "docs.jsonl", [{"text": text} for text in texts(200)])
    write, digests = data.write_folder, []

    def write_slowly(*args):  # the other starts after us and is done before us
        monkeypatch.setattr(data, "write_folder", write)
        digests.append(data.prepare(source, "bytes", tmp_path / "cache").digest)
        write(*args)

    monkeypatch.setattr(data, "write_folder", write_slowly)
    digests.append(data.prepare(source, "bytes", tmp_path / "cache").digest)
    assert len(digests) == 2 and digests[0] == digests[1]
    assert ".unfinished-" not in folder_of(tmp_path).name


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 9, encoding="utf-8")
    with raises_line(tmp_path / "a.txt", "cannot write tokens here", "choose another folder"):
        data.prepare(str(tmp_path / "a.txt"), "bytes", tmp_path / "a.txt" / "cache")


def test_ids_outside_the_vocabulary_are_not_written(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("some text " * 9, encoding="utf-8")
    for vocab_size, wrong, last in ((300, 300, 299), (300, -1, 299), (100_000, 65_536, 65_535)):
        tokenizer = data.Tokenizer("odd", [b"x"] * vocab_size, lambda text: np.array([1, wrong, 2]))
        monkeypatch.setattr(data, "get_tokenizer", lambda name: tokenizer)
        with raises_line("--tokenizer=odd", wrong, last + 1):
            data.prepare(str(tmp_path / "a.txt"), "odd", tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []


# ---- Damage


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


DAMAGES = {"bit flip": flip, "missing": Path.unlink, "empty": lambda path: path.write_bytes(b""),
           "cut short": lambda path: path.write_bytes(path.read_bytes()[:-2]),
           "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0\0")}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", ["train-00002.bin", "manifest.json"])
def test_a_damaged_file_is_named_and_a_new_folder_heals_it(corpus, tmp_path, name, damage):
    source, folder = str(tmp_path / "docs.jsonl"), folder_of(tmp_path)
    damage(folder / name)
    with raises_line(folder / name, "delete its folder, it will be built anew"):
        again = data.prepare(source, "bytes", tmp_path / "cache", shard_tokens=300)
        again.tokens("train", 0, 100)  # this file is whole
        again.tokens("train", 0, again.n_tokens("train"))
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert data.prepare(source, "bytes", tmp_path / "cache", shard_tokens=300).digest == corpus.digest


@pytest.mark.parametrize("change", [
    {"file": "../secret.bin"}, {"file": ".."}, {"file": ""}, {"file": 5}, {"file": "train-00000.bin/../../secret.bin"},
    {"file": "/etc/hostname"}, {"file": "C:\\secret.bin"}, {"file": "linked-00000.bin"}, {"tokens": 0}, {"tokens": "9"},
    {"tokens": True}, {"sha256": None}], ids=str)
def test_a_manifest_that_leads_elsewhere_is_refused(corpus, tmp_path, change):
    folder = folder_of(tmp_path)
    (tmp_path / "secret.bin").write_bytes(b"\0" * 600)
    try:
        (folder / "linked-00000.bin").symlink_to(tmp_path / "secret.bin")
    except OSError:
        pytest.skip("symbolic links cannot be made here")
    manifest = corpus.manifest
    manifest["splits"]["train"]["shards"][0] |= change
    write_json(folder / "manifest.json", manifest)  # with a checksum that fits
    with raises_line(folder / "manifest.json", "cannot be right", "delete its folder"):
        data.prepare(str(tmp_path / "docs.jsonl"), "bytes", tmp_path / "cache", shard_tokens=300)


def test_a_manifest_without_its_parts_is_refused(corpus, tmp_path):
    train = corpus.manifest["splits"]["train"]
    for splits in ({}, [], "x", None, {"train": train}, {"train": train, "val": {"documents": 9, "shards": []}}):
        write_json(folder_of(tmp_path) / "manifest.json", {**corpus.manifest, "splits": splits})
        with raises_line("manifest.json", "cannot be right", "delete its folder"):
            data.prepare(str(tmp_path / "docs.jsonl"), "bytes", tmp_path / "cache", shard_tokens=300)


# ---- Real text


@real_data
def test_tiny_shakespeare_has_nanogpts_split(tmp_path):
    corpus = data.prepare(str(REAL / "shakespeare" / "input.txt"), "bytes", tmp_path)
    assert (corpus.n_tokens("train"), corpus.n_tokens("val")) == (1_003_854, 111_540)
    assert sum(y.numel() for _, y in corpus.eval_batches("val", 64, 256)) == 111_539
    assert 4.7 < corpus.unigram_bits_per_byte("val") < 4.9


@real_data
def test_fineweb_jsonl_and_parquet(tmp_path, gpt2):
    docs = list(sources.documents(str(REAL / "fineweb" / "fineweb_unique.jsonl.gz")))
    assert len(docs) == len(dict(docs)) == 2800 and docs[0][0].startswith("<urn:uuid:")
    assert sum(len(text.split()) for _, text in docs) == 3_190_294
    corpus = data.prepare(str(REAL / "fineweb" / "sample.parquet"), "gpt2", tmp_path)
    rows = list(sources.documents(str(REAL / "fineweb" / "sample.parquet")))
    assert len(rows) == 100 == sum(entry["documents"] for entry in corpus.manifest["splits"].values())
    for split in ("train", "val"):
        wanted = "\n\n".join(text for doc_id, text in rows if held_out(doc_id) == (split == "val"))
        assert gpt2.decode(corpus.tokens(split, 0, corpus.n_tokens(split))) == wanted + "\n\n"
