"""Speed and memory of SSA against softmax, side by side in one run.

    python bench.py --quick           two lengths, one head size: about a minute
    python bench.py                   everything (about ten minutes on two CPU cores)
    python bench.py --device=cuda     the same on a GPU, up to 16384 tokens, with FlexAttention beside
    python bench.py --icl             in-context training: SSA here against Hugging Face's GPT-2 with softmax

Prints one line a case and writes them all to results/bench-<device>.json, a list of rows. SSA runs along the path that
ssa_flash.pick_path chooses, softmax through PyTorch's scaled_dot_product_attention. The two alternate, so that whatever
else the machine does falls on both; times are medians, the ratio is the median of the ratios of neighbours.

    what         attention | step (a whole training step: forward, backward, AdamW) | icl step (bench_icl.py)
    direction    fwd | fwd_bwd
    ms, softmax_ms, ratio                 SSA's time, softmax's, and SSA's over softmax's
    extra_bytes, softmax_extra_bytes      most memory held at once beyond the inputs (attention only)
    matmul_flops                          FLOP/s of this machine's own large matrix product in the dtype
    peak_fraction                         SSA's FLOP/s over those, matrix products alone; above 1 where a kernel does
                                          bf16 in float32 because the CPU has no bf16 instructions
    time_growth, memory_growth            p of T^p, fitted to one sequence's time and memory: 2 is quadratic, 1 linear
"""

import json
import math
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces every start and stop

import torch
import torch.nn.functional as F

from config import MODEL_PRESETS
from files import write_atomically
from flags import UserError, fail, tyro_cli
from model import ModelConfig, Transformer
from run import PEAK_BF16, processor
from ssa import SSA
from ssa_flash import attend, pick_path

N_HEAD = 12  # of the attention cases
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Config:
    quick: bool = False
    """two lengths, one head dimension, the laptop preset"""
    device: Literal["cpu", "cuda"] = "cpu"
    """what to measure"""
    threads: int = 0
    """CPU threads (0: PyTorch's choice)"""
    out: str = "results"
    """folder of the result"""
    lengths: str = ""
    """sequence lengths T of the attention cases, such as 256,1024 (all of the list if empty)"""
    tokens: int = 2048
    """tokens a case, batch times T, but at least one sequence"""
    icl: bool = False
    """only this: a training step of train_icl.py --preset=paper against Hugging Face's GPT-2 (bench_icl.py)"""
    seconds: float = 2.0
    """spent on each attention case; ten times as much on a training step"""

    def check(self):
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError("--device=cuda: this machine or this PyTorch has none; use --device=cpu")
        if self.threads < 0:
            raise UserError(f"--threads={self.threads}: must be at least 0")
        for name in ("tokens", "seconds"):
            if not getattr(self, name) > 0:
                raise UserError(f"--{name}={getattr(self, name)}: must be greater than 0")
        if self.lengths and not all(T.strip().isdigit() and int(T) > 0 for T in self.lengths.split(",")):
            raise UserError(f"--lengths={self.lengths}: must be numbers greater than 0, such as 256,1024")

    def cases(self):
        """(batch, T) of every attention case."""
        listed = {"cpu": "128,256,1024,4096", "cuda": "128,256,1024,4096,8192,16384"}[self.device]
        lengths = self.lengths or ("256,1024" if self.quick else listed)
        return [(max(1, self.tokens // T), T) for T in map(int, lengths.split(","))]


# ------------------------------------------------------------------------------------------------------------ measuring

def seconds(function, device):
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def side_by_side(functions, device, budget, least=3, most=50):
    """Call the functions in turn for about `budget` seconds after a warm-up -> a list of their times for each."""
    for function in functions:
        function()
    times, start = [], time.perf_counter()
    while len(times) < least or (time.perf_counter() - start < budget and len(times) < most):
        times.append([seconds(function, device) for function in functions])
    return list(zip(*times))


def compare(ours, softmax, device, budget):
    """{ms, softmax_ms, ratio} of two functions."""
    a, b = side_by_side([ours, softmax], device, budget)
    return dict(ms=1e3 * statistics.median(a), softmax_ms=1e3 * statistics.median(b),
                ratio=statistics.median(x / y for x, y in zip(a, b)))


def peak_bytes(function, device):
    """The most bytes that tensors made inside the function hold at once; from the allocator's own events on a CPU."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def matmul_peak(dtype, device, quick):
    """FLOP/s of a large square product, the best of several."""
    n = 8192 if device == "cuda" else 512 if quick else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    times, = side_by_side([lambda: a @ b], device, budget=1.0)
    return 2 * n**3 / min(times)


# ------------------------------------------------------------------------------------------------------------ attention

def attention_case(B, T, D, dtype, direction, config, peak):
    """The rows of one case: SSA against softmax, and on CUDA FlexAttention with both against softmax."""
    def heads():  # (B, T, H, D) in memory, as a model makes them -> (B, H, T, D)
        return torch.randn(B, T, N_HEAD, D, device=config.device, dtype=DTYPES[dtype]).transpose(1, 2)
    leaves, upstream = [heads().requires_grad_() for _ in range(3)], heads()
    scorer = SSA(N_HEAD).to(config.device)
    path, _ = pick_path(config.device, DTYPES[dtype], scorer, (B, N_HEAD, T, D))

    def call(attention):
        def function():
            if direction == "fwd":
                with torch.no_grad():
                    return attention(*leaves)
            attention(*leaves).backward(upstream)
            for x in (*leaves, *scorer.parameters()):
                x.grad = None  # the next call makes its own, as the first did
        return function

    softmax = call(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    candidates = [("ssa", path, call(lambda q, k, v: attend(q, k, v, scorer, causal=True, path=path)))]
    if config.device == "cuda":
        candidates += [(name, "flex", call(function)) for name, function in flex_attention(T, scorer)]
    flops = (2 if direction == "fwd" else 7) * 2 * B * N_HEAD * D * T * T / 2  # matrix products of the causal half
    for name, path, ours in candidates:
        row = dict(what="attention", scorer=name, path=path, dtype=dtype, B=B, T=T, head_dim=D, direction=direction)
        try:
            row |= compare(ours, softmax, config.device, budget=config.seconds)
        except Exception as error:  # FlexAttention fails for some shapes; that is a result too
            if path != "flex":
                raise
            print(f"flex {name}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        row |= dict(extra_bytes=peak_bytes(ours, config.device), softmax_extra_bytes=peak_bytes(softmax, config.device))
        yield row | dict(peak_fraction=flops / (row["ms"] / 1e3) / peak)


def flex_attention(T, scorer):
    """(scorer's name, function) of FlexAttention without and with SSA's score_mod: for comparison only."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    block_mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def ssa(q, k, v):
        b, n = scorer.b, scorer.n
        def score_mod(z, batch, head, i, j):
            log = torch.log1p(b[head] * z.abs())
            return n[head] * torch.where(z < 0, -log, log)
        return compiled(q, k, v, score_mod=score_mod, block_mask=block_mask)
    return [("softmax", lambda q, k, v: compiled(q, k, v, block_mask=block_mask)), ("ssa", ssa)]


def add_growth(rows):
    """Fit T^p to time and memory a token, over the lengths of each series, where linear means constant."""
    series = {}
    for row in rows:
        if row["what"] == "attention":
            key = tuple(row[k] for k in ("scorer", "path", "dtype", "head_dim", "direction"))
            series.setdefault(key, []).append(row)
    for members in series.values():
        for name, value in (("time_growth", "ms"), ("memory_growth", "extra_bytes")):
            x = [math.log(r["T"]) for r in members]
            y = [math.log(r[value] / (r["B"] * r["T"])) for r in members]
            slope = statistics.linear_regression(x, y).slope if len(set(x)) > 1 else None
            for row in members:
                row[name] = None if slope is None else 1 + slope


# ------------------------------------------------------------------------------------------------------- training steps

def step_case(preset, config, dtype, peak):
    """A whole training step of a model preset, SSA against softmax."""
    shape = MODEL_PRESETS[preset]
    small = shape["n_embd"] <= 128  # trained on bytes, the others on GPT-2's tokens
    B = 16 if small else 8 if config.device == "cuda" else 1
    vocab = 320 if small else 50304
    tokens = torch.randint(vocab, (B, shape["context"] + 1), device=config.device)

    def training_step(scorer):
        torch.manual_seed(0)
        model = Transformer(ModelConfig(**shape, vocab_size=vocab, scorer=scorer)).to(config.device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        forward = torch.compile(model, dynamic=False) if config.device == "cuda" else model  # as run.py decides

        def step():
            with torch.autocast(config.device, torch.bfloat16, enabled=dtype == "bfloat16"):
                _, loss = forward(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return step, model

    (ours, model), (softmax, _) = training_step("ssa"), training_step("softmax")
    D = model.config.head_dim
    path, _ = pick_path(config.device, DTYPES[dtype], model.scorers()[0], (B, model.config.n_head, shape["context"], D))
    row = dict(what="step", preset=preset, scorer="ssa", path=path, dtype=dtype, B=B, T=shape["context"], head_dim=D,
               direction="fwd_bwd", **compare(ours, softmax, config.device, budget=10 * config.seconds),
               extra_bytes=None, softmax_extra_bytes=None)
    rate = model.flops_per_token() * B * shape["context"] / (row["ms"] / 1e3)
    return row | dict(peak_fraction=rate / peak, **mfu(rate, config, dtype))


def icl_case(config, dtype, peak):
    """A training step of train_icl.py at the published shape, against Hugging Face's GPT-2 in float32."""
    from bench_icl import step_against_gpt2
    row = step_against_gpt2(config, DTYPES[dtype], lambda ours, theirs: compare(ours, theirs, config.device, 10 * config.seconds))
    return row | dict(matmul_flops=peak, peak_fraction=row.pop("flops") / (row["ms"] / 1e3) / peak)


def mfu(rate, config, dtype):
    """Model FLOP utilisation: over the maker's peak, where it is known."""
    if config.device != "cuda" or dtype != "bfloat16":
        return {}
    known = [peak for name, peak in PEAK_BF16.items() if name in torch.cuda.get_device_name()]
    return dict(mfu=rate / known[0]) if known else {}


def fitting_presets(config):
    """Presets whose weights, gradients, AdamW state and working memory fit: float32, two models at once."""
    if config.quick:
        return ["laptop"]
    decoders = [name for name, shape in MODEL_PRESETS.items() if shape.get("causal", True)]
    return [name for name in decoders if name == "laptop" or memory(config) > 16e9]


def memory(config):
    if config.device == "cuda":
        return torch.cuda.get_device_properties(0).total_memory
    try:
        pages, size = (os.sysconf(name) for name in ("SC_PHYS_PAGES", "SC_PAGE_SIZE"))
        return pages * size
    except (AttributeError, ValueError, OSError):  # not on Windows
        return 0


# ----------------------------------------------------------------------------------------------------------------- main

def machine(config):
    """What every row says about where and when it was measured."""
    name = torch.cuda.get_device_name() if config.device == "cuda" else processor()
    return dict(machine=name, threads=torch.get_num_threads(), torch=torch.__version__,
                python=platform.python_version(), date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
                command=" ".join(["python", Path(sys.argv[0]).name, *sys.argv[1:]]))


def show(row):
    name = row.get("preset", f"D={row['head_dim']}")
    memory = f"  memory {row['extra_bytes'] / row['softmax_extra_bytes']:.2f}" if row["extra_bytes"] else ""
    mfu = f"  MFU {row['mfu']:.0%}" if "mfu" in row else ""
    print(f"{row['what']:9} {name:13} {row['scorer']:7} {row['path']:9} {row['dtype']:8} T={row['T']:<5} "
          f"{row['direction']:7} {row['ms']:9.2f} ms, softmax {row['softmax_ms']:9.2f} ms, ratio {row['ratio']:.2f}"
          f"{memory}  {row['peak_fraction']:.0%} of peak{mfu}", flush=True)


def main():
    try:
        config = tyro_cli(Config, sys.argv[1:], Config())
        config.check()
    except UserError as error:
        fail(error)
    if config.threads:
        torch.set_num_threads(config.threads)
    torch.manual_seed(0)
    try:
        Path(config.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"--out={config.out}: cannot be written ({error.strerror}); choose another folder")
    rows, about = [], machine(config)
    print(f"{about['machine']}, {about['threads']} threads, PyTorch {about['torch']}")
    peaks = {dtype: matmul_peak(DTYPES[dtype], config.device, config.quick) for dtype in DTYPES}
    for dtype, peak in peaks.items():
        print(f"{dtype}: a large matrix product runs at {peak / 1e9:.4g} GFLOP/s")
        pays = peak >= peaks["float32"]  # where bf16 is slower than float32, nobody trains in it
        if config.icl:
            if pays:
                rows.append(icl_case(config, dtype, peak))
                show(rows[-1])
            continue
        for B, T in config.cases():
            for D in (64,) if config.quick else (32, 64):
                for direction in ("fwd", "fwd_bwd"):
                    for row in attention_case(B, T, D, dtype, direction, config, peak):
                        rows.append(row | dict(matmul_flops=peak))
                        show(row)
        for preset in fitting_presets(config):
            if pays:
                row = step_case(preset, config, dtype, peak)
                rows.append(row | dict(matmul_flops=peak))
                show(row)
    add_growth(rows)
    for row in rows:
        row |= about
    path = Path(config.out) / f"bench-{'icl-' if config.icl else ''}{config.device}.json"
    try:
        write_atomically(path, (json.dumps(rows, indent=1) + "\n").encode("utf-8"))
    except UserError as error:
        fail(error)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
