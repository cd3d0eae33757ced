"""babyberta_hf.py: our masked language model as Hugging Face's RobertaForMaskedLM and back, and weights with their tokenizer."""

import json
import math

import pytest
import safetensors.torch
import torch

import babyberta_hf
import mlm_data
from checkpoint import load_run
from conftest import command, refused, snapshot
from flags import UserError
from test_babyberta import nursery, speech, tiny, tokenizer, train  # noqa: F401  (fixtures)


def test_our_softmax_model_is_hugging_faces(nursery, tokenizer):
    transformers = pytest.importorskip("transformers")
    model = tiny("softmax").float()
    babyberta_hf.save(model, nursery / "tokenizer.json", nursery / "hf")
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(nursery / "hf").eval()
    assert type(theirs).__name__ == "RobertaForMaskedLM"
    assert sum(p.numel() for p in theirs.parameters()) == model.n_parameters() + 3 * 16
    ids = transformers.AutoTokenizer.from_pretrained(nursery / "hf")(["look at the dog .", "see"], padding=True, return_tensors="pt")
    assert ids["input_ids"][0].tolist() == tokenizer.encode("look at the dog .").ids
    mask = ids["attention_mask"].bool()
    ours = model(ids["input_ids"], key_mask=mask)[0]
    torch.testing.assert_close(ours[mask], theirs(**ids).logits[mask], rtol=1e-4, atol=1e-4)

    # A model of theirs, token types and all, comes back to the same logits.
    config = transformers.RobertaConfig(vocab_size=300, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                        intermediate_size=64, max_position_embeddings=34, layer_norm_eps=1e-5, pad_token_id=1)
    theirs = transformers.RobertaForMaskedLM(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    theirs.save_pretrained(nursery / "theirs")
    babyberta_hf.load(model, nursery / "theirs")
    torch.testing.assert_close(model(ids["input_ids"], key_mask=mask)[0][mask], theirs(**ids).logits[mask], rtol=1e-4, atol=1e-4)


def test_export_and_import_through_the_commands(nursery):
    train(nursery, "--scorer=softmax", "--out=a", "--export-hf=hf")
    command("babyberta_hf.py", "import", "hf", "b", cwd=nursery)
    before, after = (load_run(nursery / name)[0].state_dict() for name in "ab")
    assert all(torch.equal(before[name], after[name]) for name in before)
    command("babyberta_hf.py", "export", "b", "hf2", cwd=nursery)
    assert snapshot(nursery / "hf") == snapshot(nursery / "hf2")
    # SSA goes on from the same weights; only its own scalars are new.
    train(nursery, "--scorer=ssa", "--import-hf=hf", "--steps=1", "--lr=1e-9", "--out=c")
    third = load_run(nursery / "c")[0].state_dict()
    assert all(torch.allclose(before[name], third[name], atol=1e-6) for name in before) and len(third) == len(before) + 4
    refused(command("babyberta_hf.py", "export", "c", "hf3", cwd=nursery, check=False), "with softmax, not ssa in a masked")
    refused(command("babyberta_hf.py", "import", "hf", "sentences.txt/b", cwd=nursery, check=False), "b: cannot be made")
    refused(train(nursery, "--import-hf=hf", "--n-embd=32", "--out=d", check=False), "--import-hf=hf: has n_embd 16, this model 32")


def test_theirs_is_refused_where_it_is_damaged(nursery):
    train(nursery, "--scorer=softmax", "--out=a", "--export-hf=hf")
    good = safetensors.torch.load_file(nursery / "hf" / "model.safetensors")
    about = json.loads((nursery / "hf" / "config.json").read_text(encoding="utf-8"))
    name = "lm_head.dense.bias"
    for part, tensors, values in ((f"{name} is not finite", {name: good[name] * math.nan}, about),
                                  ("num_hidden_layers 1", {}, about | {"num_hidden_layers": 1}),
                                  ("layer_norm_eps 'a'", {}, about | {"layer_norm_eps": "a"}),
                                  ("hidden_size 10000000", {}, about | {"hidden_size": 10**7}),
                                  ("is not a JSON object", {}, [about])):
        safetensors.torch.save_file(good | tensors, nursery / "hf" / "model.safetensors")
        (nursery / "hf" / "config.json").write_text(json.dumps(values), encoding="utf-8")
        refused(command("babyberta_hf.py", "import", "hf", "b", cwd=nursery, check=False), part)
        refused(train(nursery, "--scorer=softmax", "--import-hf=hf", "--out=c", check=False), "hf")
    assert not (nursery / "b").exists() and not (nursery / "c").exists()


def test_weights_keep_their_tokenizer(nursery):
    train(nursery, "--scorer=softmax", "--out=a", "--export-hf=hf")
    (nursery / "sentences.txt").write_text("\n".join(speech(300, seed=7)).replace("the", "thee"), encoding="utf-8")
    other = ("--tokenizer=", "--vocab-size=300")
    train(nursery, *other, "--out=other")
    assert (nursery / "other" / "tokenizer.json").read_bytes() != (nursery / "a" / "tokenizer.json").read_bytes()
    for source in ("--init-from=a", "--import-hf=hf"):
        done = train(nursery, *other, source, "--overwrite", "--out=b")
        assert "note: tokenizer of" in done.stdout
        assert (nursery / "b" / "tokenizer.json").read_bytes() == (nursery / "a" / "tokenizer.json").read_bytes()
        done = train(nursery, "--tokenizer=other/tokenizer.json", source, "--out=c", check=False)
        refused(done, f"--tokenizer=other/tokenizer.json: is not {source.split('=')[1]}/tokenizer.json")
    (nursery / "hf" / "tokenizer.json").unlink()
    refused(train(nursery, *other, "--import-hf=hf", "--out=c", check=False), "hf has no tokenizer.json")


def test_without_the_library_one_line_says_what_to_install(monkeypatch):
    monkeypatch.setattr(mlm_data.importlib.util, "find_spec", lambda name: None)
    for function, arguments in ((mlm_data.read_tokenizer, ["a"]), (mlm_data.train_tokenizer, [["a b c"], 300])):
        with pytest.raises(UserError, match="tokenizers: this library is not installed"):
            function(*arguments)
