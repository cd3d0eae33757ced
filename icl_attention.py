"""Look into a trained model's attention, and change one thing about it at test time.

    watched(model)                    a copy that keeps the weights of its last call: `weights(copy)`, by layer and head
    watched(model, factor=0.1)        a copy whose scores are multiplied by a number before the scorer sees them
    swapped(model, "softmax")         a copy with another scorer in every layer
    clipped(model, 4.0)               a copy that reads no number beyond +-4

Attention has *collapsed* where one key has nearly all the weight whatever the others are: the largest weight is near 1, the
entropy near 0, the effective number of tokens, exp(entropy), near 1.
"""

import copy
from dataclasses import replace

import torch
import torch.nn as nn

from ssa import Scorer, make_scorer


class Watched(Scorer):
    """A scorer that multiplies its scores by `factor`, passes them to the scorer it wraps, and keeps the weights."""

    def __init__(self, scorer, factor=1.0):
        super().__init__(scorer.n_head)
        self.scorer, self.factor, self.seen = scorer, factor, None
        self.needs_qk, self.trains_qk = scorer.needs_qk, scorer.trains_qk

    def forward(self, scores, mask=None):
        self.seen = self.scorer(scores * self.factor, mask)
        return self.seen

    def weights(self, q, k, mask=None, positions=None):  # cosformer: a factor on q . k cancels in its quotient
        self.seen = self.scorer.weights(q, k, mask, positions)
        return self.seen


def with_scorers(model, make):
    """A copy of the model with make(scorer) in place of each scorer, on the path that can run any of them."""
    model = copy.deepcopy(model).eval()
    for block in model.blocks:
        block.attn.scorer = make(block.attn.scorer)
        block.attn.config = replace(block.attn.config, path="plain")
    return model


def watched(model, factor=1.0):
    return with_scorers(model, lambda scorer: Watched(scorer, factor))


def swapped(model, name):
    """`name` starts as it does in training: SSA from b = 0.8, n = 1.5."""
    return with_scorers(model, lambda scorer: make_scorer(name, scorer.n_head))


class Clip(nn.Module):
    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def forward(self, x):
        return x.clamp(-self.limit, self.limit)


def clipped(model, limit):
    model = copy.deepcopy(model).eval()
    model.read_in = nn.Sequential(Clip(limit), model.read_in)
    return model


def weights(model):
    """Of the last call of a watched model: (layers, B, H, Q, K)."""
    return torch.stack([scorer.seen for scorer in model.scorers()])


def concentration(weights):
    """How concentrated rows (..., K) of weights are -> {"largest", "entropy" (nats), "effective" (tokens)}, each (...).

    Rows that sum to less than 1 (sa_softmax) are normalised first; a row of zeros (cosformer) counts as one token."""
    share = weights / weights.sum(-1, keepdim=True).clamp_min(1e-30)
    entropy = -(share * share.clamp_min(1e-30).log()).sum(-1)
    return dict(largest=share.amax(-1), entropy=entropy, effective=entropy.exp())
