"""The shape of a model: one dataclass, checked when it is made, and the named shapes. No torch here, so that a wrong flag
is answered before the seconds that importing torch takes."""

import os
from dataclasses import asdict, dataclass, field, fields

# Beyond reason, and beyond what a file that someone else wrote may make this program spend.
MOST_LAYERS, MOST = 1000, 10**7


@dataclass(frozen=True)
class ModelConfig:
    """Everything that `model.Transformer` needs to know. Raises ValueError for a shape that cannot be built."""

    n_layer: int
    n_head: int  # query heads, H
    n_kv_head: int  # key/value heads, Hkv: each serves n_head / n_kv_head query heads
    n_embd: int  # width of the residual stream, C
    n_ff: int  # width of the feed-forward layer; 0: none, attention alone
    context: int  # the most tokens the model sees at once
    vocab_size: int = 0  # rows of the embedding; 0 with continuous inputs
    n_in: int = 0  # width of continuous inputs (B, T, n_in); 0: tokens
    n_out: int = 0  # width of continuous outputs; 0: one logit a token, through the transposed embedding
    scorer: str = "ssa"
    scorer_options: dict = field(default_factory=dict)  # for ssa.make_scorer
    causal: bool = True
    positions: str = "rotary"  # rotary | learned | none
    rotary_fraction: float = 0.5  # the part of each head's dimensions that rotates
    activation: str = "relu2"  # relu2 (squared ReLU) | gelu
    norm: str = "pre"  # pre | post | none: where LayerNorm stands
    norm_offset: bool = True  # LayerNorm multiplies by 1 + w, w starting from 0, instead of by w
    norm_eps: float = 1e-5
    bias: bool = False  # in linear layers and LayerNorm
    mlm_head: bool = False  # RoBERTa's: dense, GELU, LayerNorm before the transposed embedding, and a bias behind it
    dropout: float = 0.0  # on embeddings, attention weights and what each sub-layer adds
    path: str = "auto"  # which attention implementation: see ssa_flash.py

    def __post_init__(self):
        for name in ("n_layer", "n_head", "n_kv_head", "n_embd", "context"):
            self._require(getattr(self, name) >= 1, name, "must be at least 1")
        self._require(self.n_ff >= 0, "n_ff", "must be at least 0")
        for name in ("n_layer", "n_head", "n_kv_head", "n_embd", "n_ff", "context", "vocab_size", "n_in", "n_out"):
            most = MOST_LAYERS if name == "n_layer" else MOST
            self._require(type(getattr(self, name)) is int and getattr(self, name) <= most, name,
                          f"must be a whole number, at most {most}")
        self._require(self.n_embd % self.n_head == 0, "n_head", f"does not divide n_embd={self.n_embd}; choose a divisor")
        self._require(self.n_head % self.n_kv_head == 0, "n_kv_head",
                      f"does not divide n_head={self.n_head}; choose a divisor")
        self._require((self.vocab_size > 0) != (self.n_in > 0), "vocab_size", "exactly one of vocab_size, n_in is above 0")
        self._require(self.n_out > 0 or self.vocab_size > 0, "n_out", "must be above 0 with continuous inputs")
        self._require(not (self.mlm_head and self.n_out), "n_out", "must be 0 with mlm_head, which gives one logit a token")
        self._require(0 <= self.dropout < 1, "dropout", "must be at least 0 and below 1")
        for name, choices in (("positions", ("rotary", "learned", "none")), ("activation", ("relu2", "gelu")),
                              ("norm", ("pre", "post", "none"))):
            self._require(getattr(self, name) in choices, name, f"must be one of {', '.join(choices)}")
        if self.positions == "rotary":
            self._require(self.rotary_dim >= 2 and self.rotary_dim % 2 == 0, "n_head",
                          f"leaves {self.rotary_dim} rotating dimensions a head, which must be even and at least 2; use "
                          "fewer heads or a larger n_embd")

    def _require(self, holds, name, remedy):
        if not holds:
            raise ValueError(f"{name}={getattr(self, name)}: {remedy}")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def rotary_dim(self):
        return int(self.head_dim * self.rotary_fraction)

    @property
    def n_weights(self):
        """Entries of all matrices: nearly all parameters."""
        attention = self.n_embd * (2 * self.n_head + 2 * self.n_kv_head) * self.head_dim  # query, output; key, value
        positions = self.context if self.positions == "learned" else 0
        ends = self.vocab_size + positions + self.n_in + self.n_out
        return self.n_layer * (attention + 2 * self.n_embd * self.n_ff) + ends * self.n_embd

    def to_dict(self):
        return asdict(self)

    @classmethod
    def from_dict(cls, values):
        """The config that `to_dict` gave. Raises ValueError for a field that this version does not know, or lacks."""
        names = {f.name for f in fields(cls)}
        unknown = [name for name in values if name not in names]
        if unknown:
            raise ValueError(f"{unknown[0]}={values[unknown[0]]!r}: not a field of the model's config in this version")
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"the model's config is incomplete or of a wrong type: {error}") from None


def main_memory():
    """Bytes of memory of this machine; 0 where the system does not tell."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0


# The published decoder follows Nemotron: squared ReLU, LayerNorm with weight 1 + w, rotary on half of each head, no biases.
# `laptop` (ours) is the same architecture at a size that two CPU cores train in three minutes, `shakespeare` as small as
# nanoGPT's for a CPU.
NEMOTRON = dict(activation="relu2", positions="rotary", rotary_fraction=0.5, norm_offset=True, bias=False)
GPT2 = dict(activation="gelu", positions="learned", norm_offset=False, bias=True)
ROBERTA = dict(activation="gelu", positions="learned", norm_offset=False, bias=True, norm="post", causal=False, mlm_head=True)
MODEL_PRESETS = {
    "laptop": dict(n_layer=4, n_head=4, n_kv_head=2, n_embd=128, n_ff=512, context=128, **NEMOTRON),
    "shakespeare": dict(n_layer=4, n_head=4, n_kv_head=4, n_embd=128, n_ff=512, context=64, **NEMOTRON),
    "nemotron-114m": dict(n_layer=12, n_head=24, n_kv_head=8, n_embd=768, n_ff=3072, context=1024, **NEMOTRON),
    "gpt2-124m": dict(n_layer=12, n_head=12, n_kv_head=12, n_embd=768, n_ff=3072, context=1024, **GPT2),
    "babyberta": dict(n_layer=8, n_head=8, n_kv_head=8, n_embd=256, n_ff=1024, context=128, **ROBERTA),
}
