"""One Transformer, three published shapes: decoder (Nemotron or GPT-2), encoder, and in-context with continuous inputs.

    tokens (B, T) or numbers (B, T, n_in) -> embedding -> n_layer x [attention with a scorer, feed-forward] -> logits

The scorer is the only place where SSA differs from softmax. Each attention layer owns one (`attn.scorer`), made by
`ssa.make_scorer`, with a b and an n for every head; a parameter exists only if the chosen scorer uses it. Attention runs
through `ssa_flash.attend` and nothing else.

B batch, T tokens, C = n_embd, H query heads, Hkv key/value heads, D = C / H, V vocabulary.
"""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from config import MODEL_PRESETS, ModelConfig, main_memory  # noqa: F401  (imported from here by everyone who has torch anyway)
from ssa import make_scorer
from ssa_flash import attend


class LayerNorm(nn.Module):
    """LayerNorm whose weight is stored as w and used as 1 + w (`norm_offset`), or plainly, with or without a bias."""

    def __init__(self, config):
        super().__init__()
        self.offset, self.eps = config.norm_offset, config.norm_eps
        self.weight = nn.Parameter(torch.zeros(config.n_embd) if self.offset else torch.ones(config.n_embd))
        self.bias = nn.Parameter(torch.zeros(config.n_embd)) if config.bias else None

    def forward(self, x):
        weight = 1 + self.weight if self.offset else self.weight
        return F.layer_norm(x, weight.shape, weight, self.bias, self.eps)


def make_norm(config):
    return nn.Identity() if config.norm == "none" else LayerNorm(config)


def rotary_angles(config, positions):
    """cos and sin of position * 10000^(-2i / rotary_dim): two (T, rotary_dim / 2) float32 tensors."""
    i = torch.arange(0, config.rotary_dim, 2, device=positions.device, dtype=torch.float32)
    angle = positions[:, None].float() * 10000.0 ** (-i / config.rotary_dim)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotate the first rotary_dim dimensions of x (B, H, T, D), dimension i paired with i + rotary_dim / 2."""
    half = cos.size(-1)
    first, second, rest = x.split([half, half, x.size(-1) - 2 * half], -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def within(segments):
    """Positions (B, T) counted from where each run of equal numbers in `segments` (B, T) begins."""
    places = torch.arange(segments.size(1), device=segments.device).expand_as(segments)
    begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
    return places - (places * begins).cummax(1).values


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        D = config.head_dim
        self.qkv = nn.Linear(config.n_embd, (config.n_head + 2 * config.n_kv_head) * D, bias=config.bias)
        self.proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        options = dict(config.scorer_options)
        if config.scorer == "cosformer":
            options["horizon"] = config.context  # the same for cached and uncached decoding
        self.scorer = make_scorer(config.scorer, config.n_head, **options)

    def forward(self, x, angles, mask, past):
        """x (B, T, C); past: None or (k, v) of earlier tokens -> (B, T, C) and (k, v) of all tokens so far."""
        config = self.config
        B, T, C = x.shape
        D = config.head_dim
        heads = self.qkv(x).view(B, T, -1, D).transpose(1, 2)  # (B, T, (H + 2 Hkv) D) -> (B, H + 2 Hkv, T, D)
        q, k, v = heads.split([config.n_head, config.n_kv_head, config.n_kv_head], 1)
        if angles is not None:
            q, k = rotate(q, *angles), rotate(k, *angles)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)  # (B, Hkv, earlier + T, D)
        y = attend(q, k, v, self.scorer, causal=config.causal, mask=mask, path=config.path,
                   dropout_p=config.dropout if self.training else 0.0)
        y = y.transpose(1, 2).reshape(B, T, C)  # (B, H, T, D) -> (B, T, H D = C)
        return F.dropout(self.proj(y), config.dropout, self.training), (k, v)


class FeedForward(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.up = nn.Linear(config.n_embd, config.n_ff, bias=config.bias)
        self.proj = nn.Linear(config.n_ff, config.n_embd, bias=config.bias)

    def forward(self, x):
        x = self.up(x)
        x = x.relu().square() if self.config.activation == "relu2" else F.gelu(x)
        return F.dropout(self.proj(x), self.config.dropout, self.training)


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.post = config.norm == "post"
        self.norm1, self.attn = make_norm(config), Attention(config)
        self.norm2, self.ff = (make_norm(config), FeedForward(config)) if config.n_ff else (None, None)

    def forward(self, x, angles, mask, past, chosen=None):
        """x (B, T, C) -> (B, T, C), or (N, C) of the N positions where boolean chosen (B, T) is True: after the attention no
        position needs another one. And the keys and values of all tokens so far."""
        y, kv = self.attn(x if self.post else self.norm1(x), angles, mask, past)
        x = self.norm1(x + y) if self.post else x + y
        if chosen is not None:
            x = x[chosen]  # (B, T, C) -> (N, C)
        if self.ff:
            x = self.norm2(x + self.ff(x)) if self.post else x + self.ff(self.norm2(x))
        return x, kv


class MaskedHead(nn.Module):
    """What RoBERTa puts between its last layer and the transposed embedding, and the bias behind that."""

    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.n_embd, config.n_embd)
        self.norm = LayerNorm(config)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, x, embedding):
        """x (..., C), embedding (V, C) -> logits (..., V)."""
        return F.linear(self.norm(F.gelu(self.dense(x))), embedding, self.bias)


class Transformer(nn.Module):
    """See the top of the file. `config` is a ModelConfig; weights start as in GPT-2.

    Raises RuntimeError for a model larger than the machine's memory (instead of being killed by the system halfway).
    """

    def __init__(self, config):
        super().__init__()
        if 4 * config.n_weights > main_memory() > 0 and torch.get_default_device().type != "meta":
            raise RuntimeError(f"{4 * config.n_weights / 2**30:,.0f} GB of weights, {main_memory() / 2**30:,.0f} GB of memory")
        self.config = config
        C = config.n_embd
        if config.vocab_size:
            self.embed = nn.Embedding(config.vocab_size, C)
        else:
            self.read_in = nn.Linear(config.n_in, C)
        if config.positions == "learned":
            self.position = nn.Embedding(config.context, C)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.norm = make_norm(config)  # after the last block (pre-norm) or after the embedding (post-norm, as in BERT)
        if config.n_out:
            self.read_out = nn.Linear(C, config.n_out)
        if config.mlm_head:
            self.head = MaskedHead(config)
        self.apply(self._init)

    def _init(self, module):
        # GPT-2: 0.02 everywhere; what a block adds to the residual stream is scaled down by sqrt(number of additions), so
        # that the stream's variance does not grow with depth. (Post-norm, as in RoBERTa, normalises the stream itself.)
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        # apply() visits children first, so this comes after the 0.02.
        if isinstance(module, (Attention, FeedForward)) and self.config.norm != "post":
            nn.init.normal_(module.proj.weight, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def forward(self, inputs, targets=None, *, key_mask=None, segments=None, cache=None, first_position=0,
                at_targets=False):
        """inputs (B, T) token ids or (B, T, n_in) numbers -> (outputs, loss).

        outputs: logits (B, T, V), or (B, T, n_out). loss: mean cross-entropy in nats of the targets (B, T) other than -100;
        None without targets. key_mask: boolean (B, keys), False = padding that nobody may attend to. segments: integers
        (B, T) that number the sentences which share a row, one after the other: each attends to itself alone and counts its
        learned positions from its own start (encoders only; rotary positions are relative anyway). cache: a list from
        `new_cache()`, filled in place, so that the next call goes on where this one ended. first_position: of the first
        token. at_targets: outputs of the N positions that have a target alone, (N, V): a masked language model needs few.
        Raises ValueError when the tokens, cached ones included, outgrow the context.
        """
        config = self.config
        T, earlier = inputs.size(1), first_position + (cache[0][0].size(2) if cache and cache[0] else 0)
        if earlier + T > config.context:
            raise ValueError(f"{earlier + T} tokens are more than the model's context of {config.context}")
        positions = torch.arange(earlier, earlier + T, device=inputs.device)
        x = self.embed(inputs) if config.vocab_size else self.read_in(inputs)  # (B, T, C)
        if config.positions == "learned":
            x = x + self.position(positions if segments is None else within(segments))
        if config.norm == "post":
            x = self.norm(x)
        x = F.dropout(x, config.dropout, self.training)
        angles = rotary_angles(config, positions) if config.positions == "rotary" else None
        mask = None if key_mask is None else key_mask[:, None, None, :]  # (B, keys) -> (B, 1, 1, keys)
        if segments is not None:
            mask = segments[:, None, :, None] == segments[:, None, None, :]  # (B, T) -> (B, 1, T, T)
        chosen, last = targets != -100 if at_targets else None, config.n_layer - 1
        for i, block in enumerate(self.blocks):
            x, kv = block(x, angles, mask, cache[i] if cache else None, chosen if i == last else None)
            if cache:
                cache[i] = kv
        if config.norm != "post":
            x = self.norm(x)
        if at_targets:
            targets = targets[chosen]  # (B, T) -> (N,)
        outputs = self._read_out(x)
        if targets is None:
            return outputs, None
        return outputs, F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten(), ignore_index=-100)

    def _read_out(self, x):
        """x (..., C) -> (..., n_out), or logits (..., V) through the tied embedding."""
        if self.config.n_out:
            return self.read_out(x)
        return self.head(x, self.embed.weight) if self.config.mlm_head else F.linear(x, self.embed.weight)

    def new_cache(self):
        """An empty key/value cache for `forward`."""
        return [None] * self.config.n_layer

    @torch.no_grad()
    def generate(self, tokens, n_new, *, temperature=1.0, top_k=None, n_tokens=None, use_cache=True, generator=None):
        """Continue tokens (B, T) by n_new sampled ones -> (B, T + n_new). temperature 0: always the likeliest.

        top_k: sample among the k likeliest only. n_tokens: ids from here on (padding of the vocabulary) are never chosen.
        A text that has outgrown the context is continued from its last half context, cache or not.
        """
        training = self.training
        self.eval()
        start, seen, cache = 0, 0, self.new_cache()
        for _ in range(n_new):
            if tokens.size(1) - start > self.config.context:
                start = seen = tokens.size(1) - max(1, self.config.context // 2)
                cache = self.new_cache()
            fresh = tokens[:, seen if use_cache else start:]
            logits, _ = self(fresh, cache=cache if use_cache else None)
            logits, seen = logits[:, -1, :n_tokens].float(), tokens.size(1)  # (B, V)
            if temperature == 0:
                chosen = logits.argmax(-1, keepdim=True)
            else:
                if top_k is not None:
                    least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                    logits = logits.masked_fill(logits < least, -math.inf)
                chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat([tokens, chosen], 1)
        self.train(training)
        return tokens

    def scorers(self):
        """The scorer of every layer, in order."""
        return [block.attn.scorer for block in self.blocks]

    def n_parameters(self):
        """The exact number of parameters; the tied embedding counts once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self):
        """Floating-point operations of one token's forward and backward pass (PaLM's count, appendix B): 6 for every
        parameter of a matrix, and 6 for each of the T / 2 keys that a causal query sees on average, forward and backward,
        in both matrix products. What the scorer itself costs is not counted."""
        config = self.config
        matrices = sum(p.numel() for name, p in self.named_parameters() if p.dim() == 2 and not name.startswith("position"))
        return 6 * matrices + 12 * config.n_layer * config.n_embd * config.context // (2 if config.causal else 1)
