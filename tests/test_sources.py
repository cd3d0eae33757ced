"""What sources.py promises: every format read alike, every mistake named, and the text that Python itself carries."""

import gzip
import json
import re
import sys
import sysconfig

import numpy as np
import pytest

import data
import sources
from test_data import texts, write_jsonl, write_parquet, raises_line, held_out, BYTES


# ---- Files


def test_every_format_gives_the_same_texts(tmp_path):
    wanted = texts(20)
    records = [{"text": text} for text in wanted]
    write_jsonl(tmp_path / "a.jsonl", records)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    write_parquet(tmp_path / "c.parquet", text=wanted, other=range(20))
    (tmp_path / "txt" / "deep").mkdir(parents=True)
    for i, text in enumerate(wanted):
        (tmp_path / "txt" / "deep" / f"{i:02}.txt").write_text(text, encoding="utf-8")
    (tmp_path / "txt" / "README.md").write_text("not a text to train on", encoding="utf-8")
    found = [list(sources.documents(str(tmp_path / name))) for name in ("a.jsonl", "b.jsonl.gz", "c.parquet", "txt")]
    assert found[0] == found[1] == found[2] == found[3]  # ids too: without one of its own, a text's hash
    assert [text for _, text in found[0]] == wanted and len({doc_id for doc_id, _ in found[0]}) == 20
    assert found[0] * 2 == list(sources.documents(str(tmp_path / "[ab].jsonl*")))
    assert len(list(sources.documents(str(tmp_path)))) == 80 and len(list(sources.documents(str(tmp_path / "**/*.txt")))) == 20


def test_ids_come_from_the_record_where_it_has_one(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "one", "id": "x/1"}, {"id": 7, "text": "two"}])
    assert list(sources.documents(path)) == [("x/1", "one"), ("7", "two")]
    assert list(sources.documents(write_parquet(tmp_path / "a.parquet", text=["one"], id=["x"]))) == [("x", "one")]


def test_byte_order_mark_line_ends_and_blank_lines(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a\\r\\nb"}\r\n\r\n\n{"text": "c"}')
    assert [text for _, text in sources.documents(str(tmp_path / "a.txt"))] == ["one\ntwo\nthree\n"]
    assert [text for _, text in sources.documents(str(tmp_path / "b.jsonl"))] == ["a\r\nb", "c"]


def test_records_with_empty_texts_are_left_out_and_counted(tmp_path, capfd):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": ""}\n{"text": "a"}\n{"text": " \\n"}\n{"text": "b"}')
    assert [text for _, text in sources.documents(str(path))] == ["a", "b"]
    assert capfd.readouterr().err == f"note: {path}: 2 empty texts left out\n"
    rows = write_parquet(tmp_path / "a.parquet", text=["", "one"], id=["x", "y"])
    assert list(sources.documents(rows)) == [("y", "one")]
    assert "1 empty texts left out" in capfd.readouterr().err


GOOD = b'{"text": "good"}\n'
BAD_FILES = {
    "not UTF-8 in txt": ("a.txt", b"good \xff bad", ["a.txt", "not UTF-8 at byte 5"]),
    "not UTF-8 in jsonl": ("a.jsonl", GOOD + b'{"text": "\xc3("}', ["a.jsonl line 2", "not UTF-8 at byte 27"]),
    "empty txt": ("a.txt", b" \n", ["a.txt", "the text is empty"]),
    "missing field": ("a.jsonl", GOOD + b'\n{"txt": "x"}', ["a.jsonl line 3", "no field `text`"]),
    "a list": ("a.jsonl", b'["text"]', ["a.jsonl line 1", "no field `text`"]),
    "null": ("a.jsonl", b"null", ["a.jsonl line 1", "no field `text`"]),
    "a number": ("a.jsonl", b'{"text": 5}', ["a.jsonl line 1", "`text` is a int, not a string"]),
    "broken JSON": ("a.jsonl", GOOD + b'{"text": "x"', ["a.jsonl line 2", "broken JSON"]),
    "deep JSON": ("a.jsonl", b"[" * 100_000, ["a.jsonl line 1", "broken JSON"]),
    "half a pair": ("a.jsonl", rb'{"text": "\ud83d", "id": 1}', ["a.jsonl line 1", "surrogate", "correct it"]),
    "half a pair as id": ("a.jsonl", rb'{"text": "a", "id": "\ud83d"}', ["a.jsonl line 1", "surrogate", "correct it"]),
    "no gzip": ("a.jsonl.gz", GOOD, ["a.jsonl.gz", "cannot be read", "fetch it again"]),
    "gzip cut short": ("a.jsonl.gz", gzip.compress(GOOD)[:-9], ["a.jsonl.gz", "cannot be read", "fetch it again"]),
    "gzip damaged": ("a.jsonl.gz", gzip.compress(GOOD)[:10] + b"\xff" * 9, ["a.jsonl.gz", "cannot be read"]),
    "no parquet": ("a.parquet", b"PAR1 no PAR1", ["a.parquet", "damaged after row 0", "fetch it again"]),
    "extension": ("a.csv", b"x", ["--data=", "a.csv", "unknown extension", ".txt, .jsonl, .jsonl.gz, .parquet"]),
}


@pytest.mark.parametrize("name, content, parts", BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_named_with_its_place_and_leaves_nothing(tmp_path, name, content, parts):
    (tmp_path / name).write_bytes(content)
    with raises_line(*parts):
        list(sources.documents(str(tmp_path / name)))
    with raises_line(*parts):
        data.prepare(str(tmp_path / name), "bytes", tmp_path / "cache")
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").iterdir())


def test_bad_parquet_rows_and_columns_are_named(tmp_path, monkeypatch):
    with raises_line("a.parquet", "no column `text`", "body", "rename"):
        list(sources.documents(write_parquet(tmp_path / "a.parquet", body=["x"])))
    with raises_line("b.parquet row 9", "NoneType, not a string"):
        list(sources.documents(write_parquet(tmp_path / "b.parquet", text=["x"] * 8 + [None])))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with raises_line("b.parquet", "pip install pyarrow"):
        list(sources.documents(str(tmp_path / "b.parquet")))


def test_a_source_that_is_not_there(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("foo", "", str(tmp_path / "no.txt"), str(tmp_path / "*.txt"), "x" * 5000):
        with raises_line(f"--data={name}: neither a known corpus (pydocs, pysource, fineweb, "):
            sources.documents(name)
    with raises_line(f"--data={tmp_path / 'empty'}: nothing to read in this folder", ".txt"):
        sources.documents(str(tmp_path / "empty"))
    (tmp_path / "a.txt").write_text("some text", encoding="utf-8")
    with raises_line("--ood=foo: neither a known corpus"):
        data.prepare(str(tmp_path / "a.txt"), "bytes", tmp_path / "cache", ood="foo")
    with raises_line("--ood=pydocs", "training text itself"):
        data.prepare("pydocs", "bytes", tmp_path / "cache", ood="pydocs")
    assert not (tmp_path / "cache").exists()


# ---- What Python carries


@pytest.fixture(scope="session")
def python_docs():
    return list(sources.documents("pydocs"))


def test_pydocs_are_about_2_mb_of_different_texts(python_docs):
    ids, found = zip(*python_docs)
    assert 1_000_000 < sum(len(text.encode("utf-8")) for text in found) < 6_000_000
    assert len(set(found)) == len(found) and min(map(len, found)) >= 60
    assert list(ids) == sorted(ids)
    by_id = dict(python_docs)
    assert by_id["json/decoder.py:JSONDecoder"].startswith("Simple JSON <https://json.org> decoder")
    assert "json/__init__.py" in by_id and "json/decoder.py:JSONDecoder.raw_decode" in by_id
    assert any(doc_id.startswith("topics/") for doc_id in ids) or "pydoc_data.topics" not in sys.modules


def test_pydocs_ids_know_nothing_of_this_machine(python_docs):
    ids = "\n".join(doc_id for doc_id, _ in python_docs)
    assert not re.search(r"^/|\\|:/|^\.|site-packages", ids, re.MULTILINE)
    assert sys.prefix not in ids and sysconfig.get_path("stdlib") not in ids


def test_pydocs_split_by_the_hash_of_the_id_and_twice_the_same(python_docs, tmp_path):
    corpus = data.prepare("pydocs", "bytes", tmp_path)
    for split in ("train", "val"):
        wanted = [text for doc_id, text in python_docs if held_out(doc_id) == (split == "val")]
        found = corpus.tokens(split, 0, corpus.n_tokens(split))
        assert found.tolist() == [i for text in wanted for i in (*text.encode("utf-8"), BYTES.eot)]
        assert corpus.manifest["splits"][split]["documents"] == len(wanted) == np.count_nonzero(found == BYTES.eot)
    assert 0.07 < len(wanted) / len(python_docs) < 0.13
    assert corpus.manifest["python"] == sys.version.split()[0] and corpus.manifest["name"] == "pydocs"
    assert "site-packages" not in json.dumps(corpus.manifest) and str(tmp_path) not in json.dumps(corpus.manifest)


def test_pysource_is_a_few_hundred_kb_of_code_without_docstrings(python_docs):
    code = dict(sources.documents("pysource"))
    assert 300_000 <= sum(map(len, code.values())) < 700_000
    assert not any(name.startswith(("pydoc_data", "idlelib", "_sysconfigdata")) for name in code)
    whole = "\n".join(code.values())
    assert "import " in whole and "    # " in whole
    of_these_files = [text for doc_id, text in python_docs if doc_id.split(":")[0] in code and text.count("\n") > 8]
    first_lines = {text.split("\n")[0] for text in of_these_files if len(text.split("\n")[0]) > 50}
    assert len(first_lines) > 5 and sum(line in whole for line in first_lines) <= 0.02 * len(first_lines)


@pytest.fixture
def small_python(tmp_path, monkeypatch):
    """A Python whose standard library is a folder of the test, without pydoc_data."""
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "lib"))
    monkeypatch.setitem(sys.modules, "pydoc_data", None)
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    (tmp_path / "lib" / "sub" / "test").mkdir(parents=True)
    (tmp_path / "lib" / "site-packages").mkdir()
    return tmp_path / "lib"


LONG = "This docstring is long enough to be worth a place among the training texts, {}."


def test_docstrings_are_found_at_any_depth_and_cut_from_the_source(small_python):
    doc = LONG.format
    (small_python / "sub" / "m.py").write_text(
        f'"""{doc("é1")}"""\nclass A:\n    \'\'\'{doc(2)}\n\n        indented\n    \'\'\'\n    def f(self):\n'
        f'        if 1:\n            def g(): "{doc(3)}"\n        """no docstring"""  # comment\n\ntry: pass\nexcept E:\n'
        f'    async def h():\n        r"""{doc(2)}\n\n            indented\n        """\n        return 1\n'
        f'def short(): "tiny"\n', encoding="utf-8")
    for skipped in ("sub/broken.py", "sub/test/t.py", "site-packages/s.py", "_sysconfigdata_x.py"):
        (small_python / skipped).write_text(f'"""{doc(skipped)}"""\n' + "x =" * ("broken" in skipped), encoding="utf-8")
    (small_python / "latin.py").write_bytes(b'"""\xe9' + doc(9).encode() + b'"""')
    assert list(sources.documents("pydocs")) == [
        ("sub/m.py", doc("é1")), ("sub/m.py:A", doc(2) + "\n\nindented"), ("sub/m.py:A.f.g", doc(3))]
    assert list(sources.documents("pysource")) == [("sub/m.py", 'class A:\n    def f(self):\n        if 1:\n'
        '        """no docstring"""  # comment\n\ntry: pass\nexcept E:\n    async def h():\n        return 1\n')]


def test_a_python_without_any_text_says_so(small_python):
    with raises_line("pydocs", "neither its documentation nor its source", "--data=PATH"):
        list(sources.documents("pydocs"))
    with raises_line("pysource", "no source files", "--ood=none"):
        list(sources.documents("pysource"))
