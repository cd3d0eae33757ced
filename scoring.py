"""How likely given tokens are under a trained model: in windows where a text outgrows the context, batched by length.

Perplexity and lm-eval both stand on this one function, and it runs the model and nothing else, so the chosen scorer is in
effect here as it was in training.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

from run import autocast


class Window(NamedTuple):
    """The model reads tokens start to stop - 1 of a sequence and scores the tokens `scored` to `stop`, the last one included."""

    sequence: int
    start: int
    stop: int
    scored: int


def windows(sequence, last, context, stride, first=1):
    """Windows that score the tokens number first to `last` of a sequence once each, at most `context` inputs in each.

    Every token sees all tokens before it or, where they are too many, at least context - stride + 1 of them. With stride =
    context that is lm-eval's rule: as few windows as can be, the last one with a full context. 1 <= stride <= context.
    """
    found = []
    while first <= last:
        stop = min(last, max(context, first + stride - 1))
        found.append(Window(sequence, max(0, stop - context), stop, first))
        first = stop + 1
    return found


def score_windows(trained, sequences, todo, batch_size=0, title=""):
    """Yields (window, nats, greedy) for each Window of `todo`, longest windows first.

    sequences: arrays of token ids. nats: float32 (T,), -log p of the tokens start + 1 to stop, T = stop - start. greedy: bool
    (T,), whether each is the likeliest token. batch_size: windows at once (0: what fits well). title: of the progress bar.
    """
    model, device = trained.model, trained.device
    decisions = dict(device=device, dtype=trained.dtype)
    # Enough tokens to keep the device busy, few enough for logits of 0.25 GB on a CPU and 4 GB on a GPU.
    most, numbers = (8192, 2**26) if device == "cpu" else (65536, 2**30)
    budget = min(most, numbers // model.config.vocab_size)
    todo = sorted(todo, key=lambda window: window.start - window.stop)
    bar, done = tqdm(total=len(todo), desc=title, unit="window", disable=None), 0
    while done < len(todo):
        longest = todo[done].stop - todo[done].start
        batch = todo[done : done + (batch_size or max(1, budget // longest))]
        x = torch.zeros(len(batch), longest, dtype=torch.int64)  # (B, T); padding on the right, which no causal model sees
        y = torch.full_like(x, -100)
        for row, (sequence, start, stop, _) in enumerate(batch):
            ids = torch.as_tensor(sequences[sequence][start : stop + 1], dtype=torch.int64)
            x[row, : stop - start], y[row, : stop - start] = ids[:-1], ids[1:]
        with torch.no_grad(), autocast(decisions):
            logits, _ = model(x.to(device))  # (B, T, V)
        logits, y = logits.float(), y.to(device)
        nats = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="none").view(y.shape).cpu()
        greedy = (logits.argmax(-1) == y).cpu()
        for row, window in enumerate(batch):
            length = window.stop - window.start
            yield window, nats[row, :length].numpy(), greedy[row, :length].numpy()
        done += len(batch)
        bar.update(len(batch))
    bar.close()
