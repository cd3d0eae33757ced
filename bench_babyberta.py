"""Speed of a BabyBERTa training step, side by side in one run, on the same batches.

    python bench_babyberta.py --data=sentences.txt --tokenizer=tokenizer.json      needs transformers: pip install transformers

    ssa, softmax packed    as train_babyberta.py runs them without dropout: sentences share rows
    ssa bucketed           rows sorted by length, in parts of 4 as wide as their own longest
    ssa padded             all rows as wide as the longest
    roberta padded         transformers' RobertaForMaskedLM (softmax through sdpa) in a plain loop: padded as its collator
                           does, loss from its labels, clipping, torch.optim.AdamW as it comes
    roberta fused          the same with the fused AdamW that all of ours use

They take a step in turn, with the same sentences and masks, so whatever else the machine does falls on all. Times are medians;
the ratio is the median of the ratios of neighbours. Prints a line each and writes results/bench-babyberta-<device>.json, or with
--name=NAME results/bench-babyberta-NAME-<device>.json.
"""

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

import mlm_data
from bench import machine, side_by_side
from config import MODEL_PRESETS, ModelConfig
from files import write_atomically
from flags import UserError, fail, require, tyro_cli
from model import Transformer
from run import keep_freed_memory

PART = 4  # rows of a bucketed part


@dataclass
class Config:
    data: str = ""
    """sentences, one a line"""
    tokenizer: str = ""
    """a tokenizer.json"""
    batch_size: int = 16
    """sentences a step"""
    n_layer: int = 8
    """layers"""
    n_embd: int = 256
    """width; a head for every 32"""
    device: Literal["cpu", "cuda"] = "cpu"
    """what to measure"""
    threads: int = 0
    """CPU threads (0: PyTorch's choice)"""
    seconds: float = 60.0
    """spent on all"""
    out: str = "results"
    """folder of the result"""
    name: str = ""
    """part of the result's file name"""

    def check(self):
        for name in ("data", "tokenizer"):
            require(self, name, Path(getattr(self, name)).is_file(), "no such file; name one")
        require(self, "n_embd", self.n_embd >= 32 and self.n_embd % 32 == 0, "must be a multiple of 32")
        for name in ("batch_size", "n_layer", "seconds"):
            require(self, name, getattr(self, name) > 0, "must be greater than 0")


def padded(batch, rows, pad):
    """inputs, targets (k, the longest) and key_mask of some rows of a batch."""
    lengths = batch.lengths[rows]
    inputs, targets = (torch.full((len(rows), int(lengths.max())), empty) for empty in (pad, mlm_data.IGNORE))
    for i, (row, length) in enumerate(zip(rows, lengths)):
        here = slice(batch.starts[row], batch.starts[row] + length)
        inputs[i, :length], targets[i, :length] = torch.from_numpy(batch.inputs[here]), torch.from_numpy(batch.targets[here])
    return inputs, targets, torch.arange(inputs.size(1)) < torch.from_numpy(lengths)[:, None]


def parts(batch, layout, pad):
    """The batch as keyword arguments of our model, a part at a time."""
    rows = batch.lengths.argsort(kind="stable")
    if layout == "packed":
        x, y, segments = batch.packed(range(len(rows)), pad)
        yield dict(inputs=x, targets=y, segments=segments)
    else:
        size = len(rows) if layout == "padded" else PART
        for first in range(0, len(rows), size):
            x, y, real = padded(batch, rows[first : first + size], pad)
            yield dict(inputs=x, targets=y, key_mask=None if real.all() else real)


def steps(model, loss_of_batch, corpus, config, fused=True):
    """A function that does the next step, counted from 0, each time it is called."""
    model.to(config.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=fused or None)
    done = iter(range(10**9))

    def step():
        loss_of_batch(mlm_data.masked_batch(corpus, 0, next(done), config.batch_size))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step


def ours(scorer, layout, corpus, config):
    heads = config.n_embd // 32
    shape = MODEL_PRESETS["babyberta"] | dict(n_layer=config.n_layer, n_embd=config.n_embd, n_ff=4 * config.n_embd,
                                              n_head=heads, n_kv_head=heads)
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**shape, vocab_size=corpus.tokenizer.get_vocab_size(), scorer=scorer))

    def loss_of_batch(batch):
        for part in parts(batch, layout, corpus.special["pad"]):
            part = {name: tensor if tensor is None else tensor.to(config.device) for name, tensor in part.items()}
            _, loss = model(**part, at_targets=True)
            (loss * (part["targets"] != mlm_data.IGNORE).sum() / batch.n_masked).backward()
    return steps(model, loss_of_batch, corpus, config)


def roberta(corpus, config, fused):
    from transformers import RobertaConfig, RobertaForMaskedLM
    torch.manual_seed(0)
    model = RobertaForMaskedLM._from_config(RobertaConfig(
        vocab_size=corpus.tokenizer.get_vocab_size(), hidden_size=config.n_embd, num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_embd // 32, intermediate_size=4 * config.n_embd, max_position_embeddings=130,
        layer_norm_eps=1e-5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, pad_token_id=corpus.special["pad"],
        type_vocab_size=1), attn_implementation="sdpa")

    def loss_of_batch(batch):
        x, y, real = padded(batch, range(len(batch.lengths)), corpus.special["pad"])
        x, y, real = x.to(config.device), y.to(config.device), real.to(config.device)
        model(input_ids=x, attention_mask=real.long(), labels=y).loss.backward()
    return steps(model, loss_of_batch, corpus, config, fused)


def main():
    try:
        config = tyro_cli(Config, sys.argv[1:], Config())
        config.check()
        keep_freed_memory()
        if config.threads:
            torch.set_num_threads(config.threads)
            mlm_data.set_threads(config.threads)
        corpus = mlm_data.Sentences(mlm_data.read_sentences(config.data), mlm_data.read_tokenizer(config.tokenizer), 128)
        cases = [("ssa", "packed"), ("softmax", "packed"), ("ssa", "bucketed"), ("ssa", "padded")]
        functions = [ours(scorer, layout, corpus, config) for scorer, layout in cases]
        cases += [("roberta", "fused"), ("roberta", "padded")]
        functions += [roberta(corpus, config, fused=fused) for fused in (True, False)]
        times = side_by_side(functions, config.device, config.seconds, least=5, most=1000)
        rows = []
        for (scorer, layout), mine in zip(cases, times):
            rows.append(dict(what="babyberta step", scorer=scorer, layout=layout, n_layer=config.n_layer, n_embd=config.n_embd,
                             batch_size=config.batch_size, steps=len(mine), ms=1e3 * statistics.median(mine),
                             steps_per_s=1 / statistics.median(mine),
                             speed_over_roberta=statistics.median(b / a for a, b in zip(mine, times[-1])), **machine(config)))
            print(f"{scorer:8} {layout:9} {rows[-1]['ms']:8.1f} ms a step, {rows[-1]['speed_over_roberta']:.2f} times the speed "
                  "of RobertaForMaskedLM")
        path = Path(config.out) / f"{'-'.join(filter(None, ('bench-babyberta', config.name, config.device)))}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(rows, indent=1) + "\n").encode("utf-8"))
        print(f"written: {path}")
    except UserError as error:
        fail(error)
    except ImportError as error:
        fail(f"{error}: pip install transformers")


if __name__ == "__main__":
    main()
