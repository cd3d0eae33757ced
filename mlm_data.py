"""Sentences to masked batches: what a masked language model of the BERT family learns from.

    tokenizer = read_tokenizer("tokenizer.json")                # or train_tokenizer(texts, 8192)
    corpus = Sentences(texts, tokenizer, longest=128)           # too short and too long ones dropped and counted
    batch = masked_batch(corpus, seed=1, step=0, batch_size=16)
    inputs, targets, segments = batch.packed(range(16), corpus.special["pad"])     # what model.Transformer takes

As published for BabyBERTa (Huebner et al. 2021): of every sentence's tokens 15 % are masked, at least one, in 10 patterns
a sentence; of the masked ones 10 % become a random token and the rest the mask token. A batch is a pure function of
(seed, step): whoever asks, and after whatever interruption, gets the same.

Child-directed sentences have 5 to 70 tokens. Padding 16 of them to the longest doubles the work, sorting them into parts by
length costs a pass over the weights for each part. So sentences share rows (`pack`); each attends to itself alone and counts
its positions from its own start, which gives what computing it alone would.

What a user can get wrong raises `flags.UserError` with one line that names it and says what to do. No torch at import.
"""

import csv
import heapq
import importlib.util
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import remote
from data import permute
from files import one_line, sha256
from flags import UserError
from sources import decode_utf8, is_held_out

PATTERNS = 10  # ways in which every sentence is masked in one pass over the pairs (sentence, pattern)
MIN_WORDS = 3
SPECIAL = {"mask": "<mask>", "pad": "<pad>", "unk": "<unk>", "start": "<s>", "end": "</s>"}  # BabyBERTa's ids 0 to 4
IGNORE = -100  # the target where nothing is asked


# ---- Tokenizer ------------------------------------------------------------------------------------------------------


def require_library():
    """Raise UserError unless the library `tokenizers` is there."""
    if not importlib.util.find_spec("tokenizers"):
        raise UserError('tokenizers: this library is not installed, which masked language models need; pip install '
                        '".[train,babyberta]"')


def read_tokenizer(path):
    """A `tokenizers` file with RoBERTa's five special tokens. Raises UserError for any other."""
    require_library()
    from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_str(decode_utf8(Path(path).read_bytes(), str(path)))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); name a tokenizer.json") from None
    except UserError:
        raise
    except Exception as error:  # the library raises plain Exceptions
        raise UserError(f"{path}: is not a file of the library `tokenizers` ({one_line(error)})") from None
    for token in SPECIAL.values():
        if tokenizer.token_to_id(token) is None:
            raise UserError(f"{path}: has no token {token}; use a tokenizer of the RoBERTa family")
    tokenizer.no_truncation()  # the published file cuts at 128 tokens and pads; here long sentences are dropped, see below
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # a special token that is spelled out in a text is ordinary text
    return tokenizer


def train_tokenizer(texts, vocab_size):
    """A byte-level BPE like the published one: lower case, a space before the first word, <s> and </s> around."""
    require_library()
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL["unk"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=2, special_tokens=list(SPECIAL.values()),
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    ids = {name: tokenizer.token_to_id(token) for name, token in SPECIAL.items()}
    tokenizer.post_processor = processors.RobertaProcessing((SPECIAL["end"], ids["end"]), (SPECIAL["start"], ids["start"]))
    tokenizer.encode_special_tokens = True
    return tokenizer


def set_threads(count):
    """How many threads the library `tokenizers` uses; it must be said before the first text is tokenised."""
    os.environ["RAYON_NUM_THREADS"] = str(count)


# ---- Sentences ------------------------------------------------------------------------------------------------------


def paths(data, cache_dir):
    """The files that --data names: `aochildes`, downloaded at the first use, or paths, comma-separated, in their order."""
    if data in remote.SENTENCES:
        found = list(remote.fetch(data, Path(cache_dir)))
        lines, expected = sum(path.read_bytes().count(b"\n") for path in found), remote.SENTENCES[data].rows
        if lines != expected:
            print(f"warning: {data}: has {lines:,} lines, but {expected:,} are expected", file=sys.stderr)
        return found
    return [Path(part) for part in data.split(",")]


def read_sentences(path):
    """The sentences of a file: one a line, or the column `text` of a .csv. Blank lines are left out."""
    path = Path(path)
    try:
        text = decode_utf8(path.read_bytes(), str(path))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); name a text file with one sentence a line") from None
    if path.suffix.lower() == ".csv":
        rows = csv.DictReader(io.StringIO(text))
        if "text" not in (rows.fieldnames or ()):
            raise UserError(f"{path}: no column `text` among {rows.fieldnames}; rename the one to read")
        lines = (row["text"] or "" for row in rows)
    else:
        lines = text.split("\n")
    sentences = [stripped for line in lines if (stripped := line.strip())]
    if not sentences:
        raise UserError(f"{path}: has no sentence; give text, one sentence a line")
    return sentences


def split_held_out(sentences):
    """(training, held-out) sentences, by the hash of the text: equal sentences are never on both sides. Held out is one in a
    hundred, one in ten of a small corpus."""
    part = 0.01 if len(sentences) >= 20_000 else 0.1
    held_out = {text: is_held_out(text, part) for text in set(sentences)}
    return [s for s in sentences if not held_out[s]], [s for s in sentences if held_out[s]]


class Sentences:
    """Tokenised sentences. n: how many; lengths: tokens of each, start and end included; too_short, too_long: how many
    were dropped for having under `min_words` words or over `longest` tokens; digest: of all texts, as they are."""

    def __init__(self, texts, tokenizer, longest, name="--data", min_words=MIN_WORDS):
        kept = [text for text in texts if len(text.split()) >= min_words]
        self.tokenizer, self.longest, self.too_short = tokenizer, longest, len(texts) - len(kept)
        ids = [np.array(encoding.ids, dtype=np.int64) for encoding in tokenizer.encode_batch_fast(kept)]
        self.too_long = sum(len(i) > longest for i in ids)
        ids = [i for i in ids if len(i) <= longest]
        if not ids:
            why = (f"no sentence is left of {len(texts)}: {self.too_short} have fewer than {min_words} words, {self.too_long} more "
                   f"than {longest} tokens" if texts else "has no sentence")
            raise UserError(f"{name}: {why}; give more text, or other text, one sentence a line")
        self.n, self.lengths = len(ids), np.array([len(i) for i in ids])
        self.tokens = np.concatenate(ids)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.digest = sha256("\n".join(texts).encode("utf-8"))
        self.special = {name: tokenizer.token_to_id(token) for name, token in SPECIAL.items()}
        ordinary = np.ones(tokenizer.get_vocab_size(), dtype=bool)
        ordinary[list(self.special.values())] = False
        self.ordinary = np.flatnonzero(ordinary)  # what a masked token may be replaced by

    def take(self, numbers):
        """The sentences with these numbers, end to end, and their lengths: int64 (sum of lengths,), (k,)."""
        lengths = self.lengths[numbers]
        ends = np.cumsum(lengths)
        places = np.arange(ends[-1]) + np.repeat(self.starts[numbers] - (ends - lengths), lengths)
        return self.tokens[places], lengths


# ---- Batches --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """Masked sentences end to end. inputs, targets: int64 (sum of lengths,), targets IGNORE where nothing is masked;
    lengths (B,); starts (B,): where each begins; n_masked: targets in the whole batch, by which the loss of every part of
    it is divided, on whatever process that is computed; widest: most tokens of a row."""

    inputs: np.ndarray
    targets: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray
    n_masked: int
    widest: int

    def packed(self, rows, pad):
        """The given sentences, several in a row: tensors inputs, targets and segments, int64 (R, T) each, what
        model.Transformer takes. segments number the sentences of a row from 1; 0 is what is left empty at its end."""
        lengths, starts = self.lengths[list(rows)], self.starts[list(rows)]
        source = np.arange(lengths.sum()) + np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
        shape, goal, numbers = pack(lengths, self.widest)
        return fill(shape, goal, (self.inputs[source], pad), (self.targets[source], IGNORE), (numbers, 0))


def fill(shape, goal, *flat_and_empty):
    """Tensors int64 (R, T) from what `pack` gave: of each pair the flat values at their goals, `empty` elsewhere."""
    import torch
    grids = [np.full(shape, empty, dtype=np.int64) for _, empty in flat_and_empty]
    for grid, (flat, _) in zip(grids, flat_and_empty):
        grid[goal] = flat
    return tuple(map(torch.from_numpy, grids))


def pack(lengths, widest, usual_width=40):
    """Put sentences of these lengths (k,), none above `widest`, into about as many rows of usual_width as hold them all: the
    longest first, each into the row that is emptiest yet, so that the rows end nearly alike and little is left empty.

    -> the shape (R, T), T <= widest; where each token of the sentences end to end goes, a pair of int64 (sum of lengths,); the
    number of its sentence within the row, from 1 on, int64 (sum of lengths,). Wider rows compute more scores between sentences,
    which the mask throws away; on a CPU widths from 24 to 128 take the same time.
    """
    row, place, number = (np.empty(len(lengths), dtype=np.int64) for _ in range(3))
    order = np.argsort(-lengths, kind="stable").tolist()
    n_rows, width = int(lengths.sum()) // max(usual_width, int(lengths.max())), widest + 1
    while width > widest:
        n_rows += 1
        rows = [(0, r, 0) for r in range(n_rows)]  # a heap of (tokens, row, sentences)
        for i in order:
            used, r, count = rows[0]
            row[i], place[i], number[i] = r, used, count + 1
            heapq.heapreplace(rows, (used + int(lengths[i]), r, count + 1))
        width = max(used for used, _, _ in rows)
    inner = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # place within the sentence
    return (n_rows, width), (np.repeat(row, lengths), np.repeat(place, lengths) + inner), np.repeat(number, lengths)


def pair_numbers(corpus, seed, numbers, order):
    """The sentences of the pairs (sentence, pattern) with these numbers, counted through all passes over all pairs."""
    n_pairs = corpus.n * PATTERNS
    passes, places = numbers // n_pairs, numbers % n_pairs
    if order == "shuffled":
        for one in set(passes.tolist()):
            here = passes == one
            places[here] = permute(places[here], n_pairs, f"pairs {seed} {one}")
    return places // PATTERNS


def masked_batch(corpus, seed, step, batch_size, order="shuffled", probability=0.15, random_part=0.1, leave_unmasked=0.0):
    """The training batch number `step`: see the top. leave_unmasked: the part of masked tokens that stay as they are.

    The patterns of a sentence are drawn independently, as published, so drawing one whenever the sentence comes by is the
    same; in a `shuffled` pass each pair comes once, in an `original` one the patterns of a sentence follow each other.
    """
    numbers = step * batch_size + np.arange(batch_size, dtype=np.int64)
    return mask_rows(corpus, pair_numbers(corpus, seed, numbers, order), [seed, step], probability, random_part, leave_unmasked)


def mask_rows(corpus, chosen, seed, probability=0.15, random_part=0.1, leave_unmasked=0.0):
    """A Batch of the sentences with these numbers; seed: whatever numpy's default_rng takes."""
    rng = np.random.default_rng(seed)
    tokens, lengths = corpus.take(chosen)
    starts = np.cumsum(lengths) - lengths
    row = np.repeat(np.arange(len(lengths)), lengths)  # of each token, (sum of lengths,)
    inner = np.ones(len(tokens), dtype=bool)
    inner[starts] = inner[starts + lengths - 1] = False  # neither start nor end is masked
    masked = np.zeros(len(tokens), dtype=bool)
    empty = np.ones(len(lengths), dtype=bool)
    while empty.any():  # a sentence in which nothing is masked teaches nothing: draw again
        again = empty[row] & inner
        masked[again] = rng.random(again.sum()) < probability
        empty = np.bincount(row[masked], minlength=len(lengths)) == 0
    changed, draw = tokens.copy(), rng.random(len(tokens))
    changed[masked & (draw >= random_part + leave_unmasked)] = corpus.special["mask"]
    at_random = masked & (draw < random_part)
    changed[at_random] = rng.choice(corpus.ordinary, at_random.sum())
    return Batch(changed, np.where(masked, tokens, IGNORE), lengths, starts, int(masked.sum()), corpus.longest)


def evaluation_batches(corpus, batch_size, most_tokens=None, patterns=1):
    """The corpus's sentences in order of length, each in `patterns` fixed ways of masking, every replaced token by the
    mask token; with most_tokens about as many, evenly spread over the corpus."""
    kept = corpus.n
    if most_tokens and most_tokens < len(corpus.tokens) * patterns:
        kept = max(1, int(most_tokens / patterns / corpus.lengths.mean()))
    chosen = np.arange(kept) * corpus.n // kept
    chosen = chosen[np.argsort(corpus.lengths[chosen], kind="stable")]
    for pattern in range(patterns):
        for number, first in enumerate(range(0, kept, batch_size)):
            yield mask_rows(corpus, chosen[first : first + batch_size], [pattern, number], random_part=0.0)


def unigram_loss(train, other):
    """The baseline: masked tokens of `other` predicted by their frequency in `train` (each count plus one), in nats. Every
    token but start and end is masked equally often, so all of them count."""
    ends = [train.special["start"], train.special["end"]]
    counts = [np.bincount(s.tokens, minlength=s.tokenizer.get_vocab_size()) for s in (train, other)]
    for count in counts:
        count[ends] = 0
    frequencies = (counts[0] + 1) / (counts[0] + 1).sum()
    return -float(counts[1] @ np.log(frequencies)) / int(counts[1].sum())
