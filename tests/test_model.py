"""model.py and config.py: shapes, parameters, cache, and that the scorer alone decides what attention does."""

import math

import entmax
import pytest
import torch

import ssa_flash
from config import MODEL_PRESETS, ModelConfig
from flags import SharedFlags
from model import Transformer
from ssa import SCORERS

NAMES = list(SCORERS)


def tiny(scorer="ssa", **changes):
    torch.manual_seed(0)
    shape = dict(n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_ff=64, context=16, vocab_size=50, scorer=scorer)
    return Transformer(ModelConfig(**{**shape, **changes}))


def tokens(B=2, T=12, seed=1):
    return torch.randint(50, (B, T), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name, vocab_size, parameters", [
    ("nemotron-114m", 50304, 50304 * 768 + 12 * (768 * (768 + 2 * 256) + 768 * 768 + 2 * 768 * 3072 + 2 * 768 + 2 * 24) + 768),
    ("gpt2-124m", 50304, 124_475_904 + 12 * 2 * 12)])
def test_published_shapes_have_the_published_sizes(name, vocab_size, parameters):
    # gpt2: 124,439,808 is the known count with 50,257 tokens; padding adds 47 rows of 768. SSA adds 2 scalars a head.
    with torch.device("meta"):
        model = Transformer(ModelConfig(vocab_size=vocab_size, **MODEL_PRESETS[name]))
    assert model.n_parameters() == parameters


def test_flags_offer_exactly_the_scorers_and_paths_that_exist():
    hints = SharedFlags.__annotations__
    assert set(hints["scorer"].__args__) == set(SCORERS)
    assert set(hints["path"].__args__) == {"auto", *ssa_flash.PATHS}


def test_a_parameter_exists_only_if_the_scorer_uses_it():
    extra = {name: sorted({n.split(".")[-1] for n, _ in tiny(name).named_parameters() if "scorer" in n}) for name in NAMES}
    assert extra.pop("ssa") == ["raw_b", "raw_n"] and extra.pop("temperature") == ["raw_tau"]
    assert not any(extra.values())


@pytest.mark.parametrize("scorer", NAMES)
@pytest.mark.parametrize("kind", [{}, dict(positions="learned", norm="post", norm_offset=False, bias=True, activation="gelu"),
                                  dict(positions="none", n_kv_head=4)])
def test_cached_and_uncached_logits_agree(scorer, kind):
    model = tiny(scorer, **kind).double()
    x = tokens()
    whole, _ = model(x)
    cache = model.new_cache()
    parts = [model(x[:, :5], cache=cache)[0]] + [model(x[:, i:i + 1], cache=cache)[0] for i in range(5, 12)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("scorer", NAMES)
def test_generation_is_the_same_with_and_without_cache_also_past_the_context(scorer):
    model = tiny(scorer).double()
    one, other = (model.generate(tokens(), 20, temperature=0.8, top_k=10, use_cache=cache, n_tokens=40,
                                 generator=torch.Generator().manual_seed(3)) for cache in (True, False))
    assert one.shape == (2, 32) and torch.equal(one, other) and one[:, 12:].max() < 40
    assert not torch.equal(one, model.generate(tokens(), 20, temperature=0.8, top_k=10, n_tokens=40,
                                               generator=torch.Generator().manual_seed(4)))


def test_greedy_generation_takes_the_likeliest_token():
    model, x = tiny(), tokens(B=1)
    assert model.generate(x, 1, temperature=0)[0, -1] == model(x)[0][0, -1].argmax()


@pytest.mark.parametrize("scorer", NAMES)
def test_no_token_sees_the_future(scorer):
    model, x = tiny(scorer).double(), tokens()
    changed = x.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    before, after = model(x)[0], model(changed)[0]
    assert torch.equal(before[:, :7], after[:, :7]) and not torch.equal(before[:, 7:], after[:, 7:])


def test_an_encoder_sees_both_directions_but_no_padding():
    model, x = tiny(causal=False).double(), tokens()
    real = torch.ones(2, 12, dtype=torch.bool)
    real[:, 9:] = False
    padded, _ = model(x, key_mask=real)
    torch.testing.assert_close(padded[:, :9], model(x[:, :9])[0], rtol=1e-10, atol=1e-10)
    changed = x.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 50
    assert not torch.equal(model(changed, key_mask=real)[0][:, 0], padded[:, 0])


def test_continuous_inputs_and_outputs():
    model = tiny(vocab_size=0, n_in=3, n_out=2)
    outputs, loss = model(torch.randn(2, 12, 3))
    assert outputs.shape == (2, 12, 2) and loss is None


def test_initial_weights_are_as_in_gpt2():
    model = tiny(n_layer=8, n_embd=128, n_ff=512)
    for name, p in model.named_parameters():
        if name.endswith(("qkv.weight", "up.weight", "embed.weight")):
            assert p.std().item() == pytest.approx(0.02, rel=0.1)
        if name.endswith("proj.weight"):
            assert p.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.1)
    x = torch.randint(50, (4, 16))
    assert model(x, x.roll(1, 1))[1].item() == pytest.approx(math.log(50), abs=0.3)


def test_dropout_acts_in_training_alone():
    model, x = tiny(dropout=0.3), tokens()
    assert not torch.equal(model(x)[0], model(x)[0])
    model.eval()
    assert torch.equal(model(x)[0], model(x)[0])


# The scorer in effect. The reference replaces what attention does with the scores by an independent formula.

REFERENCES = {
    "softmax": lambda z, allowed, s: z.masked_fill(~allowed, -math.inf).softmax(-1),
    "ssa": lambda z, allowed, s: _normalised(
        (1 + s.b.view(-1, 1, 1) * z.abs()) ** (z.sign() * s.n.view(-1, 1, 1)) * allowed),
    "temperature": lambda z, allowed, s: (z / s.tau.view(-1, 1, 1)).masked_fill(~allowed, -math.inf).softmax(-1),
    "sparsemax": lambda z, allowed, s: entmax.sparsemax(z.masked_fill(~allowed, -1e9), dim=-1),
    "entmax15": lambda z, allowed, s: entmax.entmax15(z.masked_fill(~allowed, -1e9), dim=-1),
    "sa_softmax": lambda z, allowed, s: _sa_softmax(z, allowed),
    "hardmax": lambda z, allowed, s: _normalised(((z == z.masked_fill(~allowed, -1e9).amax(-1, keepdim=True)) * allowed).to(z.dtype)),
}


def _normalised(w):
    return w / w.sum(-1, keepdim=True)


def _sa_softmax(z, allowed):
    low, high = (getattr(z.masked_fill(~allowed, 0), f)(-1, keepdim=True) for f in ("amin", "amax"))
    return (z - low) / (high - low) * z.masked_fill(~allowed, -math.inf).softmax(-1) * allowed


def reference_attend(q, k, v, scorer, *, causal, mask, path, dropout_p):
    """Attention written out anew, with the weights from REFERENCES."""
    name = next(n for n, c in SCORERS.items() if type(scorer) is c)
    k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    allowed = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril()
    if name == "cosformer":
        distance = torch.arange(q.size(2))[:, None] - torch.arange(k.size(2))
        power = torch.einsum("bhqd,bhkd->bhqk", q.relu(), k.relu()) * torch.cos(math.pi / 2 * distance.double() / 16) * allowed
        weights = power / power.sum(-1, keepdim=True).clamp_min(1e-12)
    else:
        weights = REFERENCES[name](torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(q.size(-1)), allowed, scorer)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


@pytest.mark.parametrize("scorer", NAMES)
def test_every_scorer_is_in_effect_in_the_model(scorer, monkeypatch):
    model = tiny(scorer).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("qkv.weight"):
                p.mul_(20)  # scores of about 1: with the initial ones of 0.01 every scorer is the plain average
            if "scorer" in name:
                p.add_(torch.linspace(-0.5, 0.5, p.numel()))  # heads that differ
    x = tokens()
    logits = model(x)[0]
    for other in NAMES:
        twin = tiny(other, scorer_options=dict(tau=2.0) if other == "temperature" else {}).double()
        twin.load_state_dict({k: v for k, v in model.state_dict().items() if "scorer" not in k}, strict=False)
        assert scorer == other or (twin(x)[0] - logits).abs().max() > 1e-4, f"{scorer} computes what {other} does"
    monkeypatch.setattr("model.attend", reference_attend)
    torch.testing.assert_close(logits, model(x)[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("scorer", ["ssa", "temperature"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal, padded", [(True, False), (True, True), (False, True)])
def test_scorer_parameters_train_in_every_mask_and_dtype(scorer, dtype, causal, padded):
    model, x = tiny(scorer, causal=causal), tokens()
    real = torch.ones(2, 12, dtype=torch.bool)
    real[0, 8:] = False
    optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
    before = {n: p.clone() for n, p in model.named_parameters() if "scorer" in n}
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        _, loss = model(x, x.roll(-1, 1), key_mask=real if padded else None)
    loss.backward()
    optimizer.step()
    for name, p in model.named_parameters():
        if "scorer" in name:
            assert p.grad.isfinite().all() and (p.grad != 0).all(), name
            assert (p != before[name]).all() and p.dtype == torch.float32, name


@pytest.mark.parametrize("scorer", NAMES)
def test_a_row_of_padding_leaves_everything_finite(scorer):
    model, x = tiny(scorer), tokens()
    real = torch.ones(2, 12, dtype=torch.bool)
    real[0] = False
    targets = x.masked_fill(~real, -100)
    _, loss = model(x, targets, key_mask=real)
    loss.backward()
    assert loss.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("changes, part", [
    (dict(n_head=5), "n_head=5: does not divide n_embd=32"), (dict(n_kv_head=3), "n_kv_head=3: does not divide n_head=4"),
    (dict(n_layer=0), "n_layer=0"), (dict(n_embd=4), "rotating dimensions"), (dict(norm="mid"), "norm=mid"),
    (dict(vocab_size=0), "vocab_size=0"), (dict(dropout=1.0), "dropout=1.0"), (dict(scorer="soft"), "'soft' is unknown")])
def test_a_shape_that_cannot_be_built_is_named(changes, part):
    with pytest.raises(ValueError, match=part):
        tiny(**changes)


def test_more_tokens_than_the_context_are_refused():
    with pytest.raises(ValueError, match="17 tokens are more than the model's context of 16"):
        tiny()(tokens(T=17))


def test_a_config_survives_its_dict_and_refuses_a_foreign_one():
    config = tiny().config
    assert ModelConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ValueError, match="colour"):
        ModelConfig.from_dict({**config.to_dict(), "colour": 3})
    with pytest.raises(ValueError, match="incomplete"):
        ModelConfig.from_dict({"n_layer": 2})
