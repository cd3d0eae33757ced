"""SSA in transformers: masks, caches and gradients in each family, and the function that they call. Tiny random models."""

import copy
import itertools
import re
import types
import warnings

import pytest
import torch
from tiny_hf import DECODERS, ENCODERS, GROUPED, IDS, LEFT, PADDINGS, RIGHT, SIZES, T, close, model_of, output, transformers

import ssa_dropin
from ssa import SSA, Softmax
from ssa_dropin import ssa_attention, ssa_scorers

F32, F64 = torch.float32, torch.float64


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
    with pytest.raises(ValueError, match="would change nothing"):  # a model without any
        transformers.MambaModel._from_config(transformers.MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1),
                                             attn_implementation="ssa")


@pytest.mark.parametrize("options, words", [(3, "must be a dict"), ({"beta": 1}, "must be a dict of b, n and freeze"),
                                            ({"b": "0.8"}, "b='0.8': must be a number"), ({"n": 0.5}, "n=0.5"),
                                            ({"freeze": "all"}, "freeze='all'"), ({"b": 1e40}, "b=1e\\+40"), (0, "must be a dict")])
def test_wrong_options_are_named(options, words):
    with pytest.raises(ValueError, match=words):
        transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**GROUPED, ssa=options), attn_implementation="ssa")


def test_a_config_that_says_ssa_never_becomes_softmax(tmp_path):
    config = transformers.LlamaConfig(**GROUPED, ssa={"b": 2.0})
    for asked in (None, "sdpa", "eager"):
        with pytest.raises(ValueError, match="config.ssa asks for SSA"):
            transformers.LlamaForCausalLM._from_config(config, attn_implementation=asked)
    model_of("Llama").save_pretrained(tmp_path)  # without options of its own
    with pytest.raises(ValueError, match="config.ssa asks for SSA"):
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    softmax = transformers.AutoConfig.from_pretrained(tmp_path)
    softmax.ssa = None
    transformers.LlamaForCausalLM.from_pretrained(tmp_path, config=softmax, attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="config.ssa asks for SSA"):
        model.set_attn_implementation("sdpa")
    model.config.ssa = None  # so be it: and so it is saved
    model.set_attn_implementation("sdpa")
    softmax_out = output(model, IDS)
    model.save_pretrained(tmp_path / "softmax")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "softmax").eval()
    assert again.config._attn_implementation == "sdpa"
    close(output(again, IDS), softmax_out)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Bert"])
def test_softmax_set_by_hand_is_an_error_at_the_next_forward(family, tmp_path):
    model = model_of(family)
    want = output(model, IDS)
    model.save_pretrained(tmp_path)
    converted = ssa_dropin.ssa_convert(model_of(family, "sdpa"))
    for each in (model, copy.deepcopy(model), type(model).from_pretrained(tmp_path), converted):
        for asked in ("sdpa", "eager", None):
            each.config._attn_implementation = asked
            with pytest.raises(ValueError, match="config.ssa asks for SSA"):
                output(each, IDS)
            with pytest.raises(ValueError, match="config.ssa asks for SSA"):
                each.train().activation_checkpointing_enable()
                output(each, IDS)
            each.eval().config._attn_implementation = "ssa"
            assert output(each, IDS).shape == want.shape
    close(output(model, IDS), want)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SSA already
        ssa_dropin.ssa_convert(model)
    assert all(len(module._forward_pre_hooks) == 1 for module in model.modules() if hasattr(module, "ssa_norm"))


def test_the_check_of_each_forward_does_not_break_compiled_graphs():
    model = model_of("Llama")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    close(compiled(IDS, use_cache=False).logits, output(model, IDS, use_cache=False))


def test_a_part_of_a_model_may_be_ssa_and_loading_it_says_how(tmp_path):
    text = GROUPED | dict(model_type="llama")
    config = transformers.LlavaConfig(vision_config=VISION | dict(model_type="clip_vision_model"), text_config=text)
    kind, part = transformers.LlavaForConditionalGeneration, {"text_config": "ssa"}
    kind._from_config(config, attn_implementation=part | {"vision_config": "sdpa"}).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=re.escape('a dict, such as {"text_config": "ssa"}')):
        kind.from_pretrained(tmp_path)
    assert len(ssa_scorers(kind.from_pretrained(tmp_path, attn_implementation=part))) == 2


VISION = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4)


def test_attention_that_stays_softmax_is_named():
    for head in (True, False):
        config = transformers.SiglipVisionConfig(**VISION, vision_use_head=head)

        def ways():
            yield lambda: transformers.SiglipVisionModel._from_config(config, attn_implementation="ssa")
            softmax = transformers.SiglipVisionModel._from_config(config, attn_implementation="sdpa")
            yield lambda: ssa_dropin.ssa_convert(softmax)

        for way in ways():
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                model = way()
            said = [str(warning.message) for warning in seen if "keep softmax" in str(warning.message)]
            assert ["head.attention (MultiheadAttention)" in message for message in said] == [True] * head
            assert len(ssa_scorers(model)) == 1
            config.ssa = None


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS, "GPTJ", "DistilBert", "ViT", "CLIPVision", "Jamba", "Blip2"])
def test_models_whose_attention_is_all_ssa_get_no_warning(family):
    small = dict(Jamba=GROUPED | dict(attn_layer_offset=1, attn_layer_period=2, use_mamba_kernels=False, num_experts=2),
                 GPTJ=SIZES | dict(rotary_dim=4), DistilBert=SIZES | dict(dim=16, hidden_dim=24), ViT=VISION, CLIPVision=VISION)
    if family == "Blip2":  # its Blip2QFormerAttention has no scorer, but the module inside it has
        sizes = SIZES | dict(encoder_hidden_size=16, cross_attention_frequency=1)
        text = SIZES | dict(model_type="opt", ffn_dim=24, word_embed_proj_dim=16)
        config = transformers.Blip2Config(vision_config=VISION, qformer_config=sizes, text_config=text, num_query_tokens=2)
        kind = transformers.Blip2ForConditionalGeneration
    else:
        config = getattr(transformers, f"{family}Config")(**(DECODERS | ENCODERS | small)[family])
        kind = getattr(transformers, f"{family}Model")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = kind._from_config(copy.deepcopy(config), attn_implementation="ssa")
        converted = ssa_dropin.ssa_convert(kind._from_config(config, attn_implementation="eager"))
    assert ssa_scorers(model).keys() == ssa_scorers(converted).keys()
    assert len(ssa_scorers(model)) == {"ViT": 1, "CLIPVision": 1, "Jamba": 1, "Blip2": 7}.get(family, 2)


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
