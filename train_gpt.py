"""Train a decoder-only language model with any attention scorer.

    python train_gpt.py --scorer=ssa                                    a minute and a half on two CPU cores, no download
    python train_gpt.py --scorer=softmax --data=my_text.txt --steps=500
    python train_gpt.py --preset=nemotron-114m --data=corpus/ --scorer=ssa
    python train_gpt.py --preset=nemotron-114m --dry-run                how long, how much memory
    torchrun --nproc-per-node=8 train_gpt.py --preset=nemotron-114m     eight GPUs (see distributed.py)

The run folder (runs/train_gpt-<preset>-<scorer>-s<seed>) gets config.json, model.safetensors, checkpoints, metrics.jsonl,
loss.png, sample.txt and summary.json. Ctrl-C saves and prints the command that continues. See --help for all flags.
"""

import re
import signal
import subprocess
import sys
from dataclasses import dataclass

from config import MODEL_PRESETS, ModelConfig
from flags import TextFlags, UserError, fail, parse, require


@dataclass
class Flags(TextFlags):
    """Train a decoder-only language model with any attention scorer."""

    ood: str = ""
    """out-of-distribution text: a known name, a path, or none"""
    tokenizer: str = "bytes"
    """bytes | gpt2"""
    n_layer: int = 0
    """layers"""
    n_head: int = 0
    """query heads"""
    n_kv_head: int = 0
    """key/value heads, a divisor of the query heads"""
    n_embd: int = 0
    """width; the feed-forward layer is four times as wide"""
    context: int = 0
    """most tokens the model sees at once"""
    sample_tokens: int = 500
    """tokens of the sample at the end"""
    dry_run: bool = False
    """print parameters, memory and time for the hardware found, and stop"""

    def check(self):
        super().check()
        require(self, "tokenizer", self.tokenizer in ("bytes", "gpt2"), "choose bytes or gpt2")
        require(self, "context", self.context >= 2, "must be at least 2")
        require(self, "sample_tokens", self.sample_tokens >= 0, "must be at least 0")
        require(self, "data", self.data, "name a text, such as pydocs or a path")
        try:
            self.model_config(vocab_size=64)
        except ValueError as error:
            raise UserError("--" + str(error).replace("_", "-", 2)) from None

    def model_config(self, vocab_size):
        shape = dict(MODEL_PRESETS[self.preset])
        shape.update(n_layer=self.n_layer, n_head=self.n_head, n_kv_head=self.n_kv_head, n_embd=self.n_embd,
                     n_ff=4 * self.n_embd, context=self.context)
        return ModelConfig(**shape, vocab_size=vocab_size, dropout=self.dropout, scorer=self.scorer,
                           scorer_options=self.scorer_options(), path=self.path)


def preset(name, **recipe):
    shape = MODEL_PRESETS[name]
    return {key: shape[key] for key in ("n_layer", "n_head", "n_kv_head", "n_embd", "context")} | recipe


PRESETS = {
    # Ours, all of it: found by trying, for two CPU cores and a minute and a half.
    "laptop": preset("laptop", data="pydocs", ood="pysource", tokenizer="bytes", steps=450, batch_size=16, lr=3e-3,
                     min_lr=3e-4, warmup=50, beta2=0.99, save_every=150, eval_every=150),
    # nanoGPT's recipe for tiny Shakespeare on a CPU, with bytes for characters.
    "shakespeare": preset("shakespeare", data="shakespeare", ood="none", tokenizer="bytes", steps=2000, batch_size=12, lr=1e-3,
                          min_lr=1e-4, warmup=100, beta2=0.99, save_every=500, eval_every=500),
    # The paper's code: 1,024 tokens, 768 sequences a step, 22,000 steps, 500 of warm-up, seed 1234.
    # Ours, after Nemotron and GPT-3 for this size: learning rate 6e-4 down to a tenth, beta2 0.95, decay 0.1, clipping at 1.
    "nemotron-114m": preset("nemotron-114m", data="fineweb", ood="none", tokenizer="gpt2", steps=22000, batch_size=768, lr=6e-4,
                            min_lr=6e-5, warmup=500, beta2=0.95, seed=1234, save_every=500, eval_every=500,
                            eval_tokens=2**20),
    # nanoGPT's well-known recipe for GPT-2's size; 480 sequences a step.
    "gpt2-124m": preset("gpt2-124m", data="fineweb", ood="none", tokenizer="gpt2", steps=600000, batch_size=480, lr=6e-4,
                        min_lr=6e-5, warmup=2000, beta2=0.95, seed=1337, save_every=1000, eval_every=1000,
                        eval_tokens=2**20),
}

def default_preset(argv):
    """(preset, why): the paper's model where there is a CUDA GPU, asked of its driver since importing torch takes seconds."""
    if re.search(r"(^|\x00)--device[=\x00](cpu|mps)(\x00|$)", "\x00".join(argv)):
        return "laptop", "the default without a CUDA GPU"
    try:
        gpus = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30).stdout.count("GPU ")
    except (OSError, subprocess.TimeoutExpired):
        gpus = 0
    return ("nemotron-114m", "the default where there is a CUDA GPU") if gpus else ("laptop", "the default: no CUDA GPU found")


if __name__ == "__main__":  # a wrong flag is answered here, before the seconds that importing torch takes
    signal.signal(signal.SIGINT, lambda *_: fail("interrupted before training began; nothing was saved", code=130))
    default, why_default = default_preset(sys.argv[1:])
    flags, saved = parse(Flags, PRESETS, default_preset=default)

import math
import time
from itertools import islice

import torch

import estimate
import run
from data import bits_per_byte, prepare
from distributed import Processes, errors_in_one_line
from files import write_atomically, write_json
from metrics import median_speed, plot_loss, read_metrics
from model import Transformer
from tokens import VOCAB_SIZES
from training import Training


def main(flags, saved):
    sys.stdout.reconfigure(line_buffering=True, errors="replace")  # logs show each line at once, terminals any text
    processes = Processes(flags.device)  # one, unless torchrun has started more
    print(first_line(flags, saved))
    if flags.dry_run:
        vocab_size = padded(VOCAB_SIZES[flags.tokenizer])
        return estimate.report(flags, flags.model_config(vocab_size), processes.count)

    with processes.one_at_a_time(flags.cache_dir):
        corpus = prepare(flags.data, flags.tokenizer, flags.cache_dir, flags.ood or "none", timeout=flags.data_timeout)
    corpus.batch(flags.seed, 0, range(1), 1, flags.context)  # refuses a text shorter than a window, before anything is made

    unigram_bpb = corpus.unigram_bits_per_byte("val")  # takes a while on large corpora: before the processes are in step
    config = flags.model_config(padded(corpus.tokenizer.vocab_size))
    training = Training(flags, saved, processes, lambda: Transformer(config), corpus.digest)
    model, decisions, metrics, device = training.model, training.decisions, training.metrics, training.device
    print(f"parameters: {model.n_parameters():,}; training tokens: {corpus.n_tokens('train'):,}")
    peak = run.peak_flops(decisions)

    while training.goes_on():
        training.begin_step()
        loss = 0.0
        for rows in training.micro_batches():
            x, y = corpus.batch(flags.seed, training.step, rows, flags.batch_size, flags.context)  # (rows, context) each
            with run.autocast(decisions):
                _, part = training.forward(x.to(device), y.to(device))
            part = part * len(rows) / len(training.rows)  # every row has as many targets: the mean of means is the mean
            part.backward()
            loss += part.detach()
        loss, grad_norm = training.end_step(loss)

        tokens_per_s = flags.batch_size * flags.context / (time.perf_counter() - training.step_start)
        metrics.write(step=training.step, loss=loss, lr=training.lr, grad_norm=grad_norm, tokens_per_s=round(tokens_per_s, 1))
        mfu = {"mfu": f"{model.flops_per_token() * tokens_per_s / peak / processes.count:.1%}"} if peak else {}
        training.bar.set_postfix(loss=f"{loss:.3f}", tok_s=f"{tokens_per_s:,.0f}", **mfu, refresh=False)
        if training.due(flags.eval_every):
            result = {}
            for split in corpus.splits[1:]:  # val, and ood if there is one
                tokens = None if training.step == flags.steps else flags.eval_tokens
                result |= evaluate(training.eval_model, corpus, split, flags, decisions, tokens, processes)
            metrics.write(step=training.step, **result, unigram_bpb=unigram_bpb, **run.scorer_values(model))
            training.bar.write(report(training.step, flags, result, unigram_bpb), file=sys.stdout)
        if training.due(flags.save_every) or training.stop:
            training.save()

    if training.end():
        finish(training, corpus)


def first_line(flags, saved):
    """Which preset and data, and why."""
    if saved:
        why = f"resumes {flags.out}"
    elif any(word.split("=")[0] == "--preset" for word in sys.argv):
        why = "asked for"
    else:
        why = why_default
    return f"preset {flags.preset} on {flags.data} with scorer {flags.scorer} -> {flags.out} ({why})"


def padded(vocab_size):
    """Rounded up to a multiple of 64, which matrix units like."""
    return -(-vocab_size // 64) * 64


@torch.no_grad()
def evaluate(model, corpus, split, flags, decisions, max_tokens, processes):
    """Mean loss in nats a token, perplexity, and bits per UTF-8 byte, over a split or about max_tokens of it. The processes
    share the batches, in turn."""
    model.eval()
    nats, n_tokens, n_bytes, size = 0.0, 0, 0, decisions["micro_batch"]
    batches = corpus.eval_batches(split, flags.context, size, max_tokens or None)
    for x, y in islice(batches, processes.number, None, processes.count):
        # The last windows may be fewer or shorter. Padding them keeps one shape, so that a compiled model compiles once.
        full_x, full_y = x.new_zeros(size, flags.context), y.new_full((size, flags.context), -100)
        full_x[:x.size(0), :x.size(1)], full_y[:y.size(0), :y.size(1)] = x, y
        with run.autocast(decisions):
            _, loss = model(full_x.to(decisions["device"]), full_y.to(decisions["device"]))
        nats, n_tokens = nats + loss.item() * y.numel(), n_tokens + y.numel()
        n_bytes += corpus.tokenizer.count_bytes(y)
    model.train()
    nats, n_tokens, n_bytes = processes.sum(nats, n_tokens, n_bytes)
    return {f"{split}_loss": nats / n_tokens, f"{split}_ppl": math.exp(min(nats / n_tokens, 700)),
            f"{split}_bpb": bits_per_byte(nats, n_bytes)}


def report(step, flags, result, unigram_bpb):
    """One line about an evaluation."""
    parts = []
    for split in ("val", "ood"):
        if f"{split}_loss" in result:
            loss, ppl, bpb = (result[f"{split}_{key}"] for key in ("loss", "ppl", "bpb"))
            parts.append(f"{split} {loss:.3f} nats a token (perplexity {ppl:,.1f}), {bpb:.3f} bits a byte")
    return f"step {step}/{flags.steps}: {'; '.join(parts)} (unigram {unigram_bpb:.3f})"


def finish(training, corpus):
    """Sample, loss curve and summary of a run that has reached its last step."""
    folder, flags, model, decisions = training.folder, training.flags, training.model, training.decisions
    last = training.metrics.last_evaluation("val_loss", "val_bpb", "unigram_bpb")
    eot = torch.tensor([[corpus.tokenizer.eot]], device=decisions["device"])  # the sample begins as a document does
    tokens = model.generate(eot, flags.sample_tokens, temperature=0.8, top_k=50, n_tokens=corpus.tokenizer.vocab_size,
                            generator=torch.Generator(decisions["device"]).manual_seed(flags.seed))
    text = corpus.tokenizer.decode(tokens[0, 1:].tolist())
    print(f"a sample:\n{text}")
    write_atomically(folder / "sample.txt", text.encode("utf-8"))
    nats_per_bit_of_val = last["val_loss"] / last["val_bpb"]
    plot_loss(folder, baseline=last["unigram_bpb"] * nats_per_bit_of_val)
    summary = dict(
        preset=flags.preset, scorer=flags.scorer, seed=flags.seed, path=decisions["path"], steps=flags.steps,
        val_loss=last["val_loss"], val_bpb=last["val_bpb"], ood_loss=last.get("ood_loss"), ood_bpb=last.get("ood_bpb"),
        unigram_bpb=last["unigram_bpb"], tokens_per_s=median_speed(read_metrics(folder / "metrics.jsonl")),
        parameters=model.n_parameters(), seconds=round(training.seconds, 1), machine=run.machine(decisions["device"]),
        date=time.strftime("%Y-%m-%d"), **training.scorer_changes())
    write_json(folder / "summary.json", summary)
    print(f"val {summary['val_bpb']:.3f} bits a byte, {summary['val_bpb'] / summary['unigram_bpb']:.0%} of the unigram "
          f"baseline's {summary['unigram_bpb']:.3f}; {summary['seconds']:.0f} s; everything is in {folder}")


if __name__ == "__main__":
    with errors_in_one_line():
        main(flags, saved)
