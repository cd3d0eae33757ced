"""One training step of train_icl.py at the published shape, with SSA, against the public code's: `python bench.py --icl`.

Theirs is the step of Garg et al. 2022 (github.com/dtsip/in-context-learning), which the paper builds on: Hugging Face's
GPT2Model between a linear read-in and read-out, softmax in its eager form, float32, Adam, the loss read at every step. Ours is
the step of `train_icl.py --preset=paper`. Both draw their batch; both learn `every` at 41 points with running labels.
Needs `transformers`.
"""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

import icl_tasks
import run
from flags import UserError
from model import Transformer
from ssa_flash import pick_path
from train_icl import PRESETS, Flags, losses


def step_against_gpt2(config, dtype, compare):
    """The row of the case; compare(ours, theirs) times the two side by side. Raises UserError without transformers."""
    try:
        from transformers import GPT2Config, GPT2Model
    except ImportError:
        raise UserError("--icl: compares with Hugging Face's GPT-2; pip install transformers") from None
    small = dict(n_layer=2, n_head=2, n_embd=32, batch_size=4) if config.quick else {}
    flags = Flags(preset="paper", scorer="ssa", **PRESETS["paper"] | small)
    flags.check()
    gpt2 = GPT2Model(GPT2Config(n_positions=flags.context, n_embd=flags.n_embd, n_layer=flags.n_layer, n_head=flags.n_head,
                                resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
                                attn_implementation="eager"))
    model = Transformer(flags.model_config()).to(config.device)
    shape = (flags.batch_size, flags.n_head, icl_tasks.n_tokens(flags.points, flags.asked), model.config.head_dim)
    path, _ = pick_path(config.device, dtype, model.scorers()[0], shape)
    times = compare(ours_step(model, flags, config.device, dtype), theirs_step(gpt2, flags, config.device))
    return dict(what="icl step", preset="paper", scorer="ssa", path=path, dtype=str(dtype).removeprefix("torch."), B=shape[0],
                T=shape[2], head_dim=shape[3], direction="fwd_bwd", **times, times_as_fast=1 / times["ratio"],
                flops=model.flops_per_token() * shape[0] * shape[2], extra_bytes=None, softmax_extra_bytes=None)


def ours_step(model, flags, device, dtype):
    optimizer, steps = run.make_optimizer(model, flags), iter(range(10**9))

    def step():
        x, y = icl_tasks.batch(flags.task, flags.law, 0, next(steps), range(flags.batch_size), flags.batch_size, flags.points)
        tokens = torch.from_numpy(icl_tasks.tokens(x, y, flags.asked)).to(device)  # (B, 81, 1)
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            outputs, _ = model(tokens)
        loss = losses(flags.task, icl_tasks.at_x(outputs, flags.asked).float(), torch.from_numpy(y).to(device)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), flags.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()
    return step


def theirs_step(gpt2, flags, device):
    model = nn.ModuleDict(dict(read_in=nn.Linear(1, flags.n_embd), gpt2=gpt2, read_out=nn.Linear(flags.n_embd, 1))).to(device)
    optimizer, steps = torch.optim.Adam(model.parameters(), lr=flags.lr), iter(range(10**9))

    def step():
        x, y = icl_tasks.batch(flags.task, flags.law, 0, next(steps), range(flags.batch_size), flags.batch_size, flags.points)
        pairs = torch.from_numpy(np.stack([x, y], axis=2)).to(device).view(flags.batch_size, -1, 1)  # (B, T, 2) -> (B, 2T, 1)
        optimizer.zero_grad()
        hidden = model["gpt2"](inputs_embeds=model["read_in"](pairs)).last_hidden_state
        outputs = model["read_out"](hidden)[:, ::2, 0]  # (B, T)
        loss = F.softplus(-torch.from_numpy(y).to(device) * outputs).mean()
        loss.backward()
        optimizer.step()
        return loss.detach().item()
    return step
