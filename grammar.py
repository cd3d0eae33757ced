"""python eval.py zorro|blimp RUN[,RUN...]: does a masked language model prefer the grammatical sentence of a pair?

A suite has paradigms, such as agreement_subject_verb-across_relative_clause, and each of them pairs of sentences that differ in
grammar alone. A pair is right where the grammatical sentence is the likelier one (mlm_score.py). Where a model finds both
alike, within rounding, the pair is wrong and counted as a tie: a model that knows nothing must not look perfect.

Beside the runs stand chance, 50 %, and a trigram model with add-k smoothing of the sentences that the first run was trained on.
Intervals (95 %) come from drawing pairs anew; differences between runs from drawing the same pairs for both.

The folder --out gets <suite>.json, with every pair's outcome, and <suite>.png.
"""

import itertools
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

import mlm_data
from files import read_json, sha256, write_json
from flags import UserError, require
from sources import decode_utf8
from trained import RunFlags, provenance, result_folder, run_names, training_of

TIE = 1e-5  # nats: scores nearer than this differ by rounding alone
TRIGRAM = "trigram"


@dataclass
class Zorro(RunFlags):
    """Grammar probes in the style of child-directed speech: 23 paradigms of 2,000 pairs."""

    suite: ClassVar[str] = "zorro"

    sentences: str = ""
    """folder of the suite's files (downloaded if empty)"""
    scoring: Literal["holistic", "mlm", "both"] = "holistic"
    """holistic: cross-entropy of the sentence as it is; mlm: every token masked in turn, some ten times slower"""
    limit: int = 0
    """pairs of each paradigm (0: all)"""
    corpus: str = ""
    """sentences for the trigram baseline, paths with commas between them (empty: the first run's --data), or none"""
    add_k: float = 0.1
    """what the trigram baseline adds to every count"""
    cache_dir: str = "data"
    """folder for downloads"""
    out: str = ""
    """folder for the results (empty: runs/<suite>-<runs>)"""

    def check(self):
        require(self, "limit", self.limit >= 0, "must be at least 0")
        require(self, "add_k", 0 < self.add_k <= 1000, "must be above 0 and at most 1000")
        require(self, "out", not os.path.isfile(self.out), "is a file; name a folder")
        super().check()


@dataclass
class Blimp(Zorro):
    """BLiMP: 67 paradigms of 1,000 pairs, adults' English; JSON lines with sentence_good and sentence_bad."""

    suite: ClassVar[str] = "blimp"

    def check(self):
        super().check()
        require(self, "sentences", self.sentences, "missing; name a folder of BLiMP's .jsonl files (github.com/alexwarstadt/blimp)")


# ---- The suites -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Paradigm:
    name: str
    phenomenon: str
    bad: list[str]
    good: list[str]


def read_suite(flags):
    """The paradigms of a suite, sorted by name. Raises UserError."""
    ending, read = {"zorro": (".txt", read_zorro), "blimp": (".jsonl", read_blimp)}[flags.suite]
    if flags.sentences:
        where = Path(flags.sentences)
        paths = [where] if where.is_file() else sorted(where.glob(f"*{ending}"))
    else:
        paths = sorted(mlm_data.paths("zorro", flags.cache_dir))
    if not paths:
        raise UserError(f"--sentences={flags.sentences}: no {ending} files there; name the folder of the suite")
    try:
        paradigms = [read(path) for path in paths]
    except OSError as error:
        raise UserError(f"--sentences={flags.sentences}: cannot be read ({error.strerror}); check it") from None
    most, names = flags.limit or None, {}
    for path, paradigm in zip(paths, paradigms):
        other = names.setdefault(paradigm.name, path)
        if other != path:
            raise UserError(f"{path}: has the paradigm {paradigm.name} of {other}; remove one of them")
    return [Paradigm(p.name, p.phenomenon, p.bad[:most], p.good[:most]) for p in paradigms]


def read_zorro(path):
    """Odd lines are ungrammatical, the next one is the partner. The name says phenomenon-paradigm."""
    lines = decode_utf8(path.read_bytes(), str(path)).split("\n")
    lines = [line.strip() for line in (lines[:-1] if lines[-1] == "" else lines)]
    if not lines or len(lines) % 2:
        raise UserError(f"{path}: has {len(lines)} lines, an odd number or none; every ungrammatical line needs its grammatical "
                        "partner on the next")
    for number, line in enumerate(lines, 1):
        if not line:
            raise UserError(f"{path} line {number}: is empty; pairs would shift, so correct the file")
    return Paradigm(path.stem, path.stem.rsplit("-", 1)[0], lines[::2], lines[1::2])


def read_blimp(path):
    """A JSON object a line: sentence_good, sentence_bad; linguistics_term is the phenomenon, UID the paradigm."""
    bad, good, record = [], [], {}
    for number, line in enumerate(decode_utf8(path.read_bytes(), str(path)).splitlines(), 1):
        try:
            record = json.loads(line)
            sentences = [record[name].strip() for name in ("sentence_bad", "sentence_good")]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f"{path} line {number}: is not a JSON object with the texts sentence_good and sentence_bad; correct "
                            "it") from None
        bad.append(sentences[0]), good.append(sentences[1])
    if not good:
        raise UserError(f"{path}: has no pair; correct or remove it")
    return Paradigm(str(record.get("UID", path.stem)), str(record.get("linguistics_term", path.stem)), bad, good)


# ---- Scores ---------------------------------------------------------------------------------------------------------


def outcomes(score, paradigms):
    """{paradigm's name: (right, tie)}, boolean (pairs,) each; score: sentences, where -> a number each, lower is likelier."""
    found = {}
    for paradigm in paradigms:
        bad, good = np.split(score([*paradigm.bad, *paradigm.good], paradigm.name), 2)
        tie = np.abs(bad - good) <= TIE
        found[paradigm.name] = (good < bad) & ~tie, tie
    return found


def score_runs(flags, paradigms):
    """{(run's name, scoring): outcomes}, what the results say of each run, and the device."""
    import torch
    from tqdm import tqdm

    import mlm_score
    from run import keep_freed_memory, pick_device
    keep_freed_memory()
    device, _ = pick_device(flags.device)
    if flags.threads:
        torch.set_num_threads(flags.threads)
    methods = {"holistic": mlm_score.holistic, "mlm": mlm_score.pseudo_log_likelihood}
    chosen = list(methods) if flags.scoring == "both" else [flags.scoring]
    found, about = {}, {}
    for name, folder in zip(run_names(flags.folders()), flags.folders()):
        model, tokenizer, config = mlm_score.load(folder, device)
        about[name] = dict(scorer=model.config.scorer, parameters=model.n_parameters(), **training_of(config, name))
        for method in chosen:
            n = 2 * sum(len(p.good) for p in paradigms)
            with tqdm(total=n, desc=f"{name} {method}", unit="sentence", dynamic_ncols=True, disable=None) as bar:
                def score(sentences, where):
                    ids = mlm_score.encode(tokenizer, sentences, model.config.context, where)
                    with torch.autocast(device, torch.bfloat16, enabled=flags.dtype == "bfloat16"):
                        return methods[method](model, tokenizer, ids, bar.update)
                found[name, method] = outcomes(score, paradigms)
    return found, about, device


class Trigram:
    """p(c | a b) = (count(a b c) + k) / (count(a b) + k V) over tokens; a sentence begins after two start tokens."""

    def __init__(self, sentences, k):
        self.k, self.v = k, sentences.tokenizer.get_vocab_size()
        self.tokenizer, self.start = sentences.tokenizer, sentences.special["start"]
        contexts, wholes = self._windows(sentences.tokens, sentences.starts)
        (self.contexts, self.context_counts), (self.wholes, self.whole_counts) = (
            np.unique(codes, return_counts=True) for codes in (contexts, wholes))

    def _windows(self, tokens, starts):
        """The pair before every token, and the three with it, a number each, of sentences end to end; starts left out."""
        before = np.concatenate([[self.start] * 2, tokens])
        second = before[1:-1]
        first = before[:-2].copy()
        first[starts + 1] = self.start  # the token after the start has the start twice before it
        kept = np.ones(len(tokens), dtype=bool)
        kept[starts] = False
        context = (first * self.v + second)[kept]
        return context, context * self.v + tokens[kept]

    def score(self, sentences, where):
        """Mean cross-entropy in nats of each sentence's tokens, the end included."""
        ids = [np.array(encoding.ids, dtype=np.int64) for encoding in self.tokenizer.encode_batch_fast(sentences)]
        lengths = np.array([len(one) for one in ids])
        contexts, wholes = self._windows(np.concatenate(ids), np.cumsum(lengths) - lengths)
        p = (self._count(wholes, self.wholes, self.whole_counts) + self.k) / (
            self._count(contexts, self.contexts, self.context_counts) + self.k * self.v)
        ends = np.cumsum(lengths - 1)
        return np.add.reduceat(-np.log(p), ends - (lengths - 1)) / (lengths - 1)

    @staticmethod
    def _count(codes, known, counts):
        places = np.searchsorted(known, codes).clip(max=len(known) - 1)
        return np.where(known[places] == codes, counts[places], 0)


def trigram_outcomes(flags, paradigms):
    """{(TRIGRAM, "counts"): outcomes} for the corpus and tokenizer of the first run, {} for --corpus=none."""
    if flags.corpus == "none":
        return {}
    folder = flags.folders()[0]
    data = flags.corpus or read_json(folder / "config.json", "name a run folder")["flags"]["data"]
    require(flags, "corpus", data, f"{folder} does not say what it was trained on; name sentences for the trigram, or none")
    try:
        texts = [text for path in mlm_data.paths(data, flags.cache_dir) for text in mlm_data.read_sentences(path)]
    except UserError as error:
        raise UserError(f"{error} (the trigram baseline's corpus: --corpus=PATH names it, --corpus=none does without)") from None
    tokenizer = mlm_data.read_tokenizer(folder / "tokenizer.json")
    train, _ = mlm_data.split_held_out(texts)  # what the run has seen
    corpus = mlm_data.Sentences(train, tokenizer, longest=128, name="--corpus")
    return {(TRIGRAM, "counts"): outcomes(Trigram(corpus, flags.add_k).score, paradigms)}


# ---- The report -----------------------------------------------------------------------------------------------------


def groups(paradigms):
    """{"overall": names, "phenomena": {phenomenon: names}, "paradigms": {name: [name]}}."""
    phenomena = {}
    for paradigm in paradigms:
        phenomena.setdefault(paradigm.phenomenon, []).append(paradigm.name)
    names = [paradigm.name for paradigm in paradigms]
    return {"overall": names, "phenomena": phenomena, "paradigms": {name: [name] for name in names}}


def by_group(paradigms, measure):
    """The same with measure(names) in place of the names."""
    return {key: {name: measure(part) for name, part in value.items()} if isinstance(value, dict) else measure(value)
            for key, value in groups(paradigms).items()}


def interval(values, n_resamples=10_000, level=0.95):
    """Mean and percentile interval of numbers that are -1, 0 or 1, one a pair, when the pairs are drawn anew.

    How often each of the three is drawn is multinomial, so 46,000 pairs need three numbers a drawing, not 46,000. (That is the
    same distribution as intervals.bootstrap draws from, in a thousandth of its time; there is one interval a paradigm and run.)
    """
    kinds, counts = np.array([-1, 0, 1]), np.bincount(np.asarray(values, dtype=np.int64) + 1, minlength=3)
    n = int(counts.sum())
    drawn = np.random.default_rng(0).multinomial(n, counts / n, size=n_resamples) @ kinds / n
    low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    return dict(mean=float(counts @ kinds / n), low=float(low), high=float(high), n=n)


def joined(found, names, which=0):
    return np.concatenate([found[name][which] for name in names])


def result(paradigms, found, about, flags, device):
    """The whole result as a dict for JSON."""
    scored = []
    for (name, method), outcome in found.items():
        scored.append(dict(
            run=name, scoring=method, ties=int(joined(outcome, groups(paradigms)["overall"], 1).sum()),
            **by_group(paradigms, lambda names: interval(joined(outcome, names))),
            outcomes={p: np.packbits(right).tobytes().hex() for p, (right, _) in outcome.items()}))
    differences = []
    for (a, b) in itertools.combinations(found, 2):
        if a[1] == b[1] or TRIGRAM in (a[0], b[0]):
            both = by_group(paradigms, lambda names: interval(
                joined(found[a], names).astype(np.int64) - joined(found[b], names)))
            differences.append(dict(run=a[0], minus=b[0], scoring=a[1], **{k: both[k] for k in ("overall", "phenomena")}))
    text = "".join(s + "\n" for p in paradigms for pair in zip(p.bad, p.good) for s in pair)
    return dict(suite=flags.suite, pairs=sum(len(p.good) for p in paradigms), sentences_sha256=sha256(text.encode("utf-8")),
                chance=0.5, runs=about, results=scored, differences=differences, **provenance(flags, device))


def show(values):
    """The table: a line a paradigm and phenomenon with several, a column a run."""
    columns = values["results"]
    for number, column in enumerate(columns, 1):
        print(f"[{number}] {column['run']} ({column['scoring']}), ties {column['ties']}")
    width = max(len(name) for key in ("phenomena", "paradigms") for name in columns[0][key]) + 2
    print("accuracy in %".ljust(width) + "".join(f"{f'[{i}]':>8}" for i in range(1, len(columns) + 1)) + f"{'chance':>8}")
    for key in ("paradigms", "phenomena"):
        for name in columns[0][key]:
            print(name.ljust(width) + "".join(f"{100 * c[key][name]['mean']:8.1f}" for c in columns) + f"{50:8.1f}")
        print()
    for column in columns:
        print(f"overall {column['run']} ({column['scoring']}): {percent(column['overall'])}")
    for difference in values["differences"]:
        print(f"{difference['run']} - {difference['minus']} ({difference['scoring']}): {percent(difference['overall'])}")


def percent(interval):
    """62.1 % (61.6 to 62.5)"""
    return f"{100 * interval['mean']:.1f} % ({100 * interval['low']:.1f} to {100 * interval['high']:.1f})"


def main(flags):
    """Score, print, write. Raises UserError."""
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    if flags.threads:
        mlm_data.set_threads(flags.threads)
    paradigms = read_suite(flags)
    found, about, device = score_runs(flags, paradigms)
    found |= trigram_outcomes(flags, paradigms)
    values = result(paradigms, found, about, flags, device)
    show(values)
    folder = result_folder(flags, flags.suite, *about)
    write_json(folder / f"{flags.suite}.json", values)
    from grammar_plot import bar_chart
    bar_chart(folder / f"{flags.suite}.png", values)
    print(f"written: {folder / flags.suite}.json and .png")
