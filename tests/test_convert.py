"""SSA models of transformers saved, loaded, trained and made from softmax models; the swap test; the README's snippets."""

import copy
import itertools
import json
import os
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, command, refused
from tiny_hf import IDS, close, model_of, output, transformers
from transformers import AttentionInterface, AutoModelForCausalLM

import ssa_dropin
import swap
from flags import UserError
from ssa_dropin import ssa_convert, ssa_scorers

F32, BF16 = torch.float32, torch.bfloat16


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


def test_near_the_limit_it_is_softmax(tmp_path):
    softmax = model_of("Llama", "sdpa")
    model = ssa_convert(copy.deepcopy(softmax), n=1e4)
    close(output(model, IDS), output(softmax, IDS), 3e-3)
    report = ssa_dropin.ssa_distance(model, batches())
    losses = [torch.stack([m(**batch).loss for batch in batches()]).mean().item() for m in (softmax, model)]
    assert [report["loss_softmax"], report["loss_ssa"]] == pytest.approx(losses, abs=1e-5)
    assert abs(report["loss_change"]) < 1e-3 and 0 < report["mean_total_variation"] < 1e-3
    model.save_pretrained(tmp_path)
    assert_same_model(model, AutoModelForCausalLM.from_pretrained(tmp_path))
    with pytest.warns(UserWarning, match="has SSA already"):
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
        surprise = soft.clamp_min(1e-300).log() - ours.clamp_min(1e-300).log()
        return torch.where(soft > 0, soft * surprise, 0.0).sum(-1).mean((0, 2))  # (B, H, Q, K) -> (H,)

    best = divergence()
    fitted = scorer.raw_b.data.clone(), scorer.raw_n.data.clone()
    for db, dn in itertools.product((-0.1, 0.0, 0.1), (-0.3, 0.0, 0.3)):
        scorer.raw_b.data, scorer.raw_n.data = fitted[0] + db, fitted[1] + dn
        assert ((divergence() >= best - 1e-5) | (scorer.n > 3.0)).all()


def test_wrong_conversions_are_refused():
    model = model_of("Llama", "sdpa")
    for given, words in (({"n": 0.5}, "n=0.5"), ({"n": 0}, "n=0"), ({"b": -1.0}, "b=-1"), ({"freeze": "all"}, "freeze='all'"),
                         ({"n": "8"}, "n='8': must be a number"), ({"b": [1.0]}, "b=.*must be a number")):
        with pytest.raises(ValueError, match=words):
            ssa_convert(model, **given)
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(ValueError, match="no b and n"):
        ssa_dropin.ssa_fit(model, batches())
    ssa_convert(model)
    with pytest.raises(ValueError, match="n_max=1"):
        ssa_dropin.ssa_fit(model, batches(), n_max=1)
    with pytest.raises(ValueError, match="n_max=inf"):
        ssa_dropin.ssa_fit(model, batches(), n_max=float("inf"))
    with pytest.raises(ValueError, match="n_max='8': must be a number"):
        ssa_dropin.ssa_fit(model, batches(), n_max="8")
    for rows in (0, 1.5, "9"):
        with pytest.raises(ValueError, match=f"rows={rows!r}: must be a number at least 1, and whole"):
            ssa_dropin.ssa_fit(model, batches(), rows=rows)
    for wrong in (IDS, {"input_ids": IDS}, [IDS], [{"input_ids": IDS.tolist()}], 5):
        for function in (ssa_dropin.ssa_fit, ssa_dropin.ssa_distance):
            with pytest.raises(ValueError, match="a list of dicts of tensors"):
                function(model, wrong)
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
    result = command("swap.py", STORIES, "--texts=16", "--length=64", "--steps=8", "--lr=1e-4", "--out=out", cwd=tmp_path).stdout
    assert len(result.splitlines()) == 5
    result = json.loads((tmp_path / "out" / "swap.json").read_text(encoding="utf-8"))
    softmax, near, unfitted, fitted = result["ways"].values()
    assert softmax["loss"] < fitted["loss"] < unfitted["loss"] < result["unigram"]
    assert abs(near["loss"] - softmax["loss"]) < 1e-3
    assert near["total_variation"] < fitted["total_variation"] < unfitted["total_variation"]
    assert unfitted["loss_tuned"] < unfitted["loss"]
    assert unfitted["b"] != unfitted["b_tuned"] and unfitted["n"] != unfitted["n_tuned"]
    assert torch.tensor(fitted["n"]).shape == (5, 8) and result["flags"]["texts"] == 16 and "machine" in result


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
