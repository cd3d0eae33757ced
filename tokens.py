"""Text to token ids and back, and what token files on disk look like. No torch here: the processes that tokenise in
parallel (shards.py) need none.

A folder of token files holds `<split>-<number>.bin`, ids of two bytes each, and manifest.json, which names every file
with its number of tokens, bytes of text, and sha256. In a folder that shards.py is still filling, the files to come
are in the manifest already, with their exact number of tokens and no sha256 yet: so the place of every token is known
in advance.
"""
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from files import file_sha256, one_line, read_json
from flags import UserError

FORMAT = 1  # raise it when these files or the cleaning of a text change: older folders are then no longer used
DTYPE = np.dtype("<u2")  # two bytes a token, the low one first on every machine
REBUILD = "delete its folder, it will be built anew"
VOCAB_SIZES = {"bytes": 257, "gpt2": 50257}


# ---- Tokenizers -----------------------------------------------------------------------------------------------------


class Tokenizer:
    """Text to token ids and back. name; vocab_size; eot: the end-of-text id, the last one; byte_lengths: int64
    (vocab_size,), the UTF-8 bytes of text each id stands for (eot: 0), which makes bits per byte exact;
    encode(text) -> ids (n,), where a special token spelled out in the text (<|endoftext|>) is ordinary text."""

    def __init__(self, name: str, pieces: list[bytes], encode: Callable[[str], np.ndarray]):
        self.name, self.pieces, self.encode = name, pieces, encode  # pieces: the bytes of each id
        self.vocab_size, self.eot = len(pieces), len(pieces) - 1
        self.byte_lengths = np.array([len(piece) for piece in pieces], dtype=np.int64)

    def document(self, text: str, end: bool = True) -> np.ndarray:
        """The ids of a document as they go to disk, the end-of-text id behind them if `end`; checked against the
        vocabulary and the two bytes there are for each."""
        ids = np.append(self.encode(text), self.eot) if end else self.encode(text)
        limit = min(self.vocab_size, 2 ** (8 * DTYPE.itemsize))
        if len(ids) and not 0 <= ids.min() <= ids.max() < limit:
            raise UserError(f"--tokenizer={self.name}: made ids from {ids.min()} to {ids.max()}, but those of its "
                            f"vocabulary in {DTYPE.name} end before {limit}; use another tokenizer")
        return ids.astype(DTYPE)

    def decode(self, ids: Iterable[int]) -> str:
        """Text; eot shows as an empty line, U+FFFD stands for invalid UTF-8 and ids beyond a padded vocabulary."""
        special = {self.eot: b"\n\n"}
        pieces = [self.pieces[i] if i < self.eot else special.get(i, b"\xff") for i in np.asarray(ids).tolist()]
        return b"".join(pieces).decode("utf-8", errors="replace")

    def count_bytes(self, ids: np.ndarray) -> int:
        """UTF-8 bytes of text that the ids, of any shape, stand for."""
        return int(self.byte_lengths[np.asarray(ids)].sum())


def get_tokenizer(name: str) -> Tokenizer:
    """"bytes" (256 byte values + eot: 257 ids) or "gpt2" (tiktoken: 50,257 ids, eot among them)."""
    if name == "bytes":
        pieces = [bytes([value]) for value in range(256)] + [b""]
        return Tokenizer(name, pieces, lambda text: np.frombuffer(text.encode("utf-8"), dtype=np.uint8))
    if name != "gpt2":
        raise UserError(f"--tokenizer={name}: unknown; choose {' or '.join(VOCAB_SIZES)}")
    try:
        import tiktoken
        gpt2 = tiktoken.get_encoding(name)
    except ImportError:
        raise UserError("--tokenizer=gpt2: needs tiktoken; pip install tiktoken, or use --tokenizer=bytes") from None
    except Exception as error:  # no network, a damaged download: many kinds
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


# ---- Folders of token files ----------------------------------------------------------------------------------------


def require_whole(path: Path, shard: dict):
    """Raise UserError unless a token file has the size and checksum of its entry in the manifest."""
    if not path.is_file():
        raise UserError(f"{path}: missing; {REBUILD}")
    if path.stat().st_size != shard["tokens"] * DTYPE.itemsize or file_sha256(path) != shard["sha256"]:
        raise UserError(f"{path}: damaged, its size or checksum is not the manifest's; {REBUILD}")


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
            to_come = shard["sha256"] is None and manifest.get("complete", True) is False
            known = isinstance(shard["sha256"], str) or to_come
            if not (type(shard["tokens"]) is int and shard["tokens"] > 0 and known):
                raise ValueError(f"{name} without a size and checksum")
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UserError(f"{path}: cannot be right ({one_line(error)}); {REBUILD}") from None
    return manifest
