"""Train a masked language model on child-directed speech, BabyBERTa, with any attention scorer.

    python train_babyberta.py --scorer=ssa --data=sentences.txt       one sentence a line; some minutes on two CPU cores
    python train_babyberta.py --scorer=softmax --data=sentences.txt --tokenizer=tokenizer.json
    python train_babyberta.py --preset=paper --scorer=ssa             the published recipe and corpus: a GPU, or days

The run folder (runs/train_babyberta-<preset>-<scorer>-s<seed>) gets what train_gpt.py's does, and tokenizer.json instead of a
sample. Then `python eval.py zorro RUN` asks it for grammar. Ctrl-C saves and prints the command that continues.

Published (Huebner, Sulem, Fisher, Roth 2021, and its code): 8 layers, 8 heads, width 256, dropout 0.1, batch 16, Adam 1e-4,
24,000 steps of warm-up, linear decay over one pass of all (sentence, pattern) pairs, results at step 260,000. Ours: AdamW
with bias correction, one sentence in a hundred held out to measure the loss, sentences packed into rows (mlm_data.py).
"""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from config import MODEL_PRESETS, ModelConfig
from flags import TextFlags, UserError, fail, parse, require


@dataclass
class Flags(TextFlags):
    """Train a masked language model on child-directed speech with any attention scorer."""

    typical_length: ClassVar[int] = 12

    ood: str = "none"
    """out-of-distribution sentences: a path, or none"""
    tokenizer: str = ""
    """a tokenizer.json of the library `tokenizers` (if empty: that of --init-from or --import-hf, or trained on the sentences)"""
    vocab_size: int = 8192
    """entries of a tokenizer that is trained here"""
    n_layer: int = 0
    """layers"""
    n_head: int = 0
    """attention heads"""
    n_embd: int = 0
    """width; the feed-forward layer is four times as wide"""
    context: int = 0
    """most tokens of a sentence; longer ones are dropped"""
    order: Literal["shuffled", "original"] = "shuffled"
    """of the (sentence, pattern) pairs in a pass"""
    leave_unmasked: float = 0.0
    """part of the masked tokens that stay as they are, yet must be predicted"""
    decay: Literal["steps", "pass"] = "steps"
    """where the learning rate's line reaches --min-lr: at --steps, or after one pass over all pairs"""
    import_hf: str = ""
    """start from the weights of this Hugging Face folder (RobertaForMaskedLM)"""
    export_hf: str = ""
    """write the trained model to this folder as RobertaForMaskedLM (with --resume also of a run that is done)"""

    def check(self):
        super().check()
        require(self, "data", self.data, "name sentences: aochildes, or paths with one sentence a line, comma-separated")
        require(self, "context", self.context >= 4, "must be at least 4")
        require(self, "vocab_size", 300 <= self.vocab_size <= 2**16, "must be between 300 and 65536")
        require(self, "leave_unmasked", 0 <= self.leave_unmasked <= 0.9, "must be between 0 and 0.9")
        require(self, "import_hf", not (self.import_hf and self.init_from), "contradicts --init-from; give one of them")
        require(self, "import_hf", self.resume or not self.import_hf or Path(self.import_hf).is_dir(),
                "no such folder; name the folder of a RobertaForMaskedLM")
        require(self, "export_hf", not self.export_hf or self.scorer == "softmax",
                f"RobertaForMaskedLM computes softmax, not {self.scorer}; leave it out, or train --scorer=softmax")
        if self.export_hf:
            self.check_export(Path(self.export_hf))
        require(self, "vocab_size", not self.tokenizer or self.vocab_size == type(self).vocab_size,
                "comes with --tokenizer; leave one of them out")
        try:
            self.model_config(vocab_size=64)
        except ValueError as error:
            raise UserError("--" + str(error).replace("_", "-", 2)) from None

    def check_export(self, folder):
        """The folder is written last: so what would be in its way is told first."""
        require(self, "export_hf", not folder.is_file(), "is a file; choose another folder")
        require(self, "export_hf", folder.resolve() != Path(self.out).resolve(), "is the run's own folder; choose another")
        require(self, "export_hf", self.resume or not any(folder.glob("*")), "is not empty; choose another folder")
        parent = next(parent for parent in folder.resolve().parents if parent.exists())
        require(self, "export_hf", os.access(parent, os.W_OK), f"{parent} cannot be written; choose another folder")

    def model_config(self, vocab_size):
        shape = dict(MODEL_PRESETS["babyberta"])
        shape.update(n_layer=self.n_layer, n_head=self.n_head, n_kv_head=self.n_head, n_embd=self.n_embd,
                     n_ff=4 * self.n_embd, context=self.context)
        return ModelConfig(**shape, vocab_size=vocab_size, dropout=self.dropout, scorer=self.scorer,
                           scorer_options=self.scorer_options(), path=self.path)


# Batches have a shape of their own each, which torch.compile would compile anew.
COMMON = dict(context=128, weight_decay=0.0, min_lr=0.0, compile="off")
PRESETS = {
    # Ours: found by trying, for ten minutes on a CPU core; half of BabyBERTa's layers and width, head width as published.
    "laptop": COMMON | dict(n_layer=4, n_head=4, n_embd=128, steps=6000, batch_size=64, lr=2e-3, warmup=600, beta2=0.98,
                            save_every=500, eval_every=1000, eval_tokens=20000),
    "paper": COMMON | dict(data="aochildes", n_layer=8, n_head=8, n_embd=256, dropout=0.1, steps=260_000, decay="pass",
                           batch_size=16, lr=1e-4, warmup=24_000, beta2=0.999, save_every=2000, eval_every=20_000),
}


if __name__ == "__main__":  # a wrong flag is answered here, before the seconds that importing torch takes
    signal.signal(signal.SIGINT, lambda *_: fail("interrupted before training began; nothing was saved", code=130))
    flags, saved = parse(Flags, PRESETS, default_preset="laptop")

import math
import time
from itertools import islice

import torch

import babyberta_hf
import mlm_data
import run
from distributed import Processes, errors_in_one_line
from files import file_sha256, sha256, write_atomically, write_json
from metrics import median_speed, plot_loss, read_metrics
from model import Transformer
from training import Training


def main(flags, saved):
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    processes = Processes(flags.device)  # one, unless torchrun has started more
    print(f"preset {flags.preset} on {flags.data} with scorer {flags.scorer} -> {flags.out}")
    run.keep_freed_memory()
    if flags.threads:
        mlm_data.set_threads(flags.threads)
    with processes.one_at_a_time(flags.cache_dir):
        corpora, tokenizer = prepare(flags, saved)
    train, text = corpora["train"], tokenizer.to_str()
    unigram_loss = mlm_data.unigram_loss(train, corpora["val"])
    config = flags.model_config(tokenizer.get_vocab_size())

    def make_model():
        model = Transformer(config)
        if flags.import_hf and not list(Path(flags.out).glob("resume-*.pt")):
            babyberta_hf.load(model, flags.import_hf)
        return model

    n_pass = train.n * mlm_data.PATTERNS // flags.batch_size
    digest = " ".join([*(corpus.digest for corpus in corpora.values()), "tokenizer", sha256(text.encode("utf-8"))])
    training = Training(flags, saved, processes, make_model, digest,
                        schedule=lambda step, flags: learning_rate(step, flags, n_pass))
    model, decisions, metrics, device = training.model, training.decisions, training.metrics, training.device
    if processes.first:
        write_atomically(training.folder / "tokenizer.json", text.encode("utf-8"))
    print(f"parameters: {model.n_parameters():,}; a pass over all (sentence, pattern) pairs: {n_pass:,} steps")

    while training.goes_on():
        training.begin_step()
        batch = mlm_data.masked_batch(train, flags.seed, training.step, flags.batch_size, flags.order,
                                      leave_unmasked=flags.leave_unmasked)
        loss = 0.0
        for rows in training.micro_batches():
            x, y, segments = (t.to(device) for t in batch.packed(rows, train.special["pad"]))  # (R, T) each
            with run.autocast(decisions):
                _, part = training.forward(x, y, segments=segments, at_targets=True)
            # The part's mean becomes its share of the mean over all masked tokens of the batch, on all processes. (Those are
            # averaged, hence the last factor.)
            part = part * (y != mlm_data.IGNORE).sum() / batch.n_masked * processes.count
            part.backward()
            loss += part.detach()
        loss, grad_norm = training.end_step(loss)

        tokens_per_s = len(batch.inputs) / (time.perf_counter() - training.step_start)
        metrics.write(step=training.step, loss=loss, lr=training.lr, grad_norm=grad_norm, tokens_per_s=round(tokens_per_s, 1))
        training.bar.set_postfix(loss=f"{loss:.3f}", tok_s=f"{tokens_per_s:,.0f}", refresh=False)
        if training.due(flags.eval_every):
            result = {}
            for split in list(corpora)[1:]:  # val, and ood if there is one
                most = None if training.step == flags.steps else flags.eval_tokens or None
                result |= evaluate(training.eval_model, corpora[split], split, decisions, most, processes)
            metrics.write(step=training.step, **result, unigram_loss=unigram_loss, **run.scorer_values(model))
            training.bar.write(report(training.step, flags, result, unigram_loss), file=sys.stdout)
        if training.due(flags.save_every) or training.stop:
            training.save()

    if training.end():
        finish(training)


def prepare(flags, saved):
    """({"train": Sentences, "val": ..., perhaps "ood": ...}, the tokenizer)."""
    sentences = [text for path in mlm_data.paths(flags.data, flags.cache_dir) for text in mlm_data.read_sentences(path)]
    own = Path(flags.out) / "tokenizer.json"
    if saved and own.exists():
        if file_sha256(own) != str(saved.get("data")).split()[-1]:
            raise UserError(f"{own}: damaged, it is not the tokenizer that this run began with; restore it, or start anew with "
                            "--overwrite")
        tokenizer = mlm_data.read_tokenizer(own)
    else:
        tokenizer = choose_tokenizer(flags, sentences)
    train, val = mlm_data.split_held_out(sentences)
    texts = {"train": (train, f"--data={flags.data}"), "val": (val, f"--data={flags.data} (its held-out part)")}
    if flags.ood != "none":
        texts["ood"] = mlm_data.read_sentences(flags.ood), f"--ood={flags.ood}"
    corpora = {split: mlm_data.Sentences(lines, tokenizer, flags.context, name) for split, (lines, name) in texts.items()}
    for split, corpus in corpora.items():
        print(f"{split}: {corpus.n:,} sentences, {len(corpus.tokens):,} tokens; dropped: {corpus.too_short:,} under "
              f"{mlm_data.MIN_WORDS} words, {corpus.too_long:,} over {flags.context} tokens")
    return corpora, tokenizer


def choose_tokenizer(flags, sentences):
    """Of a new run. Weights that are there already belong to the entries of one tokenizer, and to no other's."""
    weights = flags.init_from or flags.import_hf
    given = mlm_data.read_tokenizer(flags.tokenizer) if flags.tokenizer else None
    if not weights:
        return given or mlm_data.train_tokenizer(sentences, flags.vocab_size)
    theirs = Path(weights) / "tokenizer.json"
    if not theirs.exists():
        require(flags, "tokenizer", given, f"{weights} has no tokenizer.json; name the tokenizer that its weights belong to")
        return given
    tokenizer = mlm_data.read_tokenizer(theirs)
    if given and given.to_str() != tokenizer.to_str():
        raise UserError(f"--tokenizer={flags.tokenizer}: is not {theirs}, which the weights belong to; leave it out")
    print(f"note: tokenizer of {weights}, {tokenizer.get_vocab_size():,} entries")
    return tokenizer


def learning_rate(step, flags, n_pass):
    """Of the step-th update, counted from 0: a line up to lr over `warmup` updates, then one down to min_lr."""
    if step < flags.warmup:
        return flags.lr * (step + 1) / flags.warmup
    end = flags.steps if flags.decay == "steps" else n_pass
    left = max(0.0, (end - step) / max(1, end - flags.warmup))
    return flags.min_lr + (flags.lr - flags.min_lr) * left


@torch.no_grad()
def evaluate(model, corpus, split, decisions, most_tokens, processes):
    """Mean cross-entropy of masked tokens in nats, the same masks each time. The processes share the batches, in turn."""
    model.eval()
    nats, n_masked = 0.0, 0
    batches = mlm_data.evaluation_batches(corpus, 256, most_tokens)
    for batch in islice(batches, processes.number, None, processes.count):
        x, y, segments = (t.to(decisions["device"]) for t in batch.packed(range(len(batch.lengths)), corpus.special["pad"]))
        with run.autocast(decisions):
            _, loss = model(x, y, segments=segments, at_targets=True)
        nats, n_masked = nats + loss.item() * batch.n_masked, n_masked + batch.n_masked
    model.train()
    nats, n_masked = processes.sum(nats, n_masked)
    return {f"{split}_loss": nats / n_masked, f"{split}_ppl": math.exp(min(nats / n_masked, 700))}


def report(step, flags, result, unigram_loss):
    """One line about an evaluation."""
    parts = [f"{split} {result[f'{split}_loss']:.3f} nats a masked token (perplexity {result[f'{split}_ppl']:,.1f})"
             for split in ("val", "ood") if f"{split}_loss" in result]
    return f"step {step}/{flags.steps}: {'; '.join(parts)} (unigram on val {unigram_loss:.3f})"


def finish(training):
    """Loss curve, summary and export of a run that has reached its last step."""
    folder, flags, model, decisions = training.folder, training.flags, training.model, training.decisions
    last = training.metrics.last_evaluation("val_loss", "unigram_loss")
    plot_loss(folder, baseline=last["unigram_loss"])
    summary = dict(
        preset=flags.preset, scorer=flags.scorer, seed=flags.seed, path=decisions["path"], steps=flags.steps,
        val_loss=last["val_loss"], ood_loss=last.get("ood_loss"), unigram_loss=last["unigram_loss"],
        tokens_per_s=median_speed(read_metrics(folder / "metrics.jsonl")), parameters=model.n_parameters(),
        seconds=round(training.seconds, 1), threads=decisions["threads"], machine=run.machine(decisions["device"]),
        date=time.strftime("%Y-%m-%d"), **training.scorer_changes())
    write_json(folder / "summary.json", summary)
    if flags.export_hf:
        try:
            babyberta_hf.save(model, folder / "tokenizer.json", flags.export_hf)
        except UserError as error:
            raise UserError(f"--export-hf={flags.export_hf}: {error}; the run is whole, --resume --export-hf=FOLDER writes it") from None
    print(f"val {summary['val_loss']:.3f} nats a masked token, unigram baseline {summary['unigram_loss']:.3f}; "
          f"{summary['seconds']:.0f} s; everything is in {folder}")


if __name__ == "__main__":
    with errors_in_one_line():
        main(flags, saved)
