"""SSAMultiheadAttention against torch.nn.MultiheadAttention, inside PyTorch's own Transformer layers, and as installed."""

import copy
import itertools
import subprocess
import sys
import tomllib
import warnings
import zipfile
from importlib import metadata

import pytest
import torch
import torch.nn as nn
from conftest import ROOT, command

import ssa_dropin
from ssa import SSA, make_scorer
from ssa_dropin import SSAMultiheadAttention, ssa_replace
from ssa_mask import ssa_attend, ssa_split_mask

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
N, L, S, E, H = 2, 5, 7, 8, 4


def randn(*shape, seed=0, dtype=F32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def twins(scorer="softmax", **options):
    """nn.MultiheadAttention, and ours with the same weights: random, biases included."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(E, H, **options)
    ours = SSAMultiheadAttention(E, H, **options, scorer=scorer)
    for parameter in theirs.parameters():
        parameter.data = torch.randn_like(parameter) / 2
    loaded = ours.load_state_dict(theirs.state_dict(), strict=scorer == "softmax")
    assert not loaded.unexpected_keys and loaded.missing_keys == [f"scorer.{name}" for name, _ in ours.scorer.named_parameters()]
    return theirs, ours


def masks():
    """name -> (attn_mask, key_padding_mask), in PyTorch's terms: True = may not attend. No row is masked as a whole."""
    attn, per_head = randn(L, S, seed=1) > 0.5, randn(N * H, L, S, seed=2) > 0.5
    pad = torch.zeros(N, S, dtype=torch.bool)
    pad[0, 5:] = True
    attn[:, 0] = per_head[:, :, 0] = False
    added = randn(L, S, seed=3).masked_fill(attn, -torch.inf)
    return {"none": (None, None), "boolean": (attn, None), "a head": (per_head, pad), "padding": (None, pad),
            "floats": (added, torch.zeros(N, S).masked_fill(pad, -torch.inf)), "float padding": (None, randn(N, S, seed=4)),
            "float a head": (randn(N * H, L, S, seed=5), None)}


def close(got, want, tolerance=2e-6):
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance * max(1, want.abs().max().item()))


# ------------------------------------------------------------------------------------------- nn.MultiheadAttention, again

OPTIONS = [{}, {"bias": False}, {"batch_first": True}, {"kdim": 6, "vdim": 3}, {"add_bias_kv": True}, {"add_zero_attn": True},
           {"kdim": 6, "bias": False, "add_bias_kv": True, "add_zero_attn": True, "batch_first": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_with_softmax_it_is_torchs(options):
    theirs, ours = twins(**options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    query, key, value = randn(N, L, E), randn(N, S, theirs.kdim, seed=1), randn(N, S, theirs.vdim, seed=2)
    if not theirs.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    for name, (attn_mask, padding) in masks().items():
        for need, average in ((True, True), (True, False), (False, True)):
            given = dict(attn_mask=attn_mask, key_padding_mask=padding, need_weights=need, average_attn_weights=average)
            (want, want_weights), (got, weights) = theirs(query, key, value, **given), ours(query, key, value, **given)
            close(got, want)
            assert (weights is None) == (want_weights is None), name
            if need:
                close(weights, want_weights)
    gradients = [torch.autograd.grad((module(query, key, value)[0] ** 2).sum(), list(module.parameters()))
                 for module in (theirs, ours)]
    for got, want in zip(*gradients, strict=True):
        close(got, want, 1e-5)


@pytest.mark.parametrize("batch_first", [False, True])
def test_without_a_batch_and_with_the_causal_hint(batch_first):
    theirs, ours = twins(batch_first=batch_first)
    x, key = randn(L, E), randn(S, E, seed=1)
    attn_mask, padding = masks()["floats"]
    for given in ({}, {"attn_mask": attn_mask, "key_padding_mask": padding[0]}, {"attn_mask": randn(H, L, S, seed=5)}):
        (got, weights), (want, want_weights) = ours(x, key, key, **given), theirs(x, key, key, **given)
        close(got, want)
        close(weights, want_weights)
    causal = nn.Transformer.generate_square_subsequent_mask(L)
    for need in (True, False):
        given = dict(attn_mask=causal, is_causal=True, need_weights=need)
        close(ours(x, x, x, **given)[0], theirs(x, x, x, **given)[0])
        x3 = randn(3, L, E) if batch_first else randn(L, 3, E)
        close(ours(x3, x3, x3, **given)[0], theirs(x3, x3, x3, **given)[0])
    with pytest.raises(RuntimeError, match="attn_mask"):
        ours(x, x, x, is_causal=True)
    _, appended = twins(add_bias_kv=True, batch_first=batch_first)  # every query sees the appended key, hint or no hint
    close(appended(x, x, x, **given)[0], appended(x, x, x, attn_mask=causal)[0])


def test_ssa_is_the_paper_s_formula():
    """The power form by loops, in float64, with a boolean mask a head, a bias, and appended keys."""
    _, ours = twins("ssa", kdim=6, vdim=3, add_bias_kv=True, add_zero_attn=True, batch_first=True)
    ours.double()
    ours.scorer.raw_b.data += randn(H, seed=8)
    query, key, value = randn(N, L, E, dtype=F64), randn(N, S, 6, seed=1, dtype=F64), randn(N, S, 3, seed=2, dtype=F64)
    bias, pad = randn(N * H, L, S, seed=3, dtype=F64), masks()["padding"][1]
    got, weights = ours(query, key, value, attn_mask=bias, key_padding_mask=pad, average_attn_weights=False)
    b_q, b_k, b_v = ours.in_proj_bias.chunk(3)
    q, k, v = query @ ours.q_proj_weight.T + b_q, key @ ours.k_proj_weight.T + b_k, value @ ours.v_proj_weight.T + b_v
    want, D = torch.zeros(N, L, E, dtype=F64), E // H
    for s, h, i in itertools.product(range(N), range(H), range(L)):
        part = slice(h * D, (h + 1) * D)
        keys = torch.cat([k[s, :, part], ours.bias_k[0, :, part], torch.zeros(1, D)])
        values = torch.cat([v[s, :, part], ours.bias_v[0, :, part], torch.zeros(1, D)])
        z = keys @ q[s, i, part] / D**0.5 + torch.cat([bias[s * H + h, i], torch.zeros(2)])
        power = (1 + ours.scorer.b[h].double() * z.abs()) ** (z.sign() * ours.scorer.n[h].double())
        power = power * torch.cat([~pad[s], torch.ones(2, dtype=torch.bool)])
        close(weights[s, h, i], power / power.sum(), 1e-6)  # b and n are float32
        want[s, i, part] = power / power.sum() @ values
    close(got, want @ ours.out_proj.weight.T + ours.out_proj.bias, 1e-6)


WAYS = {"fast": dict(need_weights=False), "weights": {}, "bias": dict(attn_mask=randn(L, L)),
        "causal": dict(attn_mask=torch.ones(L, L, dtype=torch.bool).triu(1), is_causal=True, need_weights=False)}


@pytest.mark.parametrize("way", WAYS)
def test_b_and_n_train_and_the_ways_agree(way):
    attention = SSAMultiheadAttention(E, H, batch_first=True)
    x = randn(N, L, E)
    out, _ = attention(x, x, x, **WAYS[way])
    want, _ = attention(x, x, x, attn_mask=WAYS[way].get("attn_mask"), need_weights=True)
    close(out, want)
    (out ** 2).sum().backward()
    for parameter in attention.parameters():
        assert parameter.grad.isfinite().all()
    assert (attention.scorer.raw_b.grad != 0).all() and (attention.scorer.raw_n.grad != 0).all()


def test_dropout_while_training_only():
    _, attention = twins("ssa", dropout=0.5, batch_first=True)
    x = randn(1, L, E)
    torch.manual_seed(0)
    mean = attention(*[x.expand(5000, L, E)] * 3, need_weights=False)[0].mean(0, keepdim=True)
    assert not torch.equal(attention(x, x, x)[0], attention(x, x, x)[0])
    attention.eval()
    close(mean, attention(x, x, x)[0], 0.1)  # dropping weights and scaling the rest keeps the expectation
    assert torch.equal(attention(x, x, x)[0], attention(x, x, x)[0])


def test_nothing_to_attend_to_gives_zeros():
    _, attention = twins("ssa", batch_first=True)
    x, nothing = randn(N, L, E).requires_grad_(), torch.ones(N, L, dtype=torch.bool)
    for need in (True, False):
        out, _ = attention(x, x, x, key_padding_mask=nothing, need_weights=need)
        close(out, attention.out_proj.bias.expand(N, L, E))
        out.sum().backward()
        assert all(p.grad.isfinite().all() for p in [x, *attention.scorer.parameters()])


def test_half_precision_keeps_b_and_n():
    attention = SSAMultiheadAttention(E, H, batch_first=True)
    x = randn(N, L, E)
    want = attention(x, x, x)[0]
    with torch.autocast("cpu", BF16):
        close(attention(x, x, x, need_weights=False)[0].float(), want, 0.03)
    attention.bfloat16()
    assert attention.scorer.raw_b.dtype == F32 and attention.in_proj_weight.dtype == BF16
    out, weights = attention(*[x.bfloat16()] * 3)
    assert out.dtype == weights.dtype == BF16
    close(out.float(), want, 0.03)


def test_wrong_arguments_are_named():
    for options, part in (({"scorer": "sofmax"}, "sofmax"), ({"tau": 2}, "tau"), ({"b": -1}, "b=-1"), ({"n": 0.5}, "n=0.5")):
        with pytest.raises(ValueError, match=part):
            SSAMultiheadAttention(E, H, **options)
    attention, x = SSAMultiheadAttention(E, H, batch_first=True), randn(N, L, E)
    for given, error, part in (({"attn_mask": torch.zeros(L, L + 1)}, RuntimeError, "attn_mask has shape"),
                               ({"key_padding_mask": torch.zeros(N, L + 1)}, RuntimeError, "key_padding_mask has shape"),
                               ({"attn_mask": torch.zeros(L, L, dtype=torch.int64)}, TypeError, "int64")):
        with pytest.raises(error, match=part):
            attention(x, x, x, **given)
    with pytest.raises(ValueError, match="nothing to replace"):
        ssa_replace(nn.Linear(2, 2))
    with pytest.raises(AttributeError, match="ssa_nothing"):
        ssa_dropin.ssa_nothing


def test_without_transformers_the_rest_works_and_says_what_is_missing(monkeypatch):
    for name in ("ssa_hf", "ssa_convert"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    with pytest.raises(ImportError, match="ssa_convert needs transformers: pip install"):
        ssa_dropin.ssa_convert


# --------------------------------------------------------------------------------------------------------- float masks

def test_minus_infinity_and_the_dtype_s_minimum_are_masks_and_the_rest_is_a_bias():
    allowed = torch.tensor([True, False, True])
    for dtype in (F32, F64, BF16, torch.float16):
        for masked in (-torch.inf, torch.finfo(dtype).min):
            got, bias = ssa_split_mask(torch.zeros(3, dtype=dtype).masked_fill(~allowed, masked))
            assert torch.equal(got, allowed) and bias is None
    assert not ssa_split_mask(torch.tensor(torch.finfo(BF16).min))[0]  # bfloat16's minimum, cast to float32
    got, bias = ssa_split_mask(torch.tensor([-1e9, -torch.inf, 0.5]))
    assert torch.equal(got, allowed) and bias.tolist() == [-1e9, 0.0, 0.5]


def test_a_bias_that_is_trained_keeps_its_gradient_at_zero():
    bias = torch.zeros(H, L, L, requires_grad=True)
    mask, split = ssa_split_mask(bias)
    q = k = v = randn(1, H, L, 4)
    out, _ = ssa_attend(q, k, v, SSA(H), mask=mask, bias=split)
    assert (torch.autograd.grad((out ** 2).sum(), bias)[0] != 0).all()
    with pytest.raises(ValueError, match="boolean mask"):
        ssa_attend(q, k, v, make_scorer("cosformer", H), bias=bias)


# ----------------------------------------------------------------------------------- inside PyTorch's Transformer layers

def encoder(**options):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 16, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options.get("norm_first", False))


def replaced_before(scorer, **options):
    """The layer gets its attention before the encoder is built, which then looks at it."""
    layer = encoder(**options).layers[0]
    torch.manual_seed(0)
    layer.self_attn = ssa_replace(layer.self_attn, scorer=scorer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that it will not use nested tensors
        return nn.TransformerEncoder(layer, 2)


PADDING = torch.arange(6) >= torch.tensor([4, 6])[:, None]  # left-aligned, as PyTorch's fast path wants it


@pytest.mark.parametrize("build", [lambda scorer, **options: ssa_replace(encoder(**options), scorer=scorer), replaced_before])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
def test_the_encoder_is_ssa_also_under_eval_and_no_grad(build, norm_first, padding):
    x, real = randn(2, 6, E), slice(None) if padding is None else ~padding
    for scorer in ("ssa", "softmax"):
        model = build(scorer, norm_first=norm_first)
        want = model.train()(x, src_key_padding_mask=padding)[real]
        with torch.no_grad():
            close(model.eval()(x, src_key_padding_mask=padding)[real], want)
        with torch.inference_mode():
            close(model(x, src_key_padding_mask=padding)[real], want)
        if scorer == "ssa":
            ours = want
    assert (ours - want).abs().max() > 0.01  # want is softmax's now


def test_nested_tensors_are_padded_and_nested_again():
    layer = ssa_replace(encoder().layers[0]).eval()
    sequences = [randn(length, E, seed=length) for length in (3, 6, 1)]
    nested = torch.nested.as_nested_tensor(sequences)
    with torch.no_grad():
        out = layer(nested)
    assert out.is_nested
    for got, sequence in zip(out.unbind(), sequences, strict=True):
        close(got, layer(sequence[None])[0])
    with pytest.raises(ValueError, match="carry their lengths"):
        layer.self_attn(nested, nested, nested, key_padding_mask=torch.zeros(3, 6, dtype=torch.bool))


def test_decoder_layer_with_cross_attention_and_whole_transformer():
    torch.manual_seed(0)
    theirs = nn.Transformer(E, H, 1, 1, 16, dropout=0.0, batch_first=True)
    src, tgt = randn(2, 6, E), randn(2, 4, E, seed=1)
    given = dict(src_key_padding_mask=PADDING, memory_key_padding_mask=PADDING,
                 tgt_mask=nn.Transformer.generate_square_subsequent_mask(4), tgt_is_causal=True)
    want = theirs(src, tgt, **given)
    close(ssa_replace(copy.deepcopy(theirs), scorer="softmax")(src, tgt, **given), want)
    ours = ssa_replace(copy.deepcopy(theirs))
    out = ours(src, tgt, **given)
    assert (out - want).abs().max() > 0.01
    changed = tgt.clone()
    changed[:, 2:] += 1
    close(ours(src, changed, **given)[:, :2], out[:, :2])  # no look into the future
    (out ** 2).sum().backward()
    scorers = [module for module in ours.modules() if isinstance(module, SSA)]
    assert len(scorers) == 3 and all((p.grad != 0).all() for scorer in scorers for p in scorer.parameters())


def test_replacing_keeps_the_parameters_and_the_state_comes_back():
    model = encoder()
    weight = model.layers[1].self_attn.in_proj_weight
    ssa_replace(model, b=2.0, n=1.7)
    assert model.layers[1].self_attn.in_proj_weight is weight
    close(model.layers[1].self_attn.scorer.b, torch.full((H,), 2.0))
    model.layers[1].self_attn.scorer.raw_n.data += 1
    again = ssa_replace(encoder())
    again.load_state_dict(model.state_dict())
    close(again(randn(2, 6, E)), model(randn(2, 6, E)))
    _, attention = twins("ssa")
    before = attention.scorer.raw_b.clone()
    attention._reset_parameters()
    assert not attention._qkv_same_embed_dim and torch.equal(attention.scorer.raw_b, before)


# ---------------------------------------------------------------------------------------------------------- as installed

MODULES = sorted(path.stem for path in ROOT.glob("ssa*.py"))


def test_pip_installs_these_modules():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert sorted(project["tool"]["setuptools"]["py-modules"]) == MODULES
    assert {"ssa", "ssa_flash", "ssa_dropin"} <= set(MODULES)


@pytest.mark.skipif(int(metadata.version("setuptools").split(".")[0]) < 77, reason="building offline needs setuptools 77")
def test_the_wheel_works_elsewhere(tmp_path):
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    source.mkdir(), wheels.mkdir()
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.cpp"), *ROOT.glob("*.toml"), ROOT / "README.md", ROOT / "LICENSE"]:
        (source / path.name).write_bytes(path.read_bytes())
    build = f"import setuptools.build_meta as build; build.build_wheel({str(wheels)!r})"  # what `pip install .` calls
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        top = sorted(name for name in wheel.namelist() if "/" not in name)
        assert top == [f"{name}.py" for name in MODULES]
        assert any(name.endswith("share/ssa/ssa_cpu.cpp") for name in wheel.namelist())
        wheel.extractall(tmp_path / "site")
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE.format(root=str(ROOT)), encoding="utf-8")
    assert command(tmp_path / "elsewhere.py", cwd=tmp_path).stdout == "torch.Size([2, 3, 8])\n"


ELSEWHERE = """
import sys
sys.path = ["site"] + [x for x in sys.path if not x.startswith({root!r} + "/tests") and x != {root!r}]
for name in list(sys.modules):  # the process that this one is a fork of has imported them
    if name.split("_")[0] == "ssa" or name.split(".")[0] in ("transformers", "flags", "tyro"):
        del sys.modules[name]
import torch
import ssa_dropin
assert ssa_dropin.__file__.endswith("site/ssa_dropin.py"), ssa_dropin.__file__
assert not {{"transformers", "flags", "tyro"}} & set(sys.modules), "imports too much"
x = torch.randn(2, 3, 8)
print(ssa_dropin.SSAMultiheadAttention(8, 2)(x, x, x)[0].shape)
"""
