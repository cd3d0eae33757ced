"""Named corpora on other machines, loaded from an https server on loopback that answers as the hub does, in its
schemas."""

import hashlib
import http.server
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import data
import mlm_data
import remote
import sources
from conftest import TINY, command
from flags import UserError

pyarrow = pytest.importorskip("pyarrow")
import pyarrow.parquet  # noqa: E402

# Columns as the publishers' dataset cards have them.
FINEWEB = {"text": str, "id": str, "dump": str, "url": str, "date": str, "file_path": str, "language": str,
           "language_score": float, "token_count": int}
FINEWEB_EDU = {**{k: v for k, v in FINEWEB.items() if k != "date"}, "score": float, "int_score": int}
WIKIPEDIA = {"id": str, "url": str, "title": str, "text": str}
WIKITEXT = {"text": str}


def table(schema, texts):
    made = {str: lambda name, i: texts[i] if name == "text" else f"{name} {i}", float: lambda name, i: i / 7,
            int: lambda name, i: i}
    return pyarrow.table({name: [made[kind](name, i) for i in range(len(texts))] for name, kind in schema.items()})


class Hub(http.server.BaseHTTPRequestHandler):
    """Listing, redirection to a CDN, byte ranges; `server.files`: path -> content; `server.faults`: what to do wrong."""

    def do_GET(self):
        server, path = self.server, self.path
        server.requests.append((path, self.headers.get("Range")))
        if path.startswith("/api/datasets/"):
            folder = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/([0-9a-f]{40})/(.*)", path)
            listed = [{"type": "file", "oid": "0" * 40, "size": len(content), "path": name,
                       "lfs": {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 135}}
                      for name, content in server.files.items() if name.startswith(folder[3])]
            return self.answer(200, json.dumps([{"type": "directory", "path": "x"}, *listed]).encode("utf-8"))
        if "/resolve/" in path:
            to = server.faults.get("redirect", f"https://127.0.0.1:{server.server_port}")
            self.send_response(302)
            self.send_header("Location", f"{to}/cdn/{path.split('/resolve/')[1].split('/', 1)[1]}")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        content = server.files.get(path.removeprefix("/cdn/"))
        if content is None:
            return self.answer(404, b"")
        start = int((self.headers.get("Range") or "bytes=0-")[6:-1])
        if server.faults.get("damage"):
            content = content[:-9] + b"123456789"
        self.answer(206 if start else 200, content[start:] + server.faults.get("more", b""), server.faults.pop("cut", None))

    def answer(self, code, body, cut=None):
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body[:cut])
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    if not shutil.which("openssl"):
        pytest.skip("no openssl to make a certificate for a server on loopback")
    folder = tmp_path_factory.mktemp("certificate")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", "key", "-out", "cert",
                    "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"], cwd=folder, check=True,
                   capture_output=True)
    return folder


@pytest.fixture
def hub(certificate, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert", certificate / "key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.files, server.faults, server.requests = {}, {}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate / "cert"))
    monkeypatch.setenv("HF_ENDPOINT", f"https://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(remote, "PATIENCE", 5)
    yield server
    server.shutdown()


TEXTS = [f"{'The quick brown fox. ' * (i % 5 + 1)}Text number {i}." for i in range(60)]


def serve(hub, tmp_path, name, schema, texts, monkeypatch, n_files=3):
    """Puts texts, cut into files, where the named corpus has its own, and makes the published numbers fit."""
    corpus = remote.CORPORA[name]
    folder = corpus.origin.split("/", 2)[2]
    size = -(-len(texts) // n_files)
    for i in range(n_files):
        pyarrow.parquet.write_table(table(schema, texts[i * size : (i + 1) * size]), tmp_path / "x.parquet")
        hub.files[f"{folder}/part-{i:05}.parquet"] = (tmp_path / "x.parquet").read_bytes()
    changed = remote.Remote(corpus.origin, n_files, len(texts), corpus.large)
    monkeypatch.setitem(remote.CORPORA, name, changed)
    return hub.files


@pytest.mark.parametrize("name, schema", [("fineweb", FINEWEB), ("fineweb-edu", FINEWEB_EDU), ("wikipedia", WIKIPEDIA)])
def test_the_public_schemas_are_read_and_only_loaded_when_their_turn_has_come(hub, tmp_path, monkeypatch, name, schema):
    serve(hub, tmp_path, name, schema, TEXTS, monkeypatch)
    found = iter(sources.find_source(name, cache_dir=tmp_path).documents())
    first = next(found)
    assert first == ("id 0", TEXTS[0]) and len(list(tmp_path.rglob("part-*.parquet"))) == 1
    assert [text for _, text in [first, *found]] == TEXTS and len(list(tmp_path.rglob("part-*.parquet"))) == 3
    commit = remote.CORPORA[name].origin.split("@")[1].split("/")[0]
    assert all(commit in path for path, _ in hub.requests if "/cdn/" not in path)
    count = len(hub.requests)
    assert [text for _, text in sources.find_source(name, cache_dir=tmp_path).documents()] == TEXTS
    assert len(hub.requests) == count  # not even the listing is asked for again


def test_real_fineweb_rows(hub, tmp_path, monkeypatch):
    real = Path(os.environ.get("SSA_DATA_DIR", "absent"), "fineweb", "sample.parquet")
    if not real.exists():
        pytest.skip("SSA_DATA_DIR names no folder with the real data")
    hub.files["sample/10BT/000_00000.parquet"] = real.read_bytes()
    monkeypatch.setitem(remote.CORPORA, "fineweb", remote.Remote(remote.CORPORA["fineweb"].origin, 1, 100, True))
    assert list(sources.find_source("fineweb", cache_dir=tmp_path).documents()) == list(sources.documents(str(real)))


def test_wikitext_rows_become_articles(hub, tmp_path, monkeypatch):
    rows = ["", " = One = \n", "", " Some text . \n", " = = Part = = \n", " More . \n", "", " = Two = \n", " End . \n"]
    serve(hub, tmp_path, "wikitext", WIKITEXT, rows, monkeypatch, n_files=1)
    found = [text for _, text in sources.find_source("wikitext", cache_dir=tmp_path).documents()]
    assert found == [" = One = \n Some text . \n = = Part = = \n More . \n", " = Two = \n End . \n"]


def test_wikitext_test_is_one_of_wikitexts_files(hub, tmp_path, monkeypatch):
    serve(hub, tmp_path, "wikitext", WIKITEXT, [" = A = \n", " a \n"], monkeypatch, n_files=1)
    hub.files["wikitext-2-raw-v1/test-00000-of-00001.parquet"] = hub.files.pop("wikitext-2-raw-v1/part-00000.parquet")
    hub.files["wikitext-2-raw-v1/train-00000-of-00001.parquet"] = b"not this one"
    known = remote.CORPORA["wikitext-test"]
    monkeypatch.setitem(remote.CORPORA, "wikitext-test", remote.Remote(known.origin, 1, 2, ending=known.ending))
    assert [text for _, text in sources.find_source("wikitext-test", cache_dir=tmp_path).documents()] == [" = A = \n a \n"]


def test_an_interrupted_download_goes_on_where_it_stopped(hub, tmp_path, monkeypatch):
    files = serve(hub, tmp_path, "fineweb", FINEWEB, TEXTS, monkeypatch, n_files=1)
    [content] = files.values()
    hub.faults["cut"] = len(content) // 2
    monkeypatch.setattr(remote.time, "sleep", lambda _: None)
    assert [text for _, text in sources.find_source("fineweb", cache_dir=tmp_path).documents()] == TEXTS
    ranges = [wanted for path, wanted in hub.requests if path.startswith("/cdn/")]
    assert ranges == [None, f"bytes={len(content) // 2}-"]


def line(*parts):
    return pytest.raises(UserError, match=r"(?s)\A(?=[^\n]*\Z).*" + ".*".join(re.escape(part) for part in parts))


def read(name, tmp_path):
    return list(sources.find_source(name, cache_dir=tmp_path).documents())


def test_what_is_not_the_published_file_is_never_used(hub, tmp_path, monkeypatch):
    serve(hub, tmp_path, "fineweb", FINEWEB, TEXTS, monkeypatch)
    for fault, part in (({"damage": True}, "its size or sha256 is not the one known"),
                        ({"more": b"x" * 2000000}, "is longer than its"),
                        ({"redirect": "http://127.0.0.1:9"}, "which is not https; nothing was loaded")):
        hub.faults.clear()
        hub.faults.update(fault)
        with line(part):
            read("fineweb", tmp_path)
        assert not list(tmp_path.rglob("part-*"))
    hub.faults.clear()
    assert len(read("fineweb", tmp_path)) == 60
    path = next(tmp_path.rglob("part-00001.parquet"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with line("part-00001.parquet", "it was removed, the same command loads it again"):
        read("fineweb", tmp_path)
    assert len(read("fineweb", tmp_path)) == 60


def test_what_was_recorded_at_the_first_download_holds(hub, tmp_path, monkeypatch):
    serve(hub, tmp_path, "fineweb", FINEWEB, TEXTS, monkeypatch)
    found = iter(sources.find_source("fineweb", cache_dir=tmp_path).documents())
    next(found)
    for name in list(hub.files)[1:]:  # the server changes its mind
        hub.files[name] = hub.files[name] + b"?"
    with line("longer than its"):
        list(found)


def test_counts_are_compared_with_the_published_ones(hub, tmp_path, monkeypatch):
    serve(hub, tmp_path, "fineweb", FINEWEB, TEXTS, monkeypatch)
    origin = remote.CORPORA["fineweb"].origin
    monkeypatch.setitem(remote.CORPORA, "fineweb", remote.Remote(origin, 4, 60, True))
    with line("lists 3 files, but 4 are published"):
        read("fineweb", tmp_path)
    monkeypatch.setitem(remote.CORPORA, "fineweb", remote.Remote(origin, 3, 61, True))
    with line("60 rows were read, but 61 are published"):
        read("fineweb", tmp_path)


def test_no_network_no_file_and_no_trust_are_one_line_each(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(remote.time, "sleep", lambda _: None)
    with line("lists 0 files, but 15 are published"):
        read("fineweb", tmp_path)
    serve(hub, tmp_path, "fineweb", FINEWEB, TEXTS, monkeypatch)
    next(iter(sources.find_source("fineweb", cache_dir=tmp_path).documents()))
    hub.files.clear()
    with line("part-00001.parquet", "404"):
        read("fineweb", tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with line("not https"):
        read("wikipedia", tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "https://127.0.0.1:1")
    with line("cannot be listed", "HF_ENDPOINT"):
        read("wikipedia", tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", f"https://127.0.0.1:{hub.server_port}")
    monkeypatch.delenv("SSL_CERT_FILE")
    with line("cannot be listed", "CERTIFICATE_VERIFY_FAILED"):
        read("wikipedia", tmp_path)


def test_shakespeare_is_a_pinned_file(hub, tmp_path, monkeypatch):
    text = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 50
    hub.files["input.txt"] = text
    pinned = remote.CORPORA["shakespeare"]
    [file] = pinned.files
    assert file.url.startswith("https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6") and file.size == 1_115_394
    here = remote.File("input.txt", f"https://127.0.0.1:{hub.server_port}/cdn/input.txt", len(text),
                       hashlib.sha256(text).hexdigest())
    monkeypatch.setitem(remote.CORPORA, "shakespeare", remote.Remote(pinned.origin, 1, 1, files=(here,)))
    corpus = data.prepare("shakespeare", "bytes", tmp_path)
    whole = np.concatenate([corpus.tokens(split, 0, corpus.n_tokens(split)) for split in ("train", "val")])
    assert bytes(whole.astype(np.uint8)) == text and corpus.n_tokens("train") == int(0.9 * len(text))
    real = Path(os.environ.get("SSA_DATA_DIR", "absent"), "shakespeare", "input.txt")
    if real.exists():
        assert hashlib.sha256(real.read_bytes()).hexdigest() == file.sha256


def test_a_large_corpus_is_written_by_data_py_and_trained_on(hub, tmp_path, monkeypatch):
    """The whole way, through the real commands."""
    serve(hub, tmp_path, "fineweb", FINEWEB, TEXTS * 5, monkeypatch)
    n_files, rows = remote.CORPORA["fineweb"].n_files, remote.CORPORA["fineweb"].rows
    flags = [*TINY, "--data=fineweb", "--out=r"]
    done = command("train_gpt.py", *flags, cwd=tmp_path, check=False)
    assert done.returncode == 2 and "run `python data.py fineweb --tokenizer=bytes --tokens=10e9` first" in done.stderr
    assert (n_files, rows) == (3, 300) and not (tmp_path / "r").exists()
    done = command("data.py", "fineweb", "--tokenizer=bytes", "--tokens=1e6", "--shard-tokens=5e3", "--workers=1", cwd=tmp_path)
    assert "the corpus ended early" in done.stdout
    command("train_gpt.py", *flags, cwd=tmp_path)


def test_without_pyarrow_one_line_says_what_to_install(hub, tmp_path, monkeypatch):
    serve(hub, tmp_path, "fineweb", FINEWEB, TEXTS, monkeypatch)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with line("parquet files need pyarrow; pip install pyarrow"):
        read("fineweb", tmp_path)


def test_sentences_from_github_are_recorded_when_they_first_arrive(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(remote, "GITHUB", f"https://127.0.0.1:{hub.server_port}")
    pinned = remote.SENTENCES["aochildes"]
    assert re.fullmatch(r"phueb/BabyBERTa@[0-9a-f]{40}/data/corpora", pinned.origin) and pinned.rows == 893_989
    monkeypatch.setitem(remote.SENTENCES, "aochildes", remote.on_github("phueb/BabyBERTa", "c" * 40, "data/corpora",
                                                                        ["aochildes.txt"], 2))
    address = f"/phueb/BabyBERTa/{'c' * 40}/data/corpora/aochildes.txt"
    hub.files[address], hub.faults["cut"] = b"see the dog .\nyou see it .\n", 10  # and the connection breaks once
    path, = mlm_data.paths("aochildes", tmp_path)
    assert path.read_bytes() == hub.files[address] and mlm_data.read_sentences(path) == ["see the dog .", "you see it ."]
    note = json.loads((path.parent / "files-1.json").read_text(encoding="utf-8"))["files"][0]
    assert note == {"name": "aochildes.txt", "size": 27, "sha256": hashlib.sha256(hub.files[address]).hexdigest()}
    asked = len(hub.requests)
    assert mlm_data.paths("aochildes", tmp_path) == [path] and len(hub.requests) == asked  # nothing is asked for again
    path.write_bytes(b"see the cat .\nyou see it .\n")
    with pytest.raises(UserError, match="its size or sha256 is not the one known"):
        mlm_data.paths("aochildes", tmp_path)
    hub.files[address] = b"one line\n"
    shutil.rmtree(path.parent)
    mlm_data.paths("aochildes", tmp_path)
    assert "has 1 lines, but 2 are expected" in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot be reached"):
        mlm_data.paths("zorro", tmp_path)
