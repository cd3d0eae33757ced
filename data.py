"""Text to tokens to batches: tokenizers, token files on disk, and the windows that a trainer reads.

    corpus = prepare("pydocs", "bytes", "data", ood="pysource")  # tokenises once; later calls only open the folders
    x, y = corpus.batch(seed=1, step=0, rows=range(12), batch_size=12, context=64)

What a user can get wrong raises `flags.UserError` with one line that names it and says what to do.
"""
import hashlib
import math
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from files import read_json, sha256, write_json
from flags import UserError
from sources import Source, find_source, one_line


# ---- Tokenizers -----------------------------------------------------------------------------------------------------


class Tokenizer:
    """Text to token ids and back. name; vocab_size; eot: the end-of-text id, the last one; byte_lengths: int64
    (vocab_size,), the UTF-8 bytes of text each id stands for (eot: 0), which makes bits per byte exact;
    encode(text) -> ids (n,), where a special token spelled out in the text (<|endoftext|>) is ordinary text."""

    def __init__(self, name: str, pieces: list[bytes], encode: Callable[[str], np.ndarray]):
        self.name, self.pieces, self.encode = name, pieces, encode  # pieces: the bytes of each id
        self.vocab_size, self.eot = len(pieces), len(pieces) - 1
        self.byte_lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """Text; eot shows as an empty line, U+FFFD stands for invalid UTF-8 and ids beyond a padded vocabulary."""
        special = {self.eot: b"\n\n"}
        pieces = [self.pieces[i] if i < self.eot else special.get(i, b"\xff") for i in np.asarray(ids).tolist()]
        return b"".join(pieces).decode("utf-8", errors="replace")

    def count_bytes(self, ids: np.ndarray | torch.Tensor) -> int:
        """UTF-8 bytes of text that the ids, of any shape, stand for."""
        return int(self.byte_lengths[np.asarray(ids)].sum())


def get_tokenizer(name: str) -> Tokenizer:
    """"bytes" (256 byte values + eot: 257 ids) or "gpt2" (tiktoken: 50,257 ids, eot among them)."""
    if name == "bytes":
        pieces = [bytes([value]) for value in range(256)] + [b""]
        return Tokenizer(name, pieces, lambda text: np.frombuffer(text.encode("utf-8"), dtype=np.uint8))
    if name != "gpt2":
        raise UserError(f"--tokenizer={name}: unknown; choose bytes or gpt2")
    try:
        import tiktoken
        gpt2 = tiktoken.get_encoding(name)
    except ImportError:
        raise UserError("--tokenizer=gpt2: needs tiktoken; pip install tiktoken, or use --tokenizer=bytes") from None
    except Exception as error:  # no network, a proxy, a damaged download: many kinds
        raise UserError("--tokenizer=gpt2: its vocabulary is not in tiktoken's cache and cannot be fetched; set "
                        f"TIKTOKEN_CACHE_DIR or use --tokenizer=bytes ({one_line(error)})") from None
    # The whole text at once: since 0.13 tiktoken is linear even inside endless words (1 MB of one letter: 0.5 s).
    return Tokenizer(name, [gpt2.decode_single_token_bytes(i) for i in range(gpt2.eot_token)] + [b""],
                     lambda text: gpt2.encode_to_numpy(text, disallowed_special=()))


def bits_per_byte(nats: float, n_bytes: int) -> float:
    """Summed loss in nats over some tokens -> bits per UTF-8 byte of the text they stand for (`count_bytes`)."""
    if n_bytes == 0:
        raise UserError("bits per byte: the evaluated tokens stand for no text; give more text")
    return nats / math.log(2) / n_bytes


# ---- Preparation: text -> token files -------------------------------------------------------------------------------

FORMAT = 1  # raise it when these files or the cleaning of a text change: older folders are then no longer used
DTYPE = np.dtype("<u2")  # two bytes a token, the low one first on every machine
REBUILD = "delete its folder, it will be built anew"


def file_sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); check the file or the disk") from None


def split_documents(source: Source, splits: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(split, text) pairs. About one document in ten, by the hash of its id, is held out as val; of a single .txt it is
    the last tenth of the characters, as in nanoGPT. Where only one split is wanted it gets everything."""
    for doc_id, text in source.documents():
        if len(splits) == 1:
            yield splits[0], text
        elif source.one_text:
            cut = int(0.9 * len(text))
            yield from (("train", text[:cut]), ("val", text[cut:]))
        else:
            yield "val" if int(sha256(doc_id.encode("utf-8"))[:8], 16) < 0.1 * 2**32 else "train", text


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
    limit = min(tokenizer.vocab_size, 2 ** (8 * DTYPE.itemsize))

    def flush(split: str):
        shards = entries[split]["shards"]
        shards.append(write_shard(folder / f"{split}-{len(shards):05}.bin", waiting[split], tokenizer))
        waiting[split], size[split] = [], 0

    for split, text in split_documents(source, splits):
        ids = tokenizer.encode(text) if source.one_text else np.append(tokenizer.encode(text), tokenizer.eot)
        if len(ids) and not 0 <= ids.min() <= ids.max() < limit:
            raise UserError(f"--tokenizer={tokenizer.name}: made ids from {ids.min()} to {ids.max()}, but those of its "
                            f"vocabulary in {DTYPE.name} end before {limit}; use another tokenizer")
        waiting[split].append(ids.astype(DTYPE))
        size[split] += len(ids)
        entries[split]["documents"] += 1
        if size[split] >= shard_tokens:
            flush(split)
    for split in splits:
        if size[split]:
            flush(split)
        if sum(shard["tokens"] for shard in entries[split]["shards"]) < 2:
            raise UserError(f"{source.name}: too little text, its {split} split has {entries[split]['documents']} "
                            "documents; give more (about one document in ten goes to val)")
    write_json(folder / "manifest.json", {
        "format": FORMAT, "name": source.name, "python": source.python, "tokenizer": tokenizer.name,
        "vocab_size": tokenizer.vocab_size, "dtype": DTYPE.name, "splits": entries})


def prepare_folder(source: Source, tokenizer: Tokenizer, splits: tuple[str, ...], cache_dir: Path, shard_tokens: int):
    """The finished folder for this source, tokenizer and splits: found, or else made. It is made under a name of its
    own and renamed at the end: what was interrupted is never taken for whole, and two processes do not meet."""
    contents = [file_sha256(path) for path in source.files]
    key = sha256(repr((FORMAT, tokenizer.name, splits, shard_tokens, source.python, contents)).encode("utf-8"))
    folder = cache_dir / f"{source.name}-{tokenizer.name}-{key[:12]}"
    if folder.exists():
        return folder
    print(f"tokenising {source.name} into {folder} (once)", flush=True)
    unfinished = folder.with_name(f"{folder.name}.unfinished-{uuid.uuid4().hex[:8]}")
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
            shard_tokens: int = 100_000_000) -> "Corpus":
    """Tokens of data (splits train and val) and, unless "none", of ood (one split): from cache_dir, or else made there
    in files of about shard_tokens (200 MB)."""
    tokenizer, source = get_tokenizer(tokenizer_name), find_source(data)
    if ood == data:
        raise UserError(f"--ood={ood}: is the training text itself; choose another one or none")
    ood_source = None if ood == "none" else find_source(ood, "--ood")
    where = Path(cache_dir), shard_tokens
    folders = {prepare_folder(source, tokenizer, ("train", "val"), *where): ("train", "val")}
    if ood_source:
        folders[prepare_folder(ood_source, tokenizer, ("ood",), *where)] = ("ood",)
    return Corpus(folders)


# ---- Reading: token files -> windows --------------------------------------------------------------------------------


def load_manifest(folder: Path, splits: tuple[str, ...]) -> dict:
    """manifest.json, checked: every file it names has a plain name and lies in this very folder."""
    path = folder / "manifest.json"
    manifest = read_json(path, REBUILD)
    try:
        shards = [shard for split in splits for shard in manifest["splits"][split]["shards"] or [{}]]
        for shard in shards:
            name = shard["file"]
            if not re.fullmatch(r"[a-z]+-\d+\.bin", name) or (folder / name).resolve().parent != folder.resolve():
                raise ValueError(f"{name!r} is outside the folder")
            if not (type(shard["tokens"]) is int and shard["tokens"] > 0 and isinstance(shard["sha256"], str)):
                raise ValueError(f"{name} without a size and checksum")
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{path}: cannot be right ({one_line(error)}); {REBUILD}") from None
    return manifest


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

    def __init__(self, folders: dict[Path, tuple[str, ...]]):
        manifests = {folder: load_manifest(folder, splits) for folder, splits in folders.items()}
        self.manifest = next(iter(manifests.values()))
        self.tokenizer = get_tokenizer(self.manifest["tokenizer"])
        self._shards = {split: [(folder / shard["file"], shard) for shard in manifests[folder]["splits"][split]["shards"]]
                        for folder, splits in folders.items() for split in splits}
        self._ends = {split: np.cumsum([shard["tokens"] for _, shard in shards]) for split, shards in self._shards.items()}
        self._open = {}  # path -> its tokens
        self.splits = tuple(self._shards)
        hashes = [[shard["sha256"] for _, shard in self._shards[split]] for split in ("train", "val")]
        self.digest = sha256(repr(hashes).encode("utf-8"))

    def n_tokens(self, split: str) -> int:
        return int(self._ends[split][-1])

    def _shard(self, split: str, number: int) -> np.ndarray:
        path, shard = self._shards[split][number]
        if path not in self._open:
            if not path.is_file():
                raise UserError(f"{path}: missing; {REBUILD}")
            if path.stat().st_size != shard["tokens"] * DTYPE.itemsize or file_sha256(path) != shard["sha256"]:
                raise UserError(f"{path}: damaged, its size or checksum is not the manifest's; {REBUILD}")
            self._open[path] = np.asarray(np.memmap(path, dtype=DTYPE, mode="r"))
        return self._open[path]

    def tokens(self, split: str, start: int, stop: int) -> np.ndarray:
        """Ids number start to stop - 1 of a split, read across its files: int64 (stop - start,)."""
        ends, parts = self._ends[split], []
        for number in range(np.searchsorted(ends, start, side="right"), np.searchsorted(ends, stop, side="left") + 1):
            shard = self._shard(split, number)
            begin = ends[number] - len(shard)
            parts.append(shard[max(start - begin, 0) : stop - begin])
        return np.concatenate(parts).astype(np.int64)

    def _windows(self, split: str, starts: Iterable[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.from_numpy(np.stack([self.tokens(split, start, start + length + 1) for start in starts]))
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def batch(self, seed: int, step: int, rows: Iterable[int], batch_size: int, context: int):
        """The given rows of the global training batch number `step`: x, y int64 (len(rows), context); y is x one later.

        A pure function: whatever process asks, and after whatever interruption, gets the same rows. The training tokens
        are cut into windows; every epoch visits each once, in an order of its own, cut at a place of its own.
        """
        spare = min(context - 1, self.n_tokens("train") - 1 - context)  # room to shift all windows by 0 to spare tokens
        if spare < 0:
            raise UserError(f"{self.manifest['name']}: {self.n_tokens('train')} training tokens are too few for one "
                            f"window of --context={context}; give more text or a smaller context")
        n = (self.n_tokens("train") - 1 - spare) // context
        numbers = step * batch_size + np.asarray(rows, dtype=np.int64)
        epochs, starts = numbers // n, np.empty_like(numbers)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            shift = int(sha256(f"shift {seed} {epoch}".encode("utf-8")), 16) % (spare + 1)
            starts[here] = shift + context * permute(numbers[here] % n, n, f"order {seed} {epoch}")
        return self._windows("train", starts.tolist(), context)

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

    def _counts(self, split: str) -> np.ndarray:
        n, step = self.n_tokens(split), 2**20  # a part at a time, so that memory stays bounded
        return sum(np.bincount(self.tokens(split, start, min(start + step, n)), minlength=self.tokenizer.vocab_size)
                   for start in range(0, n, step))

    def unigram_bits_per_byte(self, split: str) -> float:
        """The baseline: every token predicted by its frequency in train (each count plus one), over the same targets as
        `eval_batches`: all tokens of the split but the first."""
        frequencies = self._counts("train") + 1
        targets = self._counts(split)
        targets[self.tokens(split, 0, 1)] -= 1
        nats = -float(targets @ np.log(frequencies / frequencies.sum()))
        return bits_per_byte(nats, int(targets @ self.tokenizer.byte_lengths))
