"""SSA in Hugging Face transformers 5: attn_implementation="ssa", with b and n as parameters of each attention module.

    import ssa_dropin
    ssa_dropin.ssa_register()                                                       # once, before a model is built or loaded
    model = LlamaForCausalLM(config)                                                # config._attn_implementation = "ssa", or
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ssa")     # a new model
    model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)                            # SSA again, with its b and n
    model = ssa_dropin.ssa_convert(AutoModelForCausalLM.from_pretrained(softmax_model))    # ssa_convert.py

transformers hands every attention module's q, k, v and mask to the function registered under the name of
`attn_implementation`. A function has no parameters, so `ssa_register` also follows three methods of PreTrainedModel: at the end
of a model's construction each attention module gets an ssa.SSA called `ssa_norm`, and where transformers initialises what a
checkpoint lacks, b and n get their start. They start from config.ssa, a dict with the options of ssa.SSA, for example
{"b": 2.72, "n": 1.49}; without it from b = 0.8, n = 1.5. config.json records that the model is SSA: `from_pretrained` then
needs no argument, and without `ssa_register` it fails and names "ssa", instead of loading a softmax model. (With another
attn_implementation as an argument, and without `ssa_register`, transformers takes the weights, and reports b and n as unexpected.)

Supported: decoders and encoders that take their attention from the interface (Llama, GPT-2, Qwen, Gemma, Mistral, BERT,
RoBERTa and their like), grouped key/value heads, padding, caches, sliding windows, packed sequences by position_ids, 4-D
masks, dropout, cross attention, gradient checkpointing, output_attentions. Refused: see UNSUPPORTED. A model that computes
some of its attention itself (SigLIP's pooling head) keeps softmax there, and a warning names the modules.
"""

import functools
import inspect
import warnings

import torch
import torch.nn as nn
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask
from transformers.utils.output_capturing import _active_collector

from ssa import SSA, make_scorer
from ssa_mask import ssa_attend, ssa_split_mask

NAME = "ssa"  # of the attention implementation, and of the options in a model's config
# Of the scorer in an attention module. It ends in _norm because transformers' Trainer spares parameters with such names
# from weight decay, which would pull b to 0.69 and n to 1.69.
SCORER = "ssa_norm"

UNSUPPORTED = {  # what a model may hand to its attention function and this one does not compute
    "softcap": "soft-capping of the scores", "position_bias": "a position bias inside attention",
    "s_aux": "attention sinks", "sinks": "attention sinks", "head_mask": "a head mask",
    "indices": "sparse attention", "block_indices": "sparse attention",
    **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "block_table", "read_index"),
                    "packed or paged sequences in flash attention's form (position_ids alone do it)")}


# ------------------------------------------------------------------------------------------- the function that is called

def ssa_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                  dropout: float = 0.0, scaling: float | None = None, is_causal: bool | None = None,
                  sliding_window: int | None = None, **kwargs) -> tuple[Tensor, Tensor | None]:
    """What transformers calls: query (B, H, Q, D), key and value (B, Hkv, K, D) -> output (B, Q, H, D) and weights or None.

    attention_mask: None, or broadcastable to (B, H, Q, K): boolean, True = may attend, or float as ssa_mask.py says. None means
    a causal mask if is_causal (if None: module.is_causal, True where there is none), and no mask for a single query. The
    weights (B, H, Q, K) are returned for output_attentions=True. Raises ValueError for a module without b and n, and for
    what UNSUPPORTED names.
    """
    scorer = getattr(module, SCORER, None)
    if scorer is None:
        raise ValueError(f"{type(module).__name__} has no b and n ({SCORER}): call ssa_register() before the model is built or "
                         "loaded, or ssa_convert(model) on one that exists")
    for name, what in UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f'{type(module).__name__} asks for {what} ({name}), which attn_implementation="ssa" does not '
                             "compute; use another implementation for this model")
    Q, K = query.size(2), key.size(2)
    causal, mask, bias = False, attention_mask, None
    if attention_mask is None:
        if sliding_window is not None and K > sliding_window:
            raise ValueError(f"{type(module).__name__} has a sliding window of {sliding_window} and passes no mask for its {K} "
                             "keys, so the window would be ignored")
        is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = bool(is_causal) and Q > 1
        if causal and K > Q:  # no mask for more keys than queries: a static cache before its first tokens, the rest is empty
            key, value = key[:, :, :Q], value[:, :, :Q]
    elif not isinstance(attention_mask, Tensor):
        raise ValueError(f"the attention mask is a {type(attention_mask).__name__}; it must be a tensor or None")
    elif attention_mask.dtype != torch.bool:
        mask, bias = ssa_split_mask(attention_mask)
    out, weights = ssa_attend(query, key, value, scorer, mask=mask, bias=bias, causal=causal, scale=scaling, dropout_p=dropout,
                              need_weights=_weights_wanted(kwargs))
    return out.transpose(1, 2).contiguous(), weights  # (B, H, Q, D) -> (B, Q, H, D)


def _weights_wanted(kwargs):
    """Whether the model is to return its attention weights; not every module passes output_attentions on (GPT-2's does not)."""
    return bool(kwargs.get("output_attentions")) or any("attentions" in key for key in _active_collector.get() or ())


# ----------------------------------------------------------------------------------------------- parameters for it

def ssa_register() -> None:
    """Make "ssa" an attention implementation of transformers in this process. Calling it again does nothing."""
    if hasattr(PreTrainedModel.post_init, "ssa"):
        return
    AttentionInterface.register(NAME, ssa_attention)
    # Without a mask function of its own an implementation gets no mask, and sees padding and the future. sdpa's masks are
    # boolean, and None where is_causal says it all.
    AttentionMaskInterface.register(NAME, sdpa_mask)
    build, initialise = PreTrainedModel.post_init, PreTrainedModel._initialize_weights
    switch = PreTrainedModel.set_attn_implementation

    @functools.wraps(build)
    def post_init(self):
        add_scorers(self)
        if self.config._attn_implementation == NAME:
            inside = {module for part in self.modules() if isinstance(part, PreTrainedModel) and part is not self
                      for module in part.modules()}  # of parts that have been built, and have warned, before
            warn_of_softmax(self, inside)
        build(self)

    @functools.wraps(initialise)
    def _initialize_weights(self, module, *args, **kwargs):
        if isinstance(module, SSA):
            _initialise_scorer(module, self.config)
        else:
            initialise(self, module, *args, **kwargs)

    @functools.wraps(switch)
    def set_attn_implementation(self, attn_implementation, *args, **kwargs):
        require_no_softmax(self.config, attn_implementation)
        switch(self, attn_implementation, *args, **kwargs)
        if attn_implementation != NAME and hasattr(self.config, "attn_implementation"):
            del self.config.attn_implementation  # what add_scorers has noted down for config.json

    post_init.ssa = True
    PreTrainedModel.post_init, PreTrainedModel._initialize_weights = post_init, _initialize_weights
    PreTrainedModel.set_attn_implementation = set_attn_implementation


def add_scorers(model):
    """Give each attention module of `model` that is to use SSA its scorer, where it has none yet. Raises ValueError where the
    config says SSA, and softmax would be computed."""
    modules = attention_modules(model)
    require_no_softmax(model.config, getattr(model.config, "_attn_implementation", None))
    if model.config._attn_implementation == NAME:
        if not modules:
            raise ValueError(f"{type(model).__name__} does not take its attention from transformers' AttentionInterface, so "
                             'attn_implementation="ssa" would change nothing')
        # Plain attributes, which unlike the private one are saved in config.json.
        model.config.attn_implementation, model.config.ssa = NAME, _options(model.config) or {"b": 0.8, "n": 1.5}
    for module in modules.values():
        if module.config._attn_implementation == NAME and not hasattr(module, SCORER):
            scorer = make_scorer(NAME, _n_head(module), **_options(module.config))
            setattr(module, SCORER, scorer.to(next(module.parameters()).device))
            if _stay_ssa not in module._forward_pre_hooks.values():  # ssa_convert may give a module a new scorer
                module.register_forward_pre_hook(_stay_ssa)


def _stay_ssa(module, _):
    """Before each forward of an attention module: someone may have set config._attn_implementation by hand."""
    require_no_softmax(module.config, module.config._attn_implementation)


def require_no_softmax(config, asked):
    """Raise ValueError where a config says SSA and another attention implementation is asked for."""
    if asked != NAME and getattr(config, NAME, None) is not None:
        _options(config)
        raise ValueError(f'config.ssa asks for SSA, attn_implementation={asked!r} for softmax; pass attn_implementation="ssa" '
                         '(for a part of a model a dict, such as {"text_config": "ssa"}), or for softmax set config.ssa = None')


def attention_modules(model):
    """name -> module, of those that look their attention function up in the interface."""
    return {name: module for name, module in model.named_modules()
            if "ALL_ATTENTION_FUNCTIONS" in _names_used(type(module)) and hasattr(module, "config")}


def warn_of_softmax(model, without=frozenset()):
    """Warn, by name, of modules of `model` that are called attention and compute a softmax of their own, except `without`.

    No error, because the name is only a sign: the softmax over a few points in DETR's deformable attention is one of them.
    """
    names = [f"{name} ({type(module).__name__})" for name, module in model.named_modules()
             if module not in without and _own_softmax(type(module))]
    if names:
        warnings.warn(f"not SSA: {', '.join(names)} of {type(model).__name__} do not take their attention from transformers' "
                      "AttentionInterface, and keep softmax", stacklevel=3)


@functools.cache
def _own_softmax(cls):
    methods = [inspect.unwrap(method) for _, method in inspect.getmembers(cls, inspect.isfunction)]
    names = {name for method in methods if hasattr(method, "__code__") for name in method.__code__.co_names}
    return "Attention" in cls.__name__ and "ALL_ATTENTION_FUNCTIONS" not in names and bool(
        names & {"softmax", "Softmax", "scaled_dot_product_attention", "multi_head_attention_forward"})


@functools.cache
def _names_used(cls):
    """The global names that a class's `forward` uses, whatever decorators are around it."""
    forward = inspect.unwrap(cls.forward)
    return forward.__code__.co_names if hasattr(forward, "__code__") else ()


def _n_head(module):
    for name in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
        if isinstance(getattr(module, name, None), int):
            return getattr(module, name)
    return module.config.num_attention_heads


def _options(config):
    """config.ssa, {} without one. Raises ValueError for what is not the options of ssa.SSA."""
    options = {} if getattr(config, NAME, None) is None else getattr(config, NAME)
    if not isinstance(options, dict) or set(options) - {"b", "n", "freeze"}:
        raise ValueError(f'config.ssa={options!r}: must be a dict of b, n and freeze, such as {{"b": 0.8, "n": 1.5}}')
    for name in set(options) & {"b", "n"}:
        if isinstance(options[name], bool) or not isinstance(options[name], (int, float)):
            raise ValueError(f"config.ssa: {name}={options[name]!r}: must be a number")
    return options


@torch.no_grad()
def _initialise_scorer(scorer, config):
    """Start values for the parameters that no checkpoint has filled; transformers marks those that one has."""
    start = make_scorer(NAME, scorer.n_head, **_options(config))
    for name, parameter in scorer.named_parameters():
        if not getattr(parameter, "_is_hf_initialized", False):
            parameter.copy_(getattr(start, name))
        parameter.requires_grad_(getattr(start, name).requires_grad)  # which loading forgets
    scorer._is_hf_initialized = True


def ssa_scorers(model: nn.Module) -> dict[str, SSA]:
    """name of the attention module -> its scorer, whose b and n are (H,) float32. Raises ValueError if `model` has none."""
    scorers = {name: getattr(module, SCORER) for name, module in attention_modules(model).items() if hasattr(module, SCORER)}
    if not scorers:
        raise ValueError(f"{type(model).__name__} has no b and n: build or load it with attn_implementation=\"ssa\" after "
                         "ssa_register(), or call ssa_convert(model)")
    return scorers
