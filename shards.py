"""python data.py NAME --tokenizer=gpt2 --tokens=10e9 --workers=N: the token files of a large corpus, by several
processes.

The manifest is written first: which files there will be, and exactly how many tokens each has. Then documents are
read in their order, tokenised by N processes, and their tokens, put end to end, fill one file after the other; a
document may go on in the next file. So the content of every file is fixed before it exists: it depends neither on the
number of processes nor on interruptions, and training may start on the files that are finished.

For each finished file the manifest notes its checksum, and the place in the corpus where the next one begins ("next":
number of the document, tokens of it already used). An interrupted command goes on from there: no hole, no document
twice.
"""
import collections
import concurrent.futures
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import filelock
import numpy as np
import tyro
from tqdm import tqdm

from files import one_line, sha256, write_json
from flags import UserError, fail, require, tyro_cli
from sources import HELD_OUT, Source, find_source, is_held_out
from tokens import DTYPE, FORMAT, Tokenizer, get_tokenizer, load_manifest, require_whole

LARGE = 2e9  # tokens: from here on one document in a hundred is validation text, as one in ten would be a waste
VAL_PART, VAL_TOKENS = 20, 2_000_000  # a twentieth of all tokens is validation text, but so many are enough; and they
# are there soon: training cannot begin before them
CHUNK = 500_000  # characters a worker gets at once: enough to forget the cost of sending them


@dataclass
class Flags:
    """Write the token files of a corpus; interrupted, the same command continues."""

    corpus: tyro.conf.Positional[str]
    """fineweb, fineweb-edu, wikipedia, another known name, or a path"""
    tokenizer: Literal["bytes", "gpt2"] = "gpt2"
    """what turns text into tokens"""
    tokens: float = 10e9
    """tokens in all, training and validation; fewer if the corpus has fewer"""
    shard_tokens: float = 100e6
    """tokens in a file, two bytes each"""
    workers: int = 0
    """processes that tokenise (0: one for each core but one, which reads and writes)"""
    cache_dir: str = "data"
    """folder for downloads and tokens, as for the trainers"""

    def check(self):
        require(self, "tokens", 100 <= self.tokens < 1e15, "must be at least 100 and below 1e15")
        require(self, "shard_tokens", 10 <= self.shard_tokens <= 1e9, "must be between 10 and 1e9")
        require(self, "tokens", self.tokens / self.shard_tokens <= 50_000,
                "makes more than 50,000 files; raise --shard-tokens")
        require(self, "workers", 0 <= self.workers <= 1024, "must be between 0 and 1024")
        require(self, "cache_dir", self.cache_dir, "name a folder")


# ---- The plan -------------------------------------------------------------------------------------------------------


def planned_folder(source: Source, tokenizer_name: str, cache_dir: str | Path) -> Path:
    """Where the token files of a source are, or would be: one folder for each text and tokenizer."""
    key = sha256(repr((FORMAT, tokenizer_name, source.python, source.contents)).encode("utf-8"))
    return Path(cache_dir) / f"{source.name}-{tokenizer_name}-shards-{key[:12]}"


def plan_digest(manifest: dict) -> str:
    """Fixes every token of the training and validation text, before they are there."""
    sizes = [[shard["tokens"] for shard in manifest["splits"][split]["shards"]] for split in ("train", "val")]
    what = [manifest[key] for key in ("format", "contents", "python", "tokenizer", "held_out")]
    return sha256(repr((what, sizes)).encode("utf-8"))


def make_plan(source: Source, tokenizer: Tokenizer, tokens: int, shard_tokens: int) -> dict:
    """The manifest of a folder in which no file is finished yet."""
    val = min(tokens // VAL_PART, VAL_TOKENS)
    splits = {}
    for split, n in (("train", tokens - val), ("val", val)):
        shards = [{"file": f"{split}-{i:05}.bin", "tokens": min(shard_tokens, n - i * shard_tokens), "bytes": None,
                   "sha256": None} for i in range(-(-n // shard_tokens))]
        splits[split] = {"documents": 0, "next": {"document": 0, "used": 0}, "shards": shards}
    manifest = {"format": FORMAT, "name": source.name, "python": source.python, "tokenizer": tokenizer.name,
                "vocab_size": tokenizer.vocab_size, "dtype": DTYPE.name, "contents": source.contents,
                "held_out": 0.01 if tokens >= LARGE else HELD_OUT, "tokens": tokens, "shard_tokens": shard_tokens,
                "complete": False, "splits": splits}
    return {**manifest, "plan": plan_digest(manifest)}


# ---- Reading and tokenising -----------------------------------------------------------------------------------------


def start_worker(tokenizer_name: str):
    """Runs once in every worker; Ctrl-C is left to the parent."""
    global tokenizer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    tokenizer = get_tokenizer(tokenizer_name)


def end_with_parent():
    """A parent that is killed says no goodbye, and its workers would wait for text for ever."""
    multiprocessing.parent_process().join()
    os._exit(1)


def encode(texts: list[str]) -> list[np.ndarray]:
    return [tokenizer.document(text) for text in texts]


def tokenised(documents: Iterator[tuple[int, str, str]], tokenizer_name: str, workers: int) -> Iterator:
    """(number, split, text) -> (number, split, ids), in the same order, by `workers` processes. Only a few chunks are
    under way at any time, so that a slow disk is waited for instead of filling the memory."""
    # "spawn" starts clean processes on every system; torch is never imported in them.
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker,
                                                (tokenizer_name,)) as pool:
        under_way = collections.deque()
        try:
            for chunk in chunks(documents):
                under_way.append((chunk, pool.submit(encode, [text for _, _, text in chunk])))
                if len(under_way) > 2 * workers:
                    yield from finished(*under_way.popleft())
            while under_way:
                yield from finished(*under_way.popleft())
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError("a tokenising process was killed, perhaps for want of memory; the same command continues, "
                            "with fewer --workers if need be") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def chunks(documents):
    chunk, size = [], 0
    for document in documents:
        chunk.append(document)
        size += len(document[2])
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def finished(chunk, future):
    for (number, split, _), ids in zip(chunk, future.result()):
        yield number, split, ids


# ---- Writing --------------------------------------------------------------------------------------------------------


class SplitWriter:
    """Cuts the tokens of one split into its planned files."""

    def __init__(self, folder: Path, entry: dict, tokenizer: Tokenizer):
        self.folder, self.entry, self.tokenizer = folder, entry, tokenizer
        self.documents = entry["documents"]
        self.number = sum(shard["sha256"] is not None for shard in entry["shards"])  # of the file being filled
        self.begin()

    def begin(self):
        self.size, self.bytes, self.digest, self.file = 0, 0, hashlib.sha256(), None

    @property
    def full(self) -> bool:
        return self.number == len(self.entry["shards"])

    def wants(self, number: int) -> bool:
        """Whether document `number`, of this split, has tokens that are not on disk yet."""
        return not self.full and number >= self.entry["next"]["document"]

    def add(self, number: int, ids: np.ndarray) -> int:
        """Append a document, or what earlier files have not used of it; -> how many of its tokens had room."""
        first = self.entry["next"]
        start = used = first["used"] if number == first["document"] else 0
        self.documents += used == 0
        while used < len(ids) and not self.full:
            shard = self.entry["shards"][self.number]
            part = ids[used : used + shard["tokens"] - self.size]
            self.file = self.file or self.new_file()
            self.file.write(part)
            self.digest.update(part)
            self.bytes += self.tokenizer.count_bytes(part)
            self.size, used = self.size + len(part), used + len(part)
            if self.size == shard["tokens"]:
                self.finish(number, used)
        return used - start

    def new_file(self):
        self.partial.unlink(missing_ok=True)  # what a killed process left
        return open(self.partial, "xb")  # x: a new file, so never one elsewhere that a link of this name points to

    @property
    def partial(self) -> Path:
        return self.folder / f".{self.entry['shards'][self.number]['file']}.partial"

    def finish(self, number: int, used: int):
        """The file is full: give it its name, and note in the manifest (in memory) how to go on behind it."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        shard = self.entry["shards"][self.number]
        os.replace(self.partial, self.folder / shard["file"])
        shard |= {"tokens": self.size, "bytes": self.bytes, "sha256": self.digest.hexdigest()}
        self.entry |= {"documents": self.documents, "next": {"document": number, "used": used}}
        self.number += 1
        self.begin()

    def end_early(self, number: int):
        """The corpus has no more text: the file being filled is the last one."""
        if self.size:
            self.finish(number, 0)
        del self.entry["shards"][self.number :]


def fill(source: Source, tokenizer: Tokenizer, folder: Path, manifest: dict, workers: int):
    """Writes every file of the manifest that is not finished yet."""
    path, splits = folder / "manifest.json", manifest["splits"]
    writers = {split: SplitWriter(folder, entry, tokenizer) for split, entry in splits.items()}
    done = sum(shard["tokens"] for entry in splits.values() for shard in entry["shards"] if shard["sha256"])
    if done:
        print(f"continuing after {done:,} tokens, from document {min(e['next']['document'] for e in splits.values()):,}")

    def wanted():
        for number, (doc_id, text) in enumerate(source.documents()):
            if all(writer.full for writer in writers.values()):
                return
            split = "val" if is_held_out(doc_id, manifest["held_out"]) else "train"
            if writers[split].wants(number):
                yield number, split, text

    number = 0
    with tqdm(total=manifest["tokens"], initial=done, unit="tok", unit_scale=True, disable=None) as bar:
        for number, split, ids in tokenised(wanted(), tokenizer.name, workers):
            file = writers[split].number
            bar.update(writers[split].add(number, ids))
            if writers[split].number > file:
                write_json(path, manifest)
    for split, writer in writers.items():
        if not writer.full:
            writer.end_early(number + 1)
            if sum(shard["tokens"] for shard in splits[split]["shards"]) < 2:
                raise UserError(f"{source.name}: too little text for its {split} split; give more, or fewer --tokens")
    for left in [*folder.glob(".*.partial"), *folder.glob(".*.tmp")]:  # by commands that were killed
        left.unlink()
    manifest |= {"complete": True, "plan": plan_digest(manifest)}
    write_json(path, manifest)


def prepare_shards(flags: Flags) -> Path:
    source = find_source(flags.corpus, "NAME", flags.cache_dir)
    if source.one_text:
        raise UserError(f"{flags.corpus}: is a single text, which train_gpt.py --data={flags.corpus} prepares itself")
    tokenizer, tokens, shard_tokens = get_tokenizer(flags.tokenizer), int(flags.tokens), int(flags.shard_tokens)
    workers, start = flags.workers or max(1, (os.cpu_count() or 1) - 1), time.perf_counter()
    folder = planned_folder(source, flags.tokenizer, flags.cache_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".lock", timeout=0):
            if (folder / "manifest.json").exists():
                manifest = load_manifest(folder, ("train", "val"))
                if (manifest["tokens"], manifest["shard_tokens"]) != (tokens, shard_tokens):
                    planned = f"--tokens={manifest['tokens']} --shard-tokens={manifest['shard_tokens']}"
                    raise UserError(f"--tokens={tokens} --shard-tokens={shard_tokens}: {folder} was planned with "
                                    f"{planned}; give these, or another --cache-dir")
                for shard in (shard for entry in manifest["splits"].values() for shard in entry["shards"] if shard["sha256"]):
                    require_whole(folder / shard["file"], shard)  # before days of training on the rest
            else:
                manifest = make_plan(source, tokenizer, tokens, shard_tokens)
                write_json(folder / "manifest.json", manifest)
            before = finished_tokens(manifest)
            if not manifest["complete"]:
                print(f"{source.name}: {tokens:,} tokens into {folder} with {workers} workers", flush=True)
                try:
                    fill(source, tokenizer, folder, manifest, workers)
                except UserError:
                    if not finished_tokens(manifest):  # a plan without a single file would only be waited for
                        (folder / "manifest.json").unlink()
                    raise
    except filelock.Timeout:
        raise UserError(f"{folder}: another process is filling it; wait for it or end it") from None
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({one_line(error)}); free some space, then the same command "
                        "continues, or choose another --cache-dir") from None
    report(manifest, folder, before, time.perf_counter() - start)
    return folder


def finished_tokens(manifest: dict) -> int:
    return sum(s["tokens"] for entry in manifest["splits"].values() for s in entry["shards"] if s["sha256"])


def report(manifest: dict, folder: Path, before: int, seconds: float):
    total = finished_tokens(manifest)
    if total < manifest["tokens"]:
        print(f"the corpus ended early: it has {total:,} tokens, not {manifest['tokens']:,}")
    for split, entry in manifest["splits"].items():
        print(f"{split}: {sum(s['tokens'] for s in entry['shards']):,} tokens of {entry['documents']:,} documents in "
              f"{len(entry['shards'])} files")
    print(f"{folder}: complete; {(total - before) / seconds:,.0f} tokens/s")


def main():
    try:
        flags = tyro_cli(Flags, sys.argv[1:], tyro.MISSING_NONPROP)
        flags.check()
        prepare_shards(flags)
    except UserError as error:
        fail(error)
    except KeyboardInterrupt:
        fail("stopped; the same command continues", code=130)
