"""python eval.py perplexity RUN[,RUN...] --data=TEXT: how well trained models predict a text.

A window of the model's context slides over every document, `--stride` tokens at a time: each token is scored once and sees at
least context - stride + 1 tokens before it, or all there are. A document begins with the end-of-text token, as in training, and
never sees another document; that token itself is not scored. Losses are given a token (nats, and their exponential, the
perplexity) and a UTF-8 byte (bits), where runs with different tokenizers compare. Beside them stands the unigram baseline:
every token predicted by its frequency in the text that the run was trained on.

Intervals (95 %) come from drawing whole documents anew; differences between runs from drawing the same documents for both. A
text of fewer than 20 documents is cut into stretches of about 4,096 bytes instead, which are not quite independent.

The folder --out gets perplexity.json (everything), positions.png (the loss by the number of tokens seen) and units.jsonl (the
losses of every document or stretch).
"""

import io
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from data import prepare
from files import write_atomically, write_json
from flags import UserError, require
from intervals import bootstrap, paired_bootstrap
from shards import planned_folder
from sources import HELD_OUT, find_source, is_held_out
from tokens import VOCAB_SIZES, bits_per_byte, load_manifest
from trained import RunFlags, load_trained, provenance, result_folder

MIN_DOCUMENTS, STRETCH = 20, 4096  # fewer documents than that are cut into stretches of so many bytes
LARGE_BYTES = 10_000_000  # of a corpus too large to be read whole
BITS = 1 / math.log(2)  # in a nat


@dataclass
class Perplexity(RunFlags):
    """Loss, perplexity and bits a byte of trained models on a text."""

    data: str = ""
    """a known name, a file, a folder or a glob (empty: what the runs were trained on)"""
    split: Literal["auto", "val", "all"] = "auto"
    """val: what training on this text holds out; all: the whole text (auto: val if a run was trained on it, else all)"""
    stride: int = 0
    """tokens by which the window moves on (0: half the context)"""
    context: int = 0
    """tokens in the window (0: the model's context)"""
    max_bytes: int = 0
    """read about so much text, from the beginning (0: all, but 10 MB of a large corpus)"""
    batch_size: int = 0
    """windows at once (0: what fits well)"""
    cache_dir: str = ""
    """folder for downloads and tokenised text (empty: as in training)"""
    out: str = ""
    """folder for the results (empty: runs/perplexity-<data>-<runs>)"""

    def check(self):
        for name in ("stride", "context", "max_bytes", "batch_size"):
            require(self, name, getattr(self, name) >= 0, "must be at least 0")
        require(self, "stride", not self.context or self.stride <= self.context, f"must be at most --context={self.context}")
        require(self, "out", not os.path.isfile(self.out), "is a file; name a folder")
        super().check()


# ---- The text -------------------------------------------------------------------------------------------------------


def trained_on(run):
    return run.config["flags"]["data"]


def choose_text(flags, runs):
    """(data, split) that the flags mean for these runs. Raises UserError where they leave it open."""
    texts = {trained_on(run) for run in runs}
    if not flags.data and len(texts) > 1:
        raise UserError(f"--data: missing; the runs were trained on different texts ({', '.join(sorted(texts))}), name one")
    data = flags.data or texts.pop()
    if flags.split != "auto":
        return data, flags.split
    seen = any(data == text or Path(data).resolve() == Path(text).resolve() for text in map(trained_on, runs))
    return data, "val" if seen else "all"


def held_out_part(source, cache_dirs):
    """The share of documents held out, the smallest that token files of this source were planned with: what is held out at
    a smaller share is so at a larger one."""
    parts = [0.01 if source.large else HELD_OUT]
    for tokenizer in VOCAB_SIZES:
        for cache_dir in cache_dirs:
            folder = planned_folder(source, tokenizer, cache_dir)
            if (folder / "manifest.json").exists():
                parts.append(load_manifest(folder, ("val",))["held_out"])
    return min(parts)


def read_documents(data, split, cache_dirs, max_bytes):
    """[(id, text)] of a text; the last one is cut where max_bytes is reached. cache_dirs: downloads go to the first, plans of
    token files are looked for in all. Raises UserError."""
    source = find_source(data, cache_dir=cache_dirs[0])
    part = held_out_part(source, cache_dirs) if split == "val" and not source.one_text else None
    room = max_bytes or (LARGE_BYTES if source.large else math.inf)
    chosen = []
    for doc_id, text in source.documents():
        if split == "val" and source.one_text:
            text = text[int(0.9 * len(text)):]  # as data.split_documents cuts it
        elif split == "val" and not is_held_out(doc_id, part):
            continue
        content = text.encode("utf-8")
        if len(content) > room:
            text = content[:room].decode("utf-8", errors="ignore")
        if text:
            chosen.append((doc_id, text))
        room -= len(content)
        if room <= 0:
            break
    if not chosen:
        raise UserError(f"--data={data}: has no text in its split {split}; use --split=all or give more text")
    return chosen


def units_of(texts):
    """(names, n_bytes): the units that a bootstrap draws, one a document, or stretches of few documents. n_bytes: int64 (U,)."""
    sizes = [len(text.encode("utf-8")) for _, text in texts]
    if len(texts) >= MIN_DOCUMENTS:
        return [doc_id for doc_id, _ in texts], np.array(sizes)
    cuts = [(doc_id, start, min(STRETCH, size - start)) for (doc_id, _), size in zip(texts, sizes)
            for start in range(0, size, STRETCH)]
    return [f"{doc_id} from byte {start}" for doc_id, start, _ in cuts], np.array([size for *_, size in cuts])


# ---- Measuring ------------------------------------------------------------------------------------------------------


@dataclass
class Measured:
    """Sums over the tokens of each of U units, and over positions. All arrays float64."""

    context: int
    stride: int
    nats: np.ndarray  # (U,)
    tokens: np.ndarray  # (U,)
    n_bytes: np.ndarray  # (U,)
    unigram: np.ndarray | None  # (U,) nats of the baseline
    edges: list[int]  # of K ranges of positions: range k is edges[k] to edges[k + 1] - 1 tokens seen
    position_nats: np.ndarray  # (U, K) over whole windows from the midst of documents
    position_tokens: np.ndarray  # (U, K)


def position_edges(context):
    """1, 2, 3, 4, 6, 8, 12, 16, ...: ranges of positions, two to an octave."""
    edges = sorted({1, 2, *(2**k for k in range(40)), *(3 * 2**k for k in range(40))})
    return [edge for edge in edges if edge < max(2, context)] + [context + 1]


def window_of(run, flags):
    """(context, stride) for one run. Raises UserError where its model cannot have them."""
    context = flags.context or run.model.config.context
    stride = flags.stride or max(1, context // 2)
    if context > run.model.config.context:
        raise UserError(f"--context={context}: {run.name} sees {run.model.config.context} tokens at most; choose fewer")
    if stride > context:
        raise UserError(f"--stride={stride}: is more than the context of {run.name}, {context}; some tokens would be skipped")
    return context, stride


def measure(run, texts, flags, unigram_nats):
    """A Measured of one run. texts: [(id, text)]; unigram_nats: (V,) of its baseline or None. Raises UserError."""
    from scoring import score_windows, windows

    context, stride = window_of(run, flags)
    # Each document's ids with eot before them, and for each id of the text the unit in which it begins.
    sequences, unit_of, first = [], [], 0
    for _, text in texts:
        ids = run.tokenizer.document(text, end=False).astype(np.int64)
        begins = np.cumsum(run.tokenizer.byte_lengths[ids]) - run.tokenizer.byte_lengths[ids]
        unit = begins // STRETCH if len(texts) < MIN_DOCUMENTS else np.zeros_like(begins)
        sequences.append(np.concatenate([[run.tokenizer.eot], ids]))
        unit_of.append(first + unit)
        first = unit_of[-1][-1] + 1
    edges = position_edges(context)
    range_of = np.searchsorted(edges, np.arange(1, context + 1), side="right") - 1  # (context,) the range of each position
    nats = [np.zeros(len(ids) - 1) for ids in sequences]
    position_nats, position_tokens = np.zeros((first, len(edges) - 1)), np.zeros((first, len(edges) - 1))
    todo = [window for number, ids in enumerate(sequences) for window in windows(number, len(ids) - 1, context, stride)]
    for window, losses, _ in score_windows(run, sequences, todo, flags.batch_size, run.name):
        number, start, stop, scored = window
        nats[number][scored - 1 : stop] = losses[scored - start - 1:]
        # Whole windows from the midst of a document count, with all their positions: so every position is measured on nearly
        # the same text. First and last windows would set beginnings against ends.
        if stop - start == context and 0 < start and stop < len(nats[number]):
            unit = unit_of[number][start]
            position_nats[unit] += np.bincount(range_of, losses)
            position_tokens[unit] += np.bincount(range_of)
    units, ids = np.concatenate(unit_of), np.concatenate([ids[1:] for ids in sequences])  # (tokens,) each
    return Measured(context, stride, np.bincount(units, np.concatenate(nats)), np.bincount(units).astype(float),
                    np.bincount(units, run.tokenizer.byte_lengths[ids]),
                    None if unigram_nats is None else np.bincount(units, unigram_nats[ids]), edges, position_nats,
                    position_tokens)


def unigram_of(run, cache_dir):
    """(nats (V,), None): the baseline of a run's training text; (None, reason) where that text is not at hand."""
    try:
        return prepare(trained_on(run), run.tokenizer.name, cache_dir, timeout=0).unigram_nats(), None
    except UserError as error:
        return None, " ".join(str(error).split())


# ---- Reporting ------------------------------------------------------------------------------------------------------


def scaled(interval, factor):
    return {key: value if key == "n" or value is None else value * factor for key, value in interval.items()}


def summarise(measured):
    """The numbers of one run, for JSON: loss in nats a token, perplexity, bits a byte, each with its interval."""
    loss = bootstrap(measured.nats, measured.tokens)
    result = dict(
        context=measured.context, stride=measured.stride, tokens=int(measured.tokens.sum()), loss=loss,
        perplexity={key: value if key == "n" or value is None else math.exp(min(value, 700)) for key, value in loss.items()},
        bits_per_byte=scaled(bootstrap(measured.nats, measured.n_bytes), BITS), unigram=None)
    if measured.unigram is not None:
        nats = float(measured.unigram.sum())
        result["unigram"] = dict(loss=nats / measured.tokens.sum(), bits_per_byte=bits_per_byte(nats, measured.n_bytes.sum()))
    has = measured.position_tokens.sum(1) > 0  # units in which such a window begins
    result["positions"] = [
        dict(seen_from=first, seen_to=beyond - 1, **bootstrap(measured.position_nats[has, k], measured.position_tokens[has, k]))
        for k, (first, beyond) in enumerate(zip(measured.edges, measured.edges[1:]))] if has.any() else None
    return result


def difference(name, measured, reference_name, reference, same_tokens):
    """`name` minus the reference on the same units: bits a byte, and nats a token where tokens are the same."""
    result = dict(run=name, minus=reference_name, bits_per_byte=scaled(
        paired_bootstrap(measured.nats, reference.nats, measured.n_bytes, reference.n_bytes), BITS), loss=None)
    if same_tokens:
        result["loss"] = paired_bootstrap(measured.nats, reference.nats, measured.tokens, reference.tokens)
    return result


def with_interval(interval, digits=3, sign=""):
    mean, low, high = (interval[key] for key in ("mean", "low", "high"))
    end = "" if low is None else f" [{low:{sign},.{digits}f}, {high:{sign},.{digits}f}]"
    return f"{mean:{sign},.{digits}f}{end}"


def describe(name, result, why_no_unigram):
    """One line about a run."""
    line = (f"{name}: {with_interval(result['loss'])} nats a token, perplexity {with_interval(result['perplexity'], 1)}, "
            f"{with_interval(result['bits_per_byte'])} bits a byte")
    if result["unigram"] is None:
        return f"{line}; no unigram baseline ({why_no_unigram})"
    return f"{line}; unigram baseline {result['unigram']['loss']:.3f} nats, {result['unigram']['bits_per_byte']:.3f} bits"


def plot_positions(path, results):
    """The loss by the number of tokens seen, one curve a run, its intervals shaded."""
    import matplotlib
    matplotlib.use("Agg")  # no screen needed
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, result in results.items():
        points = result["positions"] or []
        x = [math.sqrt(point["seen_from"] * point["seen_to"]) for point in points]
        line, = axes.plot(x, [point["mean"] for point in points], marker="o", ms=3, label=name)
        if points and points[0]["low"] is not None:
            low, high = ([point[end] for point in points] for end in ("low", "high"))
            axes.fill_between(x, low, high, alpha=0.2, color=line.get_color())
    axes.set(xlabel="tokens seen", ylabel="loss (nats a token)", xscale="log")
    axes.legend()
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, format="png")
    plt.close(figure)
    write_atomically(path, buffer.getvalue())


def main(flags):
    runs = load_trained(flags)
    for run in runs:
        window_of(run, flags)  # refuses now, not after the runs before it have been measured
    data, split = choose_text(flags, runs)
    cache_dirs = [flags.cache_dir] if flags.cache_dir else sorted({run.config["flags"]["cache_dir"] for run in runs})
    texts = read_documents(data, split, cache_dirs, flags.max_bytes)
    names, n_bytes = units_of(texts)
    kind = "documents" if len(texts) >= MIN_DOCUMENTS else f"stretches of about {STRETCH:,} bytes"
    print(f"{data} ({split}): {n_bytes.sum():,} bytes; documents: {len(texts):,}; intervals over {len(names):,} {kind}")
    baselines, measured, results = {}, {}, {}
    for run in runs:
        key = trained_on(run), run.tokenizer.name
        if key not in baselines:
            baselines[key] = unigram_of(run, flags.cache_dir or run.config["flags"]["cache_dir"])
        unigram_nats, why_not = baselines[key]
        measured[run.name] = measure(run, texts, flags, unigram_nats)
        results[run.name] = {**run.about(), **summarise(measured[run.name])}
        print(describe(run.name, results[run.name], why_not))
    differences = [difference(run.name, measured[run.name], runs[0].name, measured[runs[0].name],
                              run.tokenizer.name == runs[0].tokenizer.name) for run in runs[1:]]
    for pair in differences:
        print(f"{pair['run']} minus {pair['minus']}, paired: {with_interval(pair['bits_per_byte'], 4, '+')} bits a byte"
              + ("" if pair["loss"] is None else f", {with_interval(pair['loss'], 4, '+')} nats a token"))
    folder = result_folder(flags, "perplexity", Path(data).name, *(run.folder.resolve().name for run in runs))
    lines = [dict(unit=name, bytes=int(size), runs={run: dict(tokens=int(m.tokens[i]), nats=float(m.nats[i]))
                                                    for run, m in measured.items()})
             for i, (name, size) in enumerate(zip(names, n_bytes))]
    write_atomically(folder / "units.jsonl", "".join(json.dumps(line) + "\n" for line in lines).encode("utf-8"))
    if any(result["positions"] for result in results.values()):
        plot_positions(folder / "positions.png", results)
    else:
        print("no loss by position: no document is long enough for whole windows in its midst")
    write_json(folder / "perplexity.json", dict(
        data=data, split=split, documents=len(texts), bytes=int(n_bytes.sum()), units=kind, n_units=len(names), runs=results,
        differences=differences, **provenance(flags, runs[0].device)))
    print(f"everything is in {folder}")
