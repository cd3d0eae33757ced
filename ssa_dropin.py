"""SSA in anyone's model: a drop-in for torch.nn.MultiheadAttention, and the door to Hugging Face transformers.

    from ssa_dropin import SSAMultiheadAttention             # in place of torch.nn.MultiheadAttention
    from ssa_dropin import ssa_replace                       # or in every place of a PyTorch model at once

    from ssa_dropin import ssa_register, ssa_convert         # transformers: attn_implementation="ssa"; convert a trained model
    from ssa_dropin import ssa_fit, ssa_distance             # fit b and n to a trained model; how far it is from softmax
    from ssa_dropin import ssa_scorers                       # b and n, layer by layer

The last three lines come from ssa_hf.py and ssa_convert.py, which need `transformers` (pip install ".[hf]"); they are
imported when first asked for, so that this file needs torch alone.

N batch, L queries, S keys, E = embed_dim, H heads, D = E / H.
"""

import importlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ssa import make_scorer
from ssa_mask import ssa_attend, ssa_split_mask

_ELSEWHERE = {"ssa_register": "ssa_hf", "ssa_attention": "ssa_hf", "ssa_scorers": "ssa_hf", "ssa_convert": "ssa_convert",
              "ssa_fit": "ssa_convert", "ssa_distance": "ssa_convert"}


def __getattr__(name):
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_ELSEWHERE[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(f'{name} needs {error.name}: pip install "transformers>=5.24", or this project with [hf]') from error


class SSAMultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention with SSA, or any other scorer of ssa.py, in softmax's place.

    Constructor, forward, masks and state-dict keys are nn.MultiheadAttention's; the keyword arguments after `dtype` are new,
    and so are the keys of the scorer (scorer.raw_b and scorer.raw_n, whose softplus is b and n - 1; both (H,), float32). With
    scorer="softmax" it computes the same and has the same keys. Differences, all deliberate:

    - a query that may attend to nothing gets zeros (plus the output projection's bias), not NaN;
    - the weights returned are those before dropout;
    - PyTorch's fused inference path, which computes softmax without asking this class, is switched off, here and in an
      nn.TransformerEncoderLayer around it; nested tensors, which it was made for, are padded and unpadded instead.

    scorer: a name that ssa.make_scorer knows; the other keywords are its options (for "ssa": b, n, freeze). Raises ValueError
    for an unknown scorer, option or value, and whatever nn.MultiheadAttention's constructor raises.
    """

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, bias: bool = True, add_bias_kv: bool = False,
                 add_zero_attn: bool = False, kdim: int | None = None, vdim: int | None = None, batch_first: bool = False,
                 device=None, dtype=None, *, scorer: str = "ssa", **scorer_options) -> None:
        super().__init__(embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device,
                         dtype)
        self.scorer = make_scorer(scorer, num_heads, **scorer_options).to(device)
        self._switch_fast_path_off()

    def _switch_fast_path_off(self):
        # nn.TransformerEncoderLayer and nn.TransformerEncoder read the weights and skip `forward` under eval and no_grad,
        # unless this attribute is False. It means "q, k and v have one packed projection", which forward below asks of
        # in_proj_weight instead.
        self._qkv_same_embed_dim = False

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._switch_fast_path_off()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
                need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
                is_causal: bool = False) -> tuple[Tensor, Tensor | None]:
        """query (L, N, E), key (S, N, kdim), value (S, N, vdim) -> output (L, N, E) and weights (N, L, S) or None.

        With batch_first (N, L, E) and so on; without a batch (L, E) and weights (L, S); with average_attn_weights=False the
        weights are (N, H, L, S). key_padding_mask (N, S) or (S,) and attn_mask (L, S) or (N H, L, S): boolean, True = may not
        attend, or float as ssa_mask.py says. is_causal: a hint that attn_mask is the causal mask, which must be given too.
        need_weights=False is faster. Raises ValueError or RuntimeError for shapes that do not fit, TypeError for integer masks.
        """
        if query.is_nested or key.is_nested or value.is_nested:
            return self._forward_nested(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights,
                                        is_causal)
        batched = query.dim() == 3
        if not batched:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        elif not self.batch_first:
            same = key is value and query is key
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)  # (L, N, E) -> (N, L, E)
            key, value = (query, query) if same else (key, value)
        L, S = query.size(1), key.size(1)
        q, k, v = self._project(query, key, value)
        extra = k.size(2) - S  # keys that add_bias_kv and add_zero_attn appended: everyone may attend to them
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal is a hint about attn_mask, so give that too, for example "
                               "nn.Transformer.generate_square_subsequent_mask(L)")
        causal = is_causal and key_padding_mask is None and L == S and not extra
        mask, bias = self._merge_masks(None if causal else attn_mask, key_padding_mask, query.size(0), L, S, extra)
        out, weights = ssa_attend(q, k, v, self.scorer, mask=mask, bias=bias, causal=causal, need_weights=need_weights,
                                  dropout_p=self.dropout if self.training else 0.0)
        out = self.out_proj(out.transpose(1, 2).flatten(2))  # (N, H, L, D) -> (N, L, H, D) -> (N, L, E)
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights.to(out.dtype) if batched else weights[0].to(out.dtype)
        if not batched:
            return out[0], weights
        return (out if self.batch_first else out.transpose(0, 1)), weights

    def _project(self, query, key, value):
        """(N, L, E), (N, S, kdim), (N, S, vdim) -> q (N, H, L, D), k and v (N, H, S + appended keys, D)."""
        if self.in_proj_weight is not None and query is key and key is value:
            q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)  # one product for all three
        else:
            if self.in_proj_weight is not None:
                weights = self.in_proj_weight.chunk(3)
            else:
                weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))
        N, zeros = k.size(0), k.new_zeros(k.size(0), 1, self.embed_dim)
        if self.bias_k is not None:
            k, v = torch.cat([k, self.bias_k.expand(N, -1, -1)], 1), torch.cat([v, self.bias_v.expand(N, -1, -1)], 1)
        if self.add_zero_attn:
            k, v = torch.cat([k, zeros], 1), torch.cat([v, zeros], 1)
        return (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))  # (N, L, E) -> (N, H, L, D)

    def _merge_masks(self, attn_mask, key_padding_mask, N, L, S, extra):
        """Both masks, in PyTorch's terms -> (mask, bias) in ours, broadcastable to (N, H, L, S + extra), or None."""
        mask = bias = None
        if attn_mask is not None:
            shapes = [(L, S), (N * self.num_heads, L, S)]
            if tuple(attn_mask.shape) not in shapes:
                raise RuntimeError(f"attn_mask has shape {tuple(attn_mask.shape)}; it must be {shapes[0]} or {shapes[1]}")
            attn_mask = attn_mask.view(-1, 1 if attn_mask.dim() == 2 else self.num_heads, L, S)
        if key_padding_mask is not None:
            if tuple(key_padding_mask.shape) != (N, S):
                raise RuntimeError(f"key_padding_mask has shape {tuple(key_padding_mask.shape)}; it must be {(N, S)}")
            key_padding_mask = key_padding_mask.view(N, 1, 1, S)
        for given in filter(lambda x: x is not None, (attn_mask, key_padding_mask)):
            allowed, added = (~given, None) if given.dtype == torch.bool else ssa_split_mask(given)
            mask = allowed if mask is None else mask & allowed
            if added is not None:
                bias = added if bias is None else bias + added
        if extra:
            mask = None if mask is None else F.pad(mask, (0, extra), value=True)
            bias = None if bias is None else F.pad(bias, (0, extra))
        return mask, bias

    def _forward_nested(self, query, key, value, key_padding_mask, *options):
        """Nested tensors of N sequences (L_i, E): padded, masked, and nested again."""
        if key_padding_mask is not None or not self.batch_first:
            raise ValueError("nested tensors need batch_first=True, and carry their lengths: leave key_padding_mask out")
        lengths = [[len(x) for x in nested.unbind()] for nested in (query, key)]
        padded = {id(x): x.to_padded_tensor(0.0) for x in (query, key, value)}  # by id: the same tensor stays the same
        S = padded[id(key)].size(1)
        padding = torch.arange(S, device=key.device) >= torch.tensor(lengths[1], device=key.device)[:, None]  # (N, S)
        out, weights = self.forward(*(padded[id(x)] for x in (query, key, value)), padding, *options)
        return torch.nested.as_nested_tensor([x[:length] for x, length in zip(out, lengths[0])]), weights


def ssa_replace(module: nn.Module, *, scorer: str = "ssa", **scorer_options) -> nn.Module:
    """Put an SSAMultiheadAttention in the place of each nn.MultiheadAttention inside `module`, and return `module` (or, if it
    is an nn.MultiheadAttention itself, what takes its place).

    The projections are the same parameters as before; the scorer's (b and n a head) are new, so build the optimiser after
    this. scorer and its options as in SSAMultiheadAttention. It sees submodules only: a model that also calls the old module from
    a plain Python list or by a stored method (self.attend = self.attn.forward), or that hands its weights to
    F.multi_head_attention_forward, computes softmax there as before.

    Raises ValueError, and replaces nothing, if there is nothing to replace, for a subclass of nn.MultiheadAttention, and for
    one with something that would be lost: hooks, attributes of its own, in_proj_weight pruned or weight-normed. (A pruned
    or weight-normed out_proj stays as it is, and works.)
    """
    if type(module) is nn.MultiheadAttention:
        return _replaced(module, "the nn.MultiheadAttention", scorer, scorer_options)
    found = {name: m for name, m in module.named_modules()
             if isinstance(m, nn.MultiheadAttention) and not isinstance(m, SSAMultiheadAttention)}
    for name, other in found.items():
        if type(other) is not nn.MultiheadAttention:
            raise ValueError(f"{name}: {type(other).__name__} is a subclass of nn.MultiheadAttention, whose code would be lost; "
                             "replace it yourself")
    if not found:
        raise ValueError(f"{type(module).__name__} holds no nn.MultiheadAttention, so there is nothing to replace")
    new = {id(old): _replaced(old, name, scorer, scorer_options) for name, old in found.items()}  # one in two places stays one
    for parent in list(module.modules()):
        for name, old in list(parent._modules.items()):
            if id(old) in new:
                setattr(parent, name, new[id(old)])
    return module


def _replaced(old, name, scorer, scorer_options):
    new = SSAMultiheadAttention(old.embed_dim, old.num_heads, old.dropout, old.in_proj_bias is not None,
                                old.bias_k is not None, old.add_zero_attn, old.kdim, old.vdim, old.batch_first,
                                device="meta", scorer=scorer, **scorer_options)
    _refuse_losses(old, new, name)
    for key, parameter in old._parameters.items():  # all that `new` has, so that none of them stays on meta
        setattr(new, key, parameter)
    new.out_proj = old.out_proj
    new.scorer = make_scorer(scorer, old.num_heads, **scorer_options).to(old.out_proj.weight.device)
    return new.train(old.training)


def _refuse_losses(old, new, name):
    """Raise ValueError where `old`, called `name`, has anything that `new` would lose."""
    if old._parameters.keys() != new._parameters.keys():
        odd = ", ".join(sorted(old._parameters.keys() ^ new._parameters.keys()))
        raise ValueError(f"{name}: its parameters are not nn.MultiheadAttention's ({odd}); if it is pruned or weight-normed, "
                         "call torch.nn.utils.prune.remove or torch.nn.utils.remove_weight_norm on it first")
    for key, hooks in vars(old).items():
        if key.endswith("_hooks") and hooks:
            raise ValueError(f"{name} has hooks ({key.strip('_')}), which would be lost; remove them first, and register them "
                             "again on what takes its place")
    extra = {*vars(old), *old._buffers, *old._modules} - {*vars(new), *new._buffers, *new._modules}
    if extra:
        raise ValueError(f"{name} has attributes that nn.MultiheadAttention does not have ({', '.join(sorted(extra))}), which "
                         "would be lost; delete them first, and set them again on what takes its place")
