"""train_gpt.py --dry-run: what a run would take on the hardware found. Parameters and exchanged bytes are exact,
memory is counted from the tensors that the backward pass needs, time follows from a matrix product measured here."""

import time

import torch

import run
from config import main_memory
from model import Transformer

EFFICIENCY = 0.5  # of the measured product's speed that a whole step reaches: a guess, good to a factor of two
STATE_BYTES = 16  # a parameter: weight, gradient and AdamW's two moments, in float32


def report(flags, config, processes):
    """Print the estimates; nothing is downloaded or written."""
    with torch.device("meta"):  # shapes without memory
        model = Transformer(config)
    decisions = run.decide(flags, model, processes=processes)
    n, tokens = model.n_parameters(), flags.batch_size * flags.context
    print(f"parameters: {n:,}, {config.vocab_size * config.n_embd:,} of them the embedding")
    print(f"tokens: {tokens:,} a step, {tokens * flags.steps / 1e9:.3g} billion in {flags.steps:,} steps")
    state, activations = n * STATE_BYTES, activation_bytes(config, decisions)
    print(f"memory of a process: {gb(state)} for weights, gradients and AdamW + about {gb(activations)} for a micro-batch "
          f"of {decisions['micro_batch']} = {gb(state + activations)}; this machine has {gb(memory(decisions['device']))}")
    print(f"while a checkpoint is saved, {gb(12 * n)} of main memory more")
    speed = product_speed(model, decisions)
    seconds = model.flops_per_token() * tokens / (speed * EFFICIENCY) / processes
    print(f"time: {model.flops_per_token() * tokens:.3g} operations a step; {speed / 1e9:,.0f} GFLOP/s measured, "
          f"{EFFICIENCY:.0%} of it assumed: about {duration(seconds)} a step, {duration(seconds * flags.steps)} in all, "
          f"{tokens / seconds:,.0f} tokens/s")
    if processes > 1:
        print(f"exchange: {gb(4 * n)} of gradients a step, of which each process sends and receives about twice as much")


def activation_bytes(config, decisions):
    """What the forward pass of a micro-batch keeps for the backward pass, roughly."""
    rows = decisions["micro_batch"] * config.context
    number = 2 if decisions["dtype"] == "bfloat16" else 4  # bytes
    kv = config.n_kv_head / config.n_head
    # In multiples of C: two norms and their inputs, q k v before and after rotation, attention's output, the sum; and
    # the feed-forward layer's three.
    layer = config.n_embd * (4 + 2 * (1 + 2 * kv) + 3) + 3 * config.n_ff
    scores = 5 * config.n_head * config.context if decisions["path"] == "plain" else 0  # SSA's log, weights, ...
    # Logits, their log-softmax and its gradient are float32 throughout.
    return rows * (config.n_layer * (layer + scores) * number + 3 * config.vocab_size * 4)


def product_speed(model, decisions):
    """FLOP/s of this model's feed-forward product."""
    config = model.config
    rows = min(decisions["micro_batch"] * config.context, 4096 if decisions["device"] == "cuda" else 512)
    a, b = (torch.randn(shape, device=decisions["device"], dtype=getattr(torch, decisions["dtype"]))
            for shape in ((rows, config.n_embd), (config.n_embd, config.n_ff)))
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        (a @ b).sum().item()  # item() waits for a GPU
        seconds.append(time.perf_counter() - start)
    return 2 * rows * config.n_embd * config.n_ff / min(seconds)  # the fastest: others may be using this machine too


def memory(device):
    if device == "cuda":
        return torch.cuda.mem_get_info()[1]
    return main_memory()


def gb(n_bytes):
    return f"{n_bytes / 2**30:.2f} GB"


def duration(seconds):
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2g} seconds"
