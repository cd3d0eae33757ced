"""How likely a masked language model finds sentences: holistic scores, and pseudo-log-likelihoods. Lower is likelier.

    holistic   the mean cross-entropy of all tokens, start and end included, of the sentence as it is: nothing is masked, so
               each prediction sees its own answer (Zaczynska et al. 2020; BabyBERTa's evaluation)
    mlm        every token but start and end masked in turn, their cross-entropies summed (Salazar et al. 2020)

Both go through packed rows, as in training, so that no padding is computed.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from checkpoint import load_run
from flags import UserError
from mlm_data import IGNORE, SPECIAL, fill, pack, read_tokenizer

TOKENS = 512  # computed at once: their logits, 16 MB, still profit from the caches of a CPU


def load(folder, device):
    """(model, tokenizer, config) of a run of train_babyberta.py. Raises UserError for others, and where they do not fit."""
    model, config = load_run(folder, device)
    path = Path(folder) / "tokenizer.json"
    if model.config.causal or not path.is_file():
        raise UserError(f"{folder}: is not a run of train_babyberta.py, whose masked language models are scored here; name one")
    tokenizer = read_tokenizer(path)
    if tokenizer.get_vocab_size() != model.config.vocab_size:
        raise UserError(f"{path}: has {tokenizer.get_vocab_size()} entries, the model {model.config.vocab_size}; restore the "
                        "tokenizer that the run was trained with")
    return model, tokenizer, config


def encode(tokenizer, sentences, longest, where):
    """Their ids, start and end included: a list of int64 arrays. Raises UserError for a sentence of over `longest` tokens."""
    ids = [np.array(encoding.ids, dtype=np.int64) for encoding in tokenizer.encode_batch_fast(sentences)]
    for number, one in enumerate(ids):
        if len(one) > longest:
            raise UserError(f"{where} sentence {number + 1}: has {len(one)} tokens, more than the model's {longest}; shorten or "
                            "remove it")
    return ids


def holistic(model, tokenizer, ids, progress=None):
    """Mean cross-entropy in nats of each sentence: float64 (k,). progress: called with the number of sentences done."""
    return cross_entropies(model, tokenizer, [(one, one) for one in ids], progress) / [len(one) for one in ids]


def pseudo_log_likelihood(model, tokenizer, ids, progress=None):
    """Summed cross-entropy in nats of each sentence's tokens, each masked in turn: float64 (k,)."""
    mask = tokenizer.token_to_id(SPECIAL["mask"])
    scores, size = np.empty(len(ids)), 1000
    for first in range(0, len(ids), size):  # a part at a time, since every sentence becomes as many as it has tokens
        part = ids[first : first + size]
        pairs, owner = [], []
        for number, one in enumerate(part):
            for place in range(1, len(one) - 1):
                inputs, targets = one.copy(), np.full_like(one, IGNORE)
                inputs[place], targets[place] = mask, one[place]
                pairs.append((inputs, targets))
                owner.append(number)
        sums = cross_entropies(model, tokenizer, pairs)
        scores[first : first + size] = np.bincount(owner, weights=sums, minlength=len(part))
        if progress:
            progress(len(part))
    return scores


@torch.no_grad()
def cross_entropies(model, tokenizer, pairs, progress=None):
    """pairs of (inputs, targets), int64 (length,) each -> the sum over each one's targets, in nats: float64 (k,)."""
    device, pad = next(model.parameters()).device, tokenizer.token_to_id(SPECIAL["pad"])
    lengths = np.array([len(inputs) for inputs, _ in pairs])
    order = np.argsort(lengths, kind="stable")  # equal lengths fill rows best
    cuts = np.flatnonzero(np.diff(np.cumsum(lengths[order]) // TOKENS)) + 1
    sums = np.empty(len(pairs))
    for numbers in np.split(order, cuts):
        inputs, targets = (np.concatenate([pairs[i][side] for i in numbers]) for side in (0, 1))
        shape, goal, segments = pack(lengths[numbers], model.config.context)
        x, y, segments = (t.to(device) for t in fill(shape, goal, (inputs, pad), (targets, IGNORE), (segments, 0)))  # (R, T)
        logits, _ = model(x, y, segments=segments, at_targets=True)  # (N, V)
        chosen = y != IGNORE
        losses = torch.zeros(y.shape, device=device)
        losses[chosen] = F.cross_entropy(logits.float(), y[chosen], reduction="none")
        ends = np.cumsum(lengths[numbers])
        sums[numbers] = np.add.reduceat(losses.cpu().numpy()[goal].astype(np.float64), ends - lengths[numbers])
        if progress:
            progress(len(numbers))
    return sums
