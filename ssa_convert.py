"""From softmax to SSA in a trained transformers model: start near softmax, or fit b and n, and measure the distance.

Softmax is the edge of SSA's family. With b = 1/n, (1 + |z|/n)^(sgn(z) n) tends to exp(z) as n grows, so a model trained with
softmax can be converted without loss and moved away from there. Two ways, and one measure:

    model = ssa_convert(model)                        # n = 1024, b = 1/1024: softmax to about z^2 / 2048 in each exponent
    report = ssa_fit(model, batches, n_max=8)         # or, after it, b and n a head, fitted to the scores the model really has
    report = ssa_distance(model, batches)             # total variation of the weights, change of the loss

A fit needs the cap n_max: without one the best n is infinite, that is, softmax. And a start near the edge hardly moves in a
short training, because n = 1024 and n = 1000 are the same function: fit with a small n_max to train SSA and not softmax.
"""

import contextlib
import math
import warnings
from collections.abc import Iterable, Mapping

import torch
import torch.nn as nn
from torch import Tensor

from ssa import SSA, Softmax, check_number, masked_softmax, signed_log, ssa
from ssa_hf import NAME, SCORER, add_scorers, attention_modules, ssa_register, ssa_scorers, warn_of_softmax

STEPS = 40  # of L-BFGS in a fit


def ssa_convert(model: nn.Module, n: float = 1024.0, b: float | None = None, freeze: str = "none") -> nn.Module:
    """Switch a transformers model, in place, from its attention to SSA with this b (1/n if None) and n in each head.

    Returns the model. freeze: "none", "b", "n" or "both" do not train. Converting an SSA model sets its b and n anew, with a
    warning, and so are attention modules named that stay softmax, because they do not take their attention from transformers'
    interface. Build the optimiser afterwards, since the parameters are new. Raises ValueError for values that are not numbers
    b > 0, n > 1, and for a model all of whose attention stays softmax.
    """
    ssa_register()
    SSA(1, 1.0 if b is None else b, n, freeze)  # raises for a value outside the domain, before anything is changed
    options = {"b": float(1 / n if b is None else b), "n": float(n), "freeze": freeze}  # floats, for config.json
    modules = attention_modules(model)
    if not modules:
        raise ValueError(f"{type(model).__name__} does not take its attention from transformers' AttentionInterface, so it "
                         "cannot be converted")
    if any(hasattr(module, SCORER) for module in modules.values()):
        warnings.warn(f"{type(model).__name__} has SSA already; its b and n are set anew", stacklevel=2)
    for module in modules.values():
        setattr(module.config, NAME, options)
        if hasattr(module, SCORER):
            delattr(module, SCORER)
    model.set_attn_implementation(NAME)  # only warns where it cannot
    if any(module.config._attn_implementation != NAME for module in modules.values()):
        raise ValueError(f"transformers does not change the attention of {type(model).__name__} after it is built; build it with "
                         'attn_implementation="ssa"')
    add_scorers(model)
    warn_of_softmax(model)
    return model


# ---------------------------------------------------------------------------------------------------------- measuring

class _Watch(Softmax):
    """Softmax that keeps some rows of the scores it is given: z (H, R, K) with their masks, for each call."""

    def __init__(self, n_head, rows, generator):
        super().__init__(n_head)
        self.rows, self.generator, self.seen = rows, generator, []

    def forward(self, scores, mask=None):
        B, H, Q, K = scores.shape
        allowed = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=scores.device) if mask is None else mask
        allowed = allowed.expand(B, H, Q, K)
        candidates = (allowed.sum(-1) > 1).all(1).nonzero()  # (batch, query): a row with one key is 1 whatever the scorer
        order = torch.randperm(len(candidates), generator=self.generator)[:self.rows]
        batch, query = candidates[order.to(candidates.device)].T
        self.seen.append((scores[batch, :, query].transpose(0, 1).float(), allowed[batch, :, query].transpose(0, 1)))
        return super().forward(scores, mask)


@contextlib.contextmanager
def _scorers_replaced(model, make):
    """For a while, each attention module of the model uses make(n_head) in its scorer's place; -> name -> what it uses."""
    own = ssa_scorers(model)
    modules = attention_modules(model)
    try:
        for name, scorer in own.items():
            setattr(modules[name], SCORER, make(scorer.n_head))
        yield {name: getattr(modules[name], SCORER) for name in own}
    finally:
        for name, scorer in own.items():
            setattr(modules[name], SCORER, scorer)


@torch.no_grad()
def _run(model, batches):
    """The mean loss over the batches, in evaluation mode; None where they hold no labels."""
    training, losses = model.training, []
    model.eval()
    try:
        for batch in batches:
            device = next(model.parameters()).device
            losses.append(getattr(model(**{name: x.to(device) for name, x in batch.items()}), "loss", None))
    finally:
        model.train(training)
    return None if None in losses else torch.stack(losses).mean().item()


def _observe(model, batches, rows, seed):
    """(loss with softmax, name -> (z, allowed)): both (H, R, K), rows of the scores that the softmax model has."""
    check_number("rows", rows, "at least 1, and whole", lambda rows: rows >= 1 and isinstance(rows, int))
    generator = torch.Generator().manual_seed(seed)
    share = -(-rows // len(batches))  # rows a batch, rounded up
    with _scorers_replaced(model, lambda n_head: _Watch(n_head, share, generator)) as watching:
        loss = _run(model, batches)
    return loss, {name: _joined(watch.seen) for name, watch in watching.items()}


def _listed(batches):
    """The batches as a list. Raises ValueError unless there are some, each a dict of tensors."""
    one = isinstance(batches, (Mapping, Tensor)) or not isinstance(batches, Iterable)
    listed = [batches] if one else list(batches)
    if not listed:
        raise ValueError("no batches: give at least one dict of the model's inputs")
    for batch in listed:
        if one or not isinstance(batch, Mapping) or not all(isinstance(x, Tensor) for x in batch.values()):
            raise ValueError(f"batches: {'' if one else 'one of them '}is {type(batch).__name__}, or holds no tensors; give "
                             'a list of dicts of tensors, such as [{"input_ids": ids, "labels": ids}]')
    return listed


def _joined(seen):
    """Rows of several batches below one another, shorter ones with masked keys at the end."""
    K = max(z.size(-1) for z, _ in seen)
    z = torch.cat([nn.functional.pad(z, (0, K - z.size(-1))) for z, _ in seen], 1)
    allowed = torch.cat([nn.functional.pad(allowed, (0, K - allowed.size(-1))) for _, allowed in seen], 1)
    if not z.size(1):
        raise ValueError("no query in the batches may attend to two keys, so there is nothing to compare; give longer sequences")
    return z, allowed


def ssa_distance(model: nn.Module, batches: Iterable[Mapping[str, Tensor]], rows: int = 128, seed: int = 0) -> dict:
    """How far the SSA model is from the same model with softmax, on `batches` (dicts of model inputs; labels for a loss).

    Returns "total_variation": name of the attention module -> (H,), half the sum of |softmax(z) - SSA(z)|, a number from 0 to 1,
    averaged over at most `rows` random queries of the softmax model; "mean_total_variation" over all heads; "loss_softmax",
    "loss_ssa" and their difference "loss_change" (nats a label, the mean of the batches; None without labels). Both models
    see the same batches in evaluation mode. Raises ValueError for a model without b and n, for no batches or others than dicts of
    tensors, and unless rows is a whole number from 1.
    """
    batches = _listed(batches)
    loss_softmax, observed = _observe(model, batches, rows, seed)
    return _report(model, batches, loss_softmax, observed)


@torch.no_grad()
def _report(model, batches, loss_softmax, observed):
    variation = {}
    for name, scorer in ssa_scorers(model).items():
        z, allowed = observed[name]
        difference = masked_softmax(z, allowed) - ssa(z, scorer.b, scorer.n, allowed)
        variation[name] = difference.abs().sum(-1).mean(-1).cpu() / 2  # (H, R, K) -> (H,)
    loss = _run(model, batches)
    return {"total_variation": variation, "mean_total_variation": torch.cat(list(variation.values())).mean().item(),
            "loss_softmax": loss_softmax, "loss_ssa": loss, "loss_change": None if loss is None else loss - loss_softmax}


# ------------------------------------------------------------------------------------------------------------- fitting

def ssa_fit(model: nn.Module, batches: Iterable[Mapping[str, Tensor]], n_max: float = 8.0, rows: int = 128,
            seed: int = 0) -> dict:
    """Fit b and n of each head, in place, to the scores that the model has with softmax on the calibration `batches`.

    A head's b > 0 and 1 < n < n_max minimise the mean divergence KL(softmax(z) || SSA(z)) over at most `rows` random queries.
    Frozen ones are fitted, too: freezing is about training. The other parameters stay. Returns what `ssa_distance` returns,
    after the fit, on the same batches. Raises ValueError unless n_max is a number with 1 < n_max < infinity, and as
    `ssa_distance` does.
    """
    check_number("n_max", n_max, "greater than 1, and finite", lambda n_max: 1 < n_max < math.inf)
    batches = _listed(batches)
    loss_softmax, observed = _observe(model, batches, rows, seed)
    for name, scorer in ssa_scorers(model).items():
        b, n = _fit_head(*observed[name], n_max)
        with torch.no_grad():
            scorer.raw_b.copy_(_softplus_inverse(b))
            scorer.raw_n.copy_(_softplus_inverse(n - 1))
    return _report(model, batches, loss_softmax, observed)


def _fit_head(z, allowed, n_max):
    """z and allowed (H, R, K) -> b and n, (H,) each: all heads at once, since their losses have no parameter in common."""
    target = masked_softmax(z, allowed)
    # b = exp(log_b); n = 1 + (n_max - 1) sigmoid(height). It starts half way up, with slope n b = 1 at 0, which is softmax's.
    log_b = z.new_full((z.size(0),), -math.log(1 + (n_max - 1) / 2)).requires_grad_()
    height = z.new_zeros(z.size(0)).requires_grad_()
    optimiser = torch.optim.LBFGS([log_b, height], max_iter=STEPS, line_search_fn="strong_wolfe")

    def values():
        return log_b.exp(), 1 + (n_max - 1) * height.sigmoid()

    def loss():
        optimiser.zero_grad()
        b, n = values()
        t = n.view(-1, 1, 1) * signed_log(z, b.view(-1, 1, 1))
        t = t.masked_fill(~allowed, torch.finfo(t.dtype).min)
        cross_entropy = t.logsumexp(-1) - (target * t).sum(-1)  # (H, R): KL plus softmax's entropy, which is constant
        total = cross_entropy.mean(-1).sum()
        total.backward()
        return total

    with torch.enable_grad():
        optimiser.step(loss)
    return (x.detach() for x in values())


def _softplus_inverse(x):
    return x + torch.log(-torch.expm1(-x))
