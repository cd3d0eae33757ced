"""SSA in transformers: masks, caches and gradients in each family, saving and loading, Trainer. Tiny random models."""

import copy
import itertools
import json
import os
import re
import types
from pathlib import Path

import pytest
import torch
from conftest import ROOT, command, refused

transformers = pytest.importorskip("transformers", reason="transformers is not installed (the extra hf)")

from transformers import AttentionInterface, AutoModelForCausalLM  # noqa: E402

import ssa_dropin  # noqa: E402
import swap  # noqa: E402
from flags import UserError  # noqa: E402
from ssa import SSA, Softmax  # noqa: E402
from ssa_dropin import ssa_attention, ssa_convert, ssa_scorers  # noqa: E402

ssa_dropin.ssa_register()
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
SIZES = dict(vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GROUPED = SIZES | dict(num_key_value_heads=2, head_dim=4)
DECODERS = {"Llama": GROUPED, "GPT2": SIZES, "Qwen2": SIZES | dict(num_key_value_heads=2), "Qwen3": GROUPED, "Gemma": GROUPED,
            "Mistral": GROUPED | dict(sliding_window=4)}
ENCODERS = {"Bert": SIZES, "Roberta": SIZES | dict(max_position_embeddings=40)}


def config(family, **changes):
    return getattr(transformers, f"{family}Config")(**(DECODERS | ENCODERS)[family] | changes)


def model_of(family, attention="ssa", kind=None, **changes):
    """Weights as after training: large enough that scores reach 3 or so, and b and n differ from head to head."""
    kind = kind or {"GPT2": "LMHeadModel", "Bert": "Model", "Roberta": "Model"}.get(family, "ForCausalLM")
    torch.manual_seed(0)
    model = getattr(transformers, family + kind)._from_config(config(family, **changes), attn_implementation=attention).eval()
    for name, parameter in model.named_parameters():
        if "ssa_norm" in name:
            parameter.data += torch.linspace(-0.5, 0.5, len(parameter))
        elif parameter.dim() == 2:
            parameter.data = torch.randn_like(parameter) / 3
    return model


def output(model, ids, **given):
    out = model(ids, **given)
    return out.logits if hasattr(out, "logits") else out.last_hidden_state


def close(got, want, tolerance=1e-5):
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * max(1, want.abs().max().item()))


IDS = torch.tensor([[5, 9, 3, 30, 7, 22, 8, 14, 3, 33], [6, 4, 17, 25, 4, 39, 12, 21, 10, 11]])
T = IDS.size(1)
LEFT, RIGHT = torch.ones_like(IDS), torch.ones_like(IDS)
LEFT[0, :3] = RIGHT[0, 7:] = 0
PADDINGS = {"whole": None, "left": LEFT, "right": RIGHT}


# --------------------------------------------------------------------------------------- what each family must get right

@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_with_softmax_in_its_place_it_is_the_model_s_own_attention(family):
    """The same function with another scorer: its masks, scale, grouped heads and sliding window are then known to be right."""
    ours, theirs = model_of(family), model_of(family, "eager")
    theirs.load_state_dict({name: x for name, x in ours.state_dict().items() if "ssa_norm" not in name})
    with_ssa = output(ours, IDS)
    for name, module in ours.named_modules():
        if hasattr(module, "ssa_norm"):
            module.ssa_norm = Softmax(4)
    assert (output(theirs, IDS) - with_ssa).abs().max() > 0.01
    for padding in PADDINGS.values():
        real = slice(None) if padding is None else padding.bool()
        close(output(ours, IDS, attention_mask=padding)[real], output(theirs, IDS, attention_mask=padding)[real])
    got, want = (model(IDS, output_attentions=True).attentions for model in (ours, theirs))
    for a, b in zip(got, want, strict=True):
        close(a, b)


@pytest.mark.parametrize("family", DECODERS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_no_look_into_the_future(family, padding):
    model, given = model_of(family), {"attention_mask": PADDINGS[padding]}
    before = output(model, IDS, **given)
    for t in (4, 6):
        changed = IDS.clone()
        changed[:, t:] = 1
        after = output(model, changed, **given)
        close(after[:, :t], before[:, :t])
        assert (after[:, t:] - before[:, t:]).abs().amax(-1).min() > 1e-3  # and the past is seen
    if PADDINGS[padding] is not None:  # what lies under the padding is not seen
        changed = IDS.masked_fill(PADDINGS[padding] == 0, 1)
        real = PADDINGS[padding].bool()
        close(output(model, changed, **given)[real], before[real])


@pytest.mark.parametrize("family", ENCODERS)
def test_an_encoder_sees_both_ways_and_no_padding(family):
    model = model_of(family)
    for padding in (LEFT, RIGHT):
        given, real = {"attention_mask": padding, "position_ids": torch.arange(T).expand(2, T)}, padding.bool()
        before = output(model, IDS, **given)
        close(output(model, IDS.masked_fill(~real, 1), **given)[real], before[real])
        for position in (4, T - 1):
            changed = IDS.clone()
            changed[1, position] = 1
            assert ((output(model, changed, **given) - before)[1].abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("family", DECODERS)
def test_cached_generation(family):
    """Step by step with a cache, the logits of the whole at once; generated with each cache, the same text."""
    model = model_of(family)
    positions = (LEFT.cumsum(-1) - 1).clamp_min(0)
    whole, cache, steps = output(model, IDS, attention_mask=LEFT, position_ids=positions), None, []
    for start, stop in ((0, 5), (5, 6), (6, 9), (9, 10)):  # several tokens at once also when the cache holds some
        out = model(IDS[:, start:stop], attention_mask=LEFT[:, :stop], position_ids=positions[:, start:stop], cache=cache,
                    use_cache=True)
        cache = out.cache
        steps.append(out.logits)
    close(torch.cat(steps, 1)[LEFT.bool()], whole[LEFT.bool()])
    options = dict(attention_mask=LEFT[:, :6], max_new_tokens=6, do_sample=False, eos_token_id=None)
    texts = [model.generate(IDS[:, :6], **options, **cache) for cache in
             ({"use_cache": False}, {}, {"cache_implementation": "static"})]
    assert torch.equal(texts[0], texts[1]) and torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_b_and_n_get_gradients(family):
    model = model_of(family, **{"attention_dropout": 0.2} if family == "Llama" else {}).train()
    model.activation_checkpointing_enable()  # once called gradient checkpointing
    for padding in PADDINGS.values():
        model.zero_grad()
        (output(model, IDS, attention_mask=padding) ** 2).mean().backward()
        for scorer in ssa_scorers(model).values():
            for parameter in scorer.parameters():
                assert parameter.grad.isfinite().all() and (parameter.grad != 0).all()


# ------------------------------------------------------------------------------------------------- the function itself

def a_module(H=4, **attributes):
    """The least that ssa_attention wants of an attention module."""
    scorer = SSA(H, b=1.3, n=1.8)
    scorer.raw_b.data += torch.linspace(-1, 1, H)
    return types.SimpleNamespace(ssa_norm=scorer, **attributes)


def power_form(q, k, v, b, n, scale, allowed, bias):
    """SSA as the paper writes it, by loops, in float64 -> (B, Q, H, D)."""
    (B, H, Q, D), Hkv = q.shape, k.size(1)
    out = torch.zeros(B, Q, H, D, dtype=F64)
    for s, h, i in itertools.product(range(B), range(H), range(Q)):
        z = k[s, h * Hkv // H] @ q[s, h, i] * scale + bias[s, h, i]
        power = (1 + b[h] * z.abs()) ** (z.sign() * n[h]) * allowed[s, h, i]
        if power.sum() > 0:
            out[s, i, h] = power @ v[s, h * Hkv // H] / power.sum()
    return out


@pytest.mark.parametrize("kind", ["none", "boolean", "floats", "biases", "none, more keys", "one query"])
def test_the_function_is_the_paper_s_formula(kind):
    B, H, Hkv, Q, K, D = 2, 4, 2, 5, 5, 3
    K, Q = {"none, more keys": (8, Q), "one query": (8, 1)}.get(kind, (K, Q))
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, heads, length, D, generator=random, dtype=F64) for heads, length in ((H, Q), (Hkv, K), (Hkv, K)))
    allowed, bias = torch.ones(B, H, Q, K, dtype=torch.bool), torch.zeros(B, H, Q, K, dtype=F64)
    mask = None
    if kind.startswith("none"):
        allowed = allowed.tril()  # from the first key on: the other keys of a static cache are empty yet
    elif kind != "one query":
        allowed = allowed.tril()
        allowed[0, :, 2] = False  # a row with nothing to attend to
        allowed[1, :, :, 0] = False
        mask = allowed[:, :1]
        if kind != "boolean":
            bias = torch.randn(B, 1, Q, K, generator=random, dtype=F64).expand(B, H, Q, K) * (kind == "biases")
            mask = bias[:, :1].masked_fill(~mask, torch.finfo(F64).min)
    module = a_module(is_causal=True)
    got, weights = ssa_attention(module, q, k, v, mask, scaling=0.7)
    want = power_form(q, k, v, module.ssa_norm.b.double(), module.ssa_norm.n.double(), 0.7, allowed, bias)
    close(got, want, 1e-6)
    assert weights is None
    got, weights = ssa_attention(module, q, k, v, mask, scaling=0.7, output_attentions=True)
    close(got, want, 1e-6)
    assert weights.shape[:2] == (B, H)


def test_is_causal_is_honoured_where_there_is_no_mask():
    q, k, v = torch.randn(3, 1, 4, 5, 3).unbind()
    outs = [ssa_attention(a_module(**attributes), q, k, v, None, **given)[0] for attributes, given in
            (({}, {}), ({"is_causal": True}, {}), ({"is_causal": False}, {"is_causal": True}),
             ({"is_causal": False}, {}), ({"is_causal": True}, {"is_causal": False}))]
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2]) and torch.equal(outs[3], outs[4])
    assert (outs[2] - outs[3]).abs().max() > 0.01


def test_dropout_falls_on_the_weights():
    q, k, v = torch.randn(3, 1, 4, 6, 3).unbind()
    torch.manual_seed(0)
    outs = ssa_attention(a_module(), q.expand(4000, -1, -1, -1), k.expand(4000, -1, -1, -1), v.expand(4000, -1, -1, -1), None,
                         dropout=0.3)[0]
    close(outs.mean(0, keepdim=True), ssa_attention(a_module(), q, k, v, None)[0], 0.05)
    assert (outs[0] != outs[1]).any()


def test_what_is_not_supported_is_refused():
    q = k = v = torch.randn(1, 4, 6, 3)
    for name in ("softcap", "position_bias", "s_aux", "cu_seq_lens_q", "head_mask", "indices"):
        with pytest.raises(ValueError, match=name):
            ssa_attention(a_module(), q, k, v, None, **{name: 1})
    with pytest.raises(ValueError, match="sliding window of 4"):
        ssa_attention(a_module(), q, k, v, None, sliding_window=4)
    with pytest.raises(TypeError, match="int64"):
        ssa_attention(a_module(), q, k, v, torch.ones(1, 1, 6, 6, dtype=torch.int64))
    with pytest.raises(ValueError, match="ssa_convert"):  # softmax's modules have no b and n
        model = model_of("Llama", "sdpa")
        model.set_attn_implementation("ssa")
        model(IDS)
    gemma = transformers.Gemma2Config(**GROUPED)  # its scores are capped unless told otherwise
    with pytest.raises(ValueError, match="soft-capping"):
        transformers.Gemma2ForCausalLM._from_config(gemma, attn_implementation="ssa")(IDS)
    with pytest.raises(ValueError, match="would change nothing"):  # a model with an attention of its own
        transformers.BloomModel._from_config(transformers.BloomConfig(vocab_size=40, hidden_size=16, n_layer=1, n_head=4),
                                             attn_implementation="ssa")


@pytest.mark.parametrize("family", ["GPT2", "Bert"])
def test_cross_attention(family):
    changes = {"add_cross_attention": True, "is_decoder": True}
    kind = "Model"
    ours, theirs = model_of(family, kind=kind, **changes), model_of(family, "eager", kind=kind, **changes)
    theirs.load_state_dict({name: x for name, x in ours.state_dict().items() if "ssa_norm" not in name})
    assert len(ssa_scorers(ours)) == 4
    given = dict(encoder_hidden_states=torch.randn(2, 6, 16), encoder_attention_mask=torch.tensor([[1] * 6, [1] * 4 + [0] * 2]))
    changed = given | {"encoder_hidden_states": given["encoder_hidden_states"] * given["encoder_attention_mask"][..., None]}
    close(output(ours, IDS, **changed), output(ours, IDS, **given))
    for name, module in ours.named_modules():
        if hasattr(module, "ssa_norm"):
            module.ssa_norm = Softmax(4)
    close(output(ours, IDS, **given), output(theirs, IDS, **given))


def test_packed_sequences_and_4d_masks():
    model = model_of("Llama")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    packed = output(model, IDS[:1], position_ids=positions, use_cache=False)
    for part in (slice(0, 4), slice(4, 10)):
        close(packed[:, part], output(model, IDS[:1, part]))
    causal = torch.ones(T, T, dtype=torch.bool).tril()[None, None]
    for mask in (causal, torch.zeros(1, 1, T, T).masked_fill(~causal, torch.finfo(F32).min)):
        close(output(model, IDS, attention_mask=mask), output(model, IDS))


# ------------------------------------------------------------------------------------------------- saving and loading

def assert_same_model(model, again):
    assert model.state_dict().keys() == again.state_dict().keys()
    close(output(again, IDS), output(model, IDS), 1e-6)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert"])
def test_saved_and_loaded_by_stock_from_pretrained(family, tmp_path):
    model = model_of(family)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["attn_implementation"] == "ssa"
    for given in ({}, {"attn_implementation": "ssa"}):  # the folder knows what it is, and may be told
        again, info = type(model).from_pretrained(tmp_path, **given, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert_same_model(model, again)
    again.save_pretrained(tmp_path / "again")
    assert_same_model(model, type(model).from_pretrained(tmp_path / "again"))
    half = type(model).from_pretrained(tmp_path, dtype=BF16)
    assert half.dtype == BF16
    for name, scorer in ssa_scorers(half).items():
        assert scorer.raw_b.dtype == F32 and torch.equal(scorer.b, ssa_scorers(model)[name].b)
    close(output(half, IDS).float(), output(model, IDS), 0.1)


def test_without_registration_loading_fails_instead_of_being_softmax(tmp_path, monkeypatch):
    model_of("Llama").save_pretrained(tmp_path)
    monkeypatch.delitem(AttentionInterface._global_mapping, "ssa")
    with pytest.raises(ValueError, match='attn_implementation="ssa"'):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("options", [{}, {"b": 2.72, "n": 1.49, "freeze": "n"}])
def test_a_softmax_checkpoint_loaded_as_ssa_gets_start_values(options, tmp_path, monkeypatch):
    softmax = model_of("Llama", "sdpa")
    softmax.config.ssa = options
    softmax.save_pretrained(tmp_path)
    empty_like = torch.empty_like  # what transformers makes a missing parameter of: memory with anything in it
    monkeypatch.setattr(torch, "empty_like", lambda *args, **given: empty_like(*args, **given).fill_(torch.nan))
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="ssa", output_loading_info=True)
    assert len(info["missing_keys"]) == 4 and not info["unexpected_keys"]
    for scorer in ssa_scorers(model).values():
        close(scorer.b, torch.full((4,), options.get("b", 0.8)))
        close(scorer.n, torch.full((4,), options.get("n", 1.5)))
        assert scorer.raw_b.requires_grad and scorer.raw_n.requires_grad == ("freeze" not in options)
    weights = {name: x for name, x in model.state_dict().items() if "ssa_norm" not in name}
    assert all(torch.equal(x, softmax.state_dict()[name]) for name, x in weights.items())
    model.save_pretrained(tmp_path / "ssa")
    again = ssa_scorers(AutoModelForCausalLM.from_pretrained(tmp_path / "ssa"))
    assert all(scorer.raw_n.requires_grad == ("freeze" not in options) for scorer in again.values())


def test_trainer_trains_b_and_n(tmp_path):
    model = model_of("Llama")
    before = copy.deepcopy(model.state_dict())
    arguments = transformers.TrainingArguments(tmp_path, max_steps=3, per_device_train_batch_size=2, learning_rate=0.01,
                                               weight_decay=0.1, use_cpu=True, report_to=[], save_strategy="no",
                                               activation_checkpointing=True, disable_tqdm=True, logging_strategy="no")
    trainer = transformers.Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids} for ids in IDS])
    assert not [name for name in trainer.get_decay_parameter_names(model) if "ssa_norm" in name]
    trainer.train()
    for name, scorer in ssa_scorers(model).items():
        for letter, parameter in scorer.named_parameters():
            assert (parameter != before[f"{name}.ssa_norm.{letter}"]).all()
    trainer.save_model(tmp_path / "saved")
    assert_same_model(model.eval(), AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))


# -------------------------------------------------------------------------------------------------------- conversion

def batches(count=2):
    random = torch.Generator().manual_seed(0)
    parts = [torch.randint(3, 40, (4, length), generator=random) for length in (12, 9)[:count]]
    return [{"input_ids": ids, "labels": ids} for ids in parts]


def test_near_the_limit_it_is_softmax():
    softmax = model_of("Llama", "sdpa")
    model = ssa_convert(copy.deepcopy(softmax), n=1e4)
    close(output(model, IDS), output(softmax, IDS), 3e-3)
    report = ssa_dropin.ssa_distance(model, batches())
    losses = [torch.stack([m(**batch).loss for batch in batches()]).mean().item() for m in (softmax, model)]
    assert report["loss_softmax"] == pytest.approx(losses[0], abs=1e-5) and report["loss_ssa"] == pytest.approx(losses[1], abs=1e-5)
    assert abs(report["loss_change"]) < 1e-3 and 0 < report["mean_total_variation"] < 1e-3
    ssa_convert(model, n=1.5, b=0.8, freeze="both")  # an SSA model is set anew
    assert ssa_dropin.ssa_distance(model, batches())["mean_total_variation"] > 0.05
    assert not any(parameter.requires_grad for scorer in ssa_scorers(model).values() for parameter in scorer.parameters())


def test_the_distance_is_the_total_variation_of_the_first_layer_s_weights():
    """In the first layer both models have the same scores, so transformers' own attention weights say what the distance is."""
    softmax = model_of("Llama", "eager")
    model = ssa_convert(copy.deepcopy(softmax), n=2.0)
    variation = 0
    for batch in batches(1):
        soft, ours = (m(batch["input_ids"], output_attentions=True).attentions[0] for m in (softmax, model))
        variation = (soft - ours)[:, :, 1:].abs().sum(-1).mean((0, 2)) / 2  # a first token has one key and no choice
    got = ssa_dropin.ssa_distance(model, batches(1), rows=10**6)["total_variation"]["model.layers.0.self_attn"]
    close(got, variation.detach(), 1e-5)


def test_the_fit_finds_the_best_b_and_n():
    model = ssa_convert(model_of("Llama", "sdpa"), n=1.5, b=0.8)
    unfitted = ssa_dropin.ssa_distance(model, batches())
    report = ssa_dropin.ssa_fit(model, batches(), n_max=3.0, rows=10**6)
    assert report["mean_total_variation"] < 0.7 * unfitted["mean_total_variation"]
    again = ssa_dropin.ssa_distance(model, batches(), rows=10**6)
    assert again["mean_total_variation"] == pytest.approx(report["mean_total_variation"], abs=1e-6)
    name = "model.layers.0.self_attn"
    soft = model_of("Llama", "eager")(batches(1)[0]["input_ids"], output_attentions=True).attentions[0].double()
    report = ssa_dropin.ssa_fit(model, batches(1), n_max=3.0, rows=10**6)
    scorer = ssa_scorers(model)[name]
    assert (scorer.n < 3.0).all()

    def divergence():  # by transformers' own weights of the softmax model and what the SSA model returns
        ours = model(batches(1)[0]["input_ids"], output_attentions=True).attentions[0].double()
        return torch.where(soft > 0, soft * (soft.clamp_min(1e-300).log() - ours.clamp_min(1e-300).log()), 0.0).sum(-1).mean((0, 2))

    best = divergence()
    fitted = scorer.raw_b.data.clone(), scorer.raw_n.data.clone()
    for db, dn in itertools.product((-0.1, 0.0, 0.1), (-0.3, 0.0)):
        scorer.raw_b.data, scorer.raw_n.data = fitted[0] + db, fitted[1] + dn
        assert (divergence() >= best - 1e-5).all()


def test_wrong_conversions_are_refused():
    model = model_of("Llama", "sdpa")
    for given in ({"n": 0.5}, {"n": 0}, {"b": -1.0}, {"freeze": "all"}):
        with pytest.raises(ValueError):
            ssa_convert(model, **given)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="no b and n"):
        ssa_dropin.ssa_fit(model, batches())
    ssa_convert(model)
    with pytest.raises(ValueError, match="n_max=1"):
        ssa_dropin.ssa_fit(model, batches(), n_max=1)
    with pytest.raises(ValueError, match="no batches"):
        ssa_dropin.ssa_distance(model, [])
    with pytest.raises(ValueError, match="longer sequences"):
        ssa_dropin.ssa_distance(model, [{"input_ids": IDS[:, :1]}])


# ------------------------------------------------------------------------------------------------ a real model; README

STORIES = Path(os.environ.get("SSA_DATA_DIR", "/nowhere")) / "stories260K"
real = pytest.mark.skipif(not STORIES.exists(), reason="SSA_DATA_DIR with stories260K is not there")
STORY = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."


@real
def test_stories_are_told_as_documented():
    model, tokenizer = swap.load_stories(STORIES)
    start = torch.tensor([[tokenizer.bos]])
    told = model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=40)
    assert tokenizer.decode(told[0]).startswith(STORY)
    ids = tokenizer.encode(STORY)
    assert ids == told[0, 1:1 + len(ids)].tolist()
    assert tokenizer.encode("") == [] and tokenizer.decode([1, *tokenizer.encode("\u00e9\u4e16 0"), 2, 5]) == "\u00e9\u4e16 0"
    ssa_convert(model)
    assert torch.equal(model.generate(start, attention_mask=torch.ones_like(start), do_sample=False, max_new_tokens=40), told)


@real
def test_the_swap_test(tmp_path):
    result = command("swap.py", STORIES, "--texts=8", "--length=32", "--steps=4", "--lr=3e-3", "--out=out", cwd=tmp_path).stdout
    assert len(result.splitlines()) == 5
    result = json.loads((tmp_path / "out" / "swap.json").read_text(encoding="utf-8"))
    softmax, near, unfitted, fitted = result["ways"].values()
    assert softmax["loss"] < fitted["loss"] < unfitted["loss"] < result["unigram"]
    assert abs(near["loss"] - softmax["loss"]) < 1e-3
    assert near["total_variation"] < fitted["total_variation"] < unfitted["total_variation"]
    assert unfitted["loss_tuned"] < unfitted["loss"] - 0.02
    assert unfitted["b"] != unfitted["b_tuned"] and unfitted["n"] != unfitted["n_tuned"]
    assert torch.tensor(fitted["n"]).shape == (5, 8) and result["flags"]["texts"] == 8 and "machine" in result


def test_the_swap_test_names_what_is_wrong(tmp_path):
    refused(command("swap.py", cwd=tmp_path, check=False), "no stories260K.bin")
    (tmp_path / "stories260K.bin").write_bytes(bytes(7 * [8, 0, 0, 0]))
    refused(command("swap.py", ".", "--n-max=1", cwd=tmp_path, check=False), "--n-max=1")
    refused(command("swap.py", ".", cwd=tmp_path, check=False), "its header wants")
    with pytest.raises(UserError, match="cannot be read"):
        swap.StoriesTokenizer(tmp_path / "tok512.bin", 512)
    (tmp_path / "tok512.bin").write_bytes(bytes(40))
    with pytest.raises(UserError, match="before its 512 pieces"):
        swap.StoriesTokenizer(tmp_path / "tok512.bin", 512)


def test_the_readme_s_snippets_run(tmp_path, monkeypatch, capsys):
    section = (ROOT / "README.md").read_text(encoding="utf-8").split("## Use SSA in your model")[1].split("\n## ")[0]
    snippets = re.findall(r"```python\n(.*?)```", section, re.S)
    assert len(snippets) == 3
    monkeypatch.chdir(tmp_path)
    model_of("Llama", "sdpa").save_pretrained("my-softmax-model")
    for snippet in snippets:
        exec(snippet, {})
    printed = capsys.readouterr().out
    assert "torch.Size([2, 10, 64])" in printed and "model.layers.1.self_attn" in printed and "loss_change" in printed
