"""Text to tokens to batches: token files on disk, and the windows that a trainer reads.

    corpus = prepare("pydocs", "bytes", "data", ood="pysource")  # tokenises once; later calls only open the folders
    x, y = corpus.batch(seed=1, step=0, rows=range(12), batch_size=12, context=64)

    python data.py fineweb --tokenizer=gpt2 --tokens=10e9 --workers=8   the token files of a large corpus, see shards.py

What a user can get wrong raises `flags.UserError` with one line that names it and says what to do.
"""
import contextlib
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path

import numpy as np

import shards
from files import file_sha256, one_line, sha256, write_json
from flags import UserError
from sources import Source, find_source, is_held_out
from tokens import DTYPE, FORMAT, REBUILD, Tokenizer, bits_per_byte, get_tokenizer, load_manifest, require_whole


# ---- Preparation: text -> token files -------------------------------------------------------------------------------

FEW = 100  # documents, of which a draw of one in ten might hold out none


def split_documents(source: Source, splits: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(split, text) pairs. About one document in ten, by the hash of its id, is held out as val; of a few documents it is
    the tenth with the lowest hashes, and of a single one the last tenth of the characters, as in nanoGPT. Where only one
    split is wanted it gets everything."""
    documents = source.documents()
    few = list(islice(documents, FEW))
    distinct = sorted(set(few), key=lambda document: sha256(document[0].encode("utf-8")))
    held_out = distinct[: max(1, len(distinct) // 10)]
    for doc_id, text in chain(few, documents):
        if len(splits) == 1:
            yield splits[0], text
        elif source.one_text or len(few) == 1:
            cut = int(0.9 * len(text))
            yield from (("train", text[:cut]), ("val", text[cut:]))
        elif len(few) < FEW:
            yield "val" if (doc_id, text) in held_out else "train", text
        else:
            yield "val" if is_held_out(doc_id) else "train", text


def write_shard(path: Path, texts: list[np.ndarray], tokenizer: Tokenizer) -> dict:
    """A new file with the ids of some texts; returns its entry in the manifest."""
    with open(path, "xb") as file:
        for ids in texts:
            file.write(ids)
        file.flush()
        os.fsync(file.fileno())
    return {"file": path.name, "tokens": sum(len(ids) for ids in texts),
            "bytes": sum(tokenizer.count_bytes(ids) for ids in texts), "sha256": file_sha256(path)}


def write_folder(folder: Path, source: Source, tokenizer: Tokenizer, splits: tuple[str, ...], shard_tokens: int):
    """Fills a new folder with token files and manifest.json. eot ends every document, but not a single .txt."""
    entries = {split: {"documents": 0, "shards": []} for split in splits}
    waiting, size = {split: [] for split in splits}, dict.fromkeys(splits, 0)  # the ids of texts for the next file

    def flush(split: str):
        shards = entries[split]["shards"]
        shards.append(write_shard(folder / f"{split}-{len(shards):05}.bin", waiting[split], tokenizer))
        waiting[split], size[split] = [], 0

    for split, text in split_documents(source, splits):
        ids = tokenizer.document(text, end=not source.one_text)
        waiting[split].append(ids)
        size[split] += len(ids)
        entries[split]["documents"] += 1
        if size[split] >= shard_tokens:
            flush(split)
    for split in splits:
        if size[split]:
            flush(split)
        if sum(shard["tokens"] for shard in entries[split]["shards"]) < 2:
            raise UserError(f"{source.name}: too little text, its {split} split has {entries[split]['documents']} "
                            "documents; give more (about one document in ten, but at least one, goes to val)")
    write_json(folder / "manifest.json", {
        "format": FORMAT, "name": source.name, "python": source.python, "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size, "dtype": DTYPE.name, "splits": entries})


def prepare_folder(source: Source, tokenizer: Tokenizer, splits: tuple[str, ...], cache_dir: Path, shard_tokens: int):
    """The finished folder for this source, tokenizer and splits: found, or else made. It is made under a name of its
    own and renamed at the end: what was interrupted is never taken for whole, and two processes do not meet."""
    key = sha256(repr((FORMAT, tokenizer.name, splits, shard_tokens, source.python, source.contents)).encode("utf-8"))
    folder = cache_dir / f"{source.name}-{tokenizer.name}-{key[:12]}"
    if folder.exists():
        return folder
    print(f"tokenising {source.name} into {folder} (once)", flush=True)
    unfinished = folder.with_name(f"{folder.name}.unfinished-{uuid.uuid4().hex[:8]}")
    for other in cache_dir.glob("*.unfinished-*"):  # by processes that were killed, if nothing has been added for a day
        with contextlib.suppress(OSError):  # another process may be doing the same
            if time.time() - other.stat().st_mtime > 86400:
                shutil.rmtree(other)
    try:
        unfinished.mkdir(parents=True)
        write_folder(unfinished, source, tokenizer, splits, shard_tokens)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process came first, with the same contents
                raise
    except OSError as error:
        raise UserError(f"{cache_dir}: cannot write tokens here ({one_line(error)}); choose another folder") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def prepare(data: str, tokenizer_name: str, cache_dir: str | Path, ood: str = "none",
            shard_tokens: int = 100_000_000, timeout: float = 600) -> "Corpus":
    """Tokens of data (splits train and val) and, unless "none", of ood (one split): from cache_dir, or else made there
    in files of about shard_tokens (200 MB). Where shards.py has planned the files of data, finished or not, it is these;
    a file that is missing yet is waited for, `timeout` seconds."""
    tokenizer, source = get_tokenizer(tokenizer_name), find_source(data, cache_dir=cache_dir)
    if ood == data:
        raise UserError(f"--ood={ood}: is the training text itself; choose another one or none")
    ood_source = None if ood == "none" else find_source(ood, "--ood", cache_dir)
    where = Path(cache_dir), shard_tokens
    planned = shards.planned_folder(source, tokenizer_name, cache_dir)
    if (planned / "manifest.json").exists():
        folders = {planned: ("train", "val")}
    elif source.large:
        raise UserError(f"--data={data}: its tokens are not in {cache_dir}; run `python data.py {data} --tokenizer="
                        f"{tokenizer_name} --tokens=10e9` first (training may start when its first files are there)")
    else:
        folders = {prepare_folder(source, tokenizer, ("train", "val"), *where): ("train", "val")}
    if ood_source:
        folders[prepare_folder(ood_source, tokenizer, ("ood",), *where)] = ("ood",)
    return Corpus(folders, timeout)


# ---- Reading: token files -> windows --------------------------------------------------------------------------------


def permute(index: np.ndarray, n: int, key: str) -> np.ndarray:
    """Where a pseudo-random permutation of range(n), fixed by key, puts each index: int64 (k,) -> int64 (k,).

    This shuffles billions of windows without a list of them, by a Feistel network: cut a number of 2h bits into halves
    and repeat (left, right) -> (right, left xor F(right)). Whatever F is, each round can be undone, since right and so
    F(right) are still known: no two numbers meet, it is a permutation of range(4^h). To make it one of range(n), apply
    it again to whatever lands beyond n until it lands inside ("cycle walking"): a permutation runs in cycles, so that
    ends, at the latest where it began, and still no two meet. Integers only: the same for ever and everywhere.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.frombuffer(hashlib.sha256(key.encode("utf-8")).digest(), dtype="<u4").astype(np.uint64)  # eight rounds
    x, beyond = index.astype(np.uint64), np.ones(len(index), dtype=bool)
    while beyond.any():
        left, right = x[beyond] >> half, x[beyond] & mask
        for round_key in keys:
            mixed = (right ^ round_key) * np.uint64(0x9E3779B97F4A7C15)  # modulo 2^64; the high bits are well mixed
            left, right = right, left ^ ((mixed ^ mixed >> np.uint64(29)) >> np.uint64(32) & mask)
        x[beyond] = left << half | right
        beyond = x >= n
    return x.astype(np.int64)


class Corpus:
    """Prepared tokens. tokenizer; splits: their names; manifest: of the training text; digest: a hash of the training
    and validation tokens. `folders`: finished folder -> its splits. Token files are verified when first opened."""

    def __init__(self, folders: dict[Path, tuple[str, ...]], timeout: float = 600):
        manifests = {folder: load_manifest(folder, splits) for folder, splits in folders.items()}
        self.manifest = next(iter(manifests.values()))
        self.tokenizer = get_tokenizer(self.manifest["tokenizer"])
        self._shards = {split: [(folder / shard["file"], shard) for shard in manifests[folder]["splits"][split]["shards"]]
                        for folder, splits in folders.items() for split in splits}
        self._ends = {split: np.cumsum([shard["tokens"] for _, shard in shards]) for split, shards in self._shards.items()}
        self._open, self._timeout = {}, timeout  # path -> its tokens; seconds to wait for a file to come
        self.splits = tuple(self._shards)
        hashes = [[shard["sha256"] for _, shard in self._shards[split]] for split in ("train", "val")]
        self.digest = self.manifest.get("plan") or sha256(repr(hashes).encode("utf-8"))

    def n_tokens(self, split: str) -> int:
        return int(self._ends[split][-1])

    def _shard(self, split: str, number: int) -> np.ndarray:
        path, shard = self._shards[split][number]
        if path not in self._open:
            shard = shard if shard["sha256"] else self._wait(split, number)
            require_whole(path, shard)
            tokens = np.asarray(np.memmap(path, dtype=DTYPE, mode="r"))
            if tokens.max() >= self.tokenizer.vocab_size:
                raise UserError(f"{path}: has token {tokens.max()}, beyond those of {self.tokenizer.name}; {REBUILD}")
            self._open[path] = tokens
        return self._open[path]

    def _wait(self, split: str, number: int) -> dict:
        """A file's entry in the manifest, once shards.py has finished the file."""
        path, _ = self._shards[split][number]
        deadline, said = time.monotonic() + self._timeout, False
        while True:
            manifest = load_manifest(path.parent, (split,))
            if manifest["plan"] != self.manifest["plan"]:
                raise UserError(f"{path}: will not come, since the corpus ended before it; start anew, --out elsewhere")
            shard = manifest["splits"][split]["shards"][number]
            if shard["sha256"]:
                self._shards[split][number] = path, shard
                return shard
            if time.monotonic() > deadline:
                raise UserError(f"{path}: has not come within --data-timeout={self._timeout:g} seconds; is `python data.py` "
                                "still running? Start it again, then --resume")
            if not said:
                said = print(f"waiting for {path}, which is not written yet", flush=True) is None
            time.sleep(min(1, self._timeout / 10))

    def tokens(self, split: str, start: int, stop: int) -> np.ndarray:
        """Ids number start to stop - 1 of a split, read across its files: int64 (stop - start,)."""
        parts = []
        for number, shard in self._files(split, start, stop):
            begin = self._ends[split][number] - len(shard)
            parts.append(shard[max(start - begin, 0) : stop - begin])
        return np.concatenate(parts).astype(np.int64)

    def _files(self, split: str, start: int, stop: int) -> list[tuple[int, np.ndarray]]:
        """(number, tokens) of every file that has some of the tokens start to stop - 1."""
        ends = self._ends[split]
        numbers = range(np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop, side="left") + 1)
        return [(number, self._shard(split, number)) for number in numbers]

    def _windows(self, split: str, starts: Iterable[int], length: int):
        import torch  # here, because the processes that tokenise (shards.py) need none
        both = torch.from_numpy(np.stack([self.tokens(split, start, start + length + 1) for start in starts]))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def batch(self, seed: int, step: int, rows: Iterable[int], batch_size: int, context: int):
        """The given rows of the global training batch number `step`: x, y int64 (len(rows), context); y is x one later.

        A pure function: whatever process asks, and after whatever interruption, gets the same rows. The training tokens
        are cut into windows; every epoch visits each once, in an order of its own, cut at a place of its own. In a folder
        that shards.py fills, the first epoch shuffles within stretches of a file's length, so that it follows the filling.
        """
        starts = self._starts(seed, step * batch_size + np.arange(batch_size), context)
        if "plan" in self.manifest:
            for start in starts.tolist():  # of all rows, so that all processes wait for a missing file together
                self._files("train", start, start + context + 1)
        return self._windows("train", starts[np.asarray(rows, dtype=np.int64)].tolist(), context)

    def _starts(self, seed: int, numbers: np.ndarray, context: int) -> np.ndarray:
        """Where the windows with these numbers, counted through all epochs, begin in the training tokens."""
        spare = min(context - 1, self.n_tokens("train") - 1 - context)  # room to shift all windows by 0 to spare tokens
        if spare < 0:
            raise UserError(f"{self.manifest['name']}: {self.n_tokens('train')} training tokens are too few for one "
                            f"window of --context={context}; give more text or a smaller context")
        n = (self.n_tokens("train") - 1 - spare) // context
        stretch = max(1, self.manifest.get("shard_tokens", n * context) // context)
        epochs, places = numbers // n, numbers % n
        firsts, starts = np.where(epochs == 0, places // stretch * stretch, 0), np.empty_like(numbers)
        for epoch, first in sorted(set(zip(epochs.tolist(), firsts.tolist()))):
            here, size = (epochs == epoch) & (firsts == first), min(stretch, n - first) if epoch == 0 else n
            shift = int(sha256(f"shift {seed} {epoch}".encode("utf-8")), 16) % (spare + 1)
            starts[here] = shift + context * (first + permute(places[here] - first, size, f"order {seed} {epoch}"))
        return starts

    def eval_batches(self, split: str, context: int, batch_size: int, max_tokens: int | None = None):
        """Yields x, y int64 (<= batch_size, context): the windows of a split in order, every token but the first once in
        y; the last, shorter window is a batch of its own. With max_tokens: about as many, in windows evenly spread."""
        last = self.n_tokens(split) - 1
        full = last // context
        kept = full if max_tokens is None else min(full, max(1, max_tokens // context))
        starts = [i * full // kept * context for i in range(kept)]
        for i in range(0, kept, batch_size):
            yield self._windows(split, starts[i : i + batch_size], context)
        if kept == full and full * context < last:
            yield self._windows(split, [full * context], last - full * context)

    def _counts(self, split: str, most: int | None = None) -> np.ndarray:
        n, step = min(self.n_tokens(split), most or 2**62), 2**20  # a part at a time, so that memory stays bounded
        return sum(np.bincount(self.tokens(split, start, min(start + step, n)), minlength=self.tokenizer.vocab_size)
                   for start in range(0, n, step))

    def unigram_nats(self) -> np.ndarray:
        """The baseline: -log p of every token by its frequency in train (each count plus one; of planned files the first
        tells enough): float64 (vocab_size,)."""
        frequencies = self._counts("train", self.manifest.get("shard_tokens")) + 1
        return -np.log(frequencies / frequencies.sum())

    def unigram_bits_per_byte(self, split: str) -> float:
        """The baseline over the same targets as `eval_batches`: all tokens of the split but the first."""
        targets = self._counts(split)
        targets[self.tokens(split, 0, 1)] -= 1
        return bits_per_byte(float(targets @ self.unigram_nats()), int(targets @ self.tokenizer.byte_lengths))


if __name__ == "__main__":  # python data.py NAME ...
    shards.main()
