"""eval.py perplexity and sample: against plain loops in float64, and through the real command."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.stats  # noqa: F401  (imported here for the forks of this process, see conftest.command)
import torch

import perplexity
from checkpoint import run_id, save_model
from config import ModelConfig
from conftest import TINY, command, refused, snapshot
from files import read_json, write_json
from model import Transformer
from perplexity import Perplexity, measure
from scoring import windows
from sources import is_held_out
from trained import RunFlags, load_trained

DATA = os.environ.get("SSA_DATA_DIR")
WORDS = "the a key query value head score weight signed average softmax déjà vu 句子 attends to of more".split()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with documents and two tiny runs on them, a and b."""
    folder, draw = tmp_path_factory.mktemp("eval"), np.random.default_rng(0)
    lines = [{"text": " ".join(draw.choice(WORDS, draw.integers(1, 60))), "id": f"d{i}"} for i in range(400)]
    (folder / "docs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    (folder / "text.txt").write_text(" ".join(line["text"] for line in lines)[:9000], encoding="utf-8")
    for scorer, name in (("ssa", "a"), ("softmax", "b")):
        command("train_gpt.py", *TINY, "--data=docs.jsonl", f"--scorer={scorer}", f"--out={name}", cwd=folder)
    return folder


def load(place, *names, **flags):
    return load_trained(RunFlags(runs=",".join(str(place / name) for name in names), **flags))


# ------------------------------------------------------------------------------------------------------------------ windows

def test_windows_score_every_token_once_with_the_context_promised():
    for context in (1, 2, 5, 8):
        for stride in range(1, context + 1):
            for last in range(0, 40):
                for first in (1, 3, 17):
                    scored = []
                    for _, start, stop, begin in windows(0, last, context, stride, first):
                        assert 0 <= start < begin <= stop <= last and stop - start <= context
                        for token in range(begin, stop + 1):
                            assert token - start >= min(token, context - stride + 1)
                            scored.append(token)
                    assert scored == list(range(first, last + 1))


def reference(run, text, context, stride):
    """Nats of every token by the rule in words, one forward pass a token, in float64 along the plain path."""
    model = Transformer(replace(run.model.config, path="plain")).double()
    model.load_state_dict(run.model.state_dict())
    model.eval()
    x = torch.tensor([run.tokenizer.eot, *run.tokenizer.document(text, end=False).tolist()])
    nats = []
    for t in range(1, len(x)):
        stop = context if t <= context else context + -(-(t - context) // stride) * stride
        start = max(0, min(stop, len(x) - 1) - context)
        with torch.no_grad():
            logits, _ = model(x[None, start:t])
        nats.append(-logits[0, -1].log_softmax(-1)[x[t]].item())
    return nats


@pytest.mark.parametrize("context, stride", [(16, 8), (16, 16), (7, 3)])
def test_losses_of_documents_equal_a_float64_loop(place, context, stride):
    run, = load(place, "a")
    texts = [("one", "é"), ("short", "a key"), ("long", "softmax déjà vu 句子 attends to more of the signed average")]
    flags = Perplexity(context=context, stride=stride, batch_size=2)
    measured = measure(run, texts * 7, flags, None)  # 21 documents: each is a unit
    for number, (_, text) in enumerate(texts):
        wanted = reference(run, text, context, stride)
        assert measured.nats[number::3] == pytest.approx([sum(wanted)] * 7, rel=2e-5)  # whatever the documents around it
        assert measured.tokens[number] == len(wanted) == measured.n_bytes[number] == len(text.encode("utf-8"))


def test_positions_count_whole_windows_from_the_midst_of_documents(place):
    run, = load(place, "a")
    text = "signed average " * 5  # 75 bytes: windows of 16 end at token 16, 24, 32, ..., 72, 75
    measured = measure(run, [("d", text)], Perplexity(stride=8), None)
    assert measured.edges == [1, 2, 3, 4, 6, 8, 12, 17] and measured.position_tokens.sum(0).tolist() == [7, 7, 7, 14, 14, 28, 35]
    x, total = torch.tensor([run.tokenizer.eot, *text.encode()]), 0
    for start in range(8, 64, 8):  # the losses of the tokens that see one token only
        logits, _ = run.model(x[None, start : start + 1])
        total -= logits[0, 0].log_softmax(-1)[x[start + 1]].item()
    assert measured.position_nats[0, 0] == pytest.approx(total, rel=1e-5)


def test_the_scorer_is_in_effect(place):
    run, = load(place, "a")
    texts = [("d", "the signed average attends to more of the key")]
    before = measure(run, texts, Perplexity(), None).nats.sum()
    for name in ("raw_b", "raw_n"):
        changed, = load(place, "a")
        with torch.no_grad():
            getattr(changed.model.scorers()[0], name).add_(3.0)
        assert abs(measure(changed, texts, Perplexity(), None).nats.sum() - before) > 1e-4


# ------------------------------------------------------------------------------------------------------------- the command

@pytest.fixture(scope="module")
def judged(place):
    """(stdout, folder) of the command for two runs."""
    return command("eval.py", "perplexity", "a,b", cwd=place).stdout, place / "runs" / "perplexity-docs.jsonl-a-b"


def read_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_the_command_compares_runs_on_held_out_documents(judged):
    stdout, folder = judged
    result, units = read_json(folder / "perplexity.json", ""), read_lines(folder / "units.jsonl")
    assert result["split"] == "val" and all(is_held_out(unit["unit"]) for unit in units) and 20 < len(units) < 80
    assert result["n_units"] == result["documents"] == len(units) and result["bytes"] == sum(unit["bytes"] for unit in units)
    sums = {run: {key: sum(unit["runs"][run][key] for unit in units) for key in ("nats", "tokens")} for run in "ab"}
    for run, scorer in (("a", "ssa"), ("b", "softmax")):
        told = result["runs"][run]
        assert told["scorer"] == scorer and told["context"] == 16 and told["stride"] == 8
        assert told["loss"]["mean"] == pytest.approx(sums[run]["nats"] / sums[run]["tokens"])
        assert told["perplexity"]["mean"] == pytest.approx(math.exp(told["loss"]["mean"]))
        assert told["bits_per_byte"]["mean"] == pytest.approx(sums[run]["nats"] / math.log(2) / result["bytes"])
        assert told["bits_per_byte"]["low"] < told["bits_per_byte"]["mean"] < told["bits_per_byte"]["high"]
        assert f"{run}: {told['loss']['mean']:.3f} [" in stdout and f"{told['perplexity']['mean']:,.1f} [" in stdout
    pair, = result["differences"]
    wanted = (sums["b"]["nats"] - sums["a"]["nats"]) / math.log(2) / result["bytes"]
    assert (pair["run"], pair["minus"]) == ("b", "a") and pair["bits_per_byte"]["mean"] == pytest.approx(wanted)
    width = {key: value["high"] - value["low"] for key, value in (("pair", pair["bits_per_byte"]),
                                                                  ("alone", result["runs"]["a"]["bits_per_byte"]))}
    assert width["pair"] < width["alone"] / 2  # pairing takes out what makes a document hard for both
    assert (folder / "positions.png").read_bytes().startswith(b"\x89PNG")


def test_the_unigram_baseline_is_that_of_the_training_text(place, judged):
    lines = read_lines(place / "docs.jsonl")
    texts = {held: [line["text"].encode("utf-8") for line in lines if is_held_out(line["id"]) == held] for held in (True, False)}
    counts = np.bincount(np.frombuffer(b"".join(texts[False]), dtype=np.uint8), minlength=257) + 1
    counts[256] += len(texts[False])  # every training document ends with eot
    nats = -np.log(counts / counts.sum())[np.frombuffer(b"".join(texts[True]), dtype=np.uint8)].mean()
    told = read_json(judged[1] / "perplexity.json", "")["runs"]["a"]["unigram"]
    assert told["loss"] == pytest.approx(nats) and told["bits_per_byte"] == pytest.approx(nats / math.log(2))


def test_splits(place):
    texts = perplexity.read_documents(str(place / "text.txt"), "val", [place / "data"], 0)
    whole = (place / "text.txt").read_text("utf-8")
    assert [text for _, text in texts] == [whole[8100:]]
    assert [text for _, text in perplexity.read_documents(str(place / "text.txt"), "all", [place / "data"], 0)] == [whole]
    assert len(perplexity.read_documents(str(place / "docs.jsonl"), "all", [place / "data"], 0)) == 400
    first = perplexity.read_documents(str(place / "docs.jsonl"), "all", [place / "data"], 1000)
    assert 995 <= sum(len(text.encode("utf-8")) for _, text in first) <= 1000
    names, n_bytes = perplexity.units_of([("x", "a" * 10_000), ("y", "b")])
    assert n_bytes.tolist() == [4096, 4096, 10_000 - 8192, 1] and names[1] == "x from byte 4096"
    runs = load(place, "a")
    assert perplexity.choose_text(Perplexity(data="text.txt"), runs) == ("text.txt", "all")
    assert perplexity.choose_text(Perplexity(data="docs.jsonl"), runs) == ("docs.jsonl", "val")


def test_documents_planned_at_a_smaller_share_stay_out_of_it(place):
    command("data.py", "docs.jsonl", "--tokenizer=bytes", "--tokens=5000", "--shard-tokens=2500", "--workers=1",
            "--cache-dir=planned", cwd=place)
    path, = (place / "planned").glob("docs-jsonl-bytes-shards-*/manifest.json")
    manifest = read_json(path, "")
    write_json(path, manifest | {"held_out": 0.03})  # as for a corpus of billions of tokens
    texts = perplexity.read_documents(str(place / "docs.jsonl"), "val", [place / "data", place / "planned"], 0)
    assert 0 < len(texts) < 30 and all(is_held_out(doc_id, 0.03) for doc_id, _ in texts)


@pytest.mark.skipif(not DATA, reason="SSA_DATA_DIR is not set: no real text, no tokenizer files")
def test_tokenizers_compare_on_real_text(place):
    env = dict(TIKTOKEN_CACHE_DIR=str(Path(DATA, "tiktoken_cache")))
    config = read_json(place / "a" / "config.json", "")
    config["flags"]["tokenizer"], config["model"]["vocab_size"] = "gpt2", 50304
    (place / "gpt2").mkdir()
    write_json(place / "gpt2" / "config.json", config)
    save_model(place / "gpt2" / "model.safetensors", Transformer(ModelConfig.from_dict(config["model"])), 0, run_id(config))
    done = command("eval.py", "perplexity", "a,gpt2", f"--data={DATA}/wikitext2/test.txt", "--max-bytes=9000", "--stride=16",
                   "--out=wiki", cwd=place, **env)
    result, units = read_json(place / "wiki" / "perplexity.json", ""), read_lines(place / "wiki" / "units.jsonl")
    assert result["split"] == "all" and result["units"] == "stretches of about 4,096 bytes" and result["n_units"] == 3
    assert result["runs"]["a"]["tokens"] == result["bytes"] == 9000 > 3 * result["runs"]["gpt2"]["tokens"]
    assert sum(unit["bytes"] for unit in units) == 9000 and result["differences"][0]["loss"] is None
    nats = [sum(unit["runs"][run]["nats"] for unit in units) for run in ("gpt2", "a")]
    assert result["differences"][0]["bits_per_byte"]["mean"] == pytest.approx((nats[0] - nats[1]) / math.log(2) / 9000)
    assert nats[0] == pytest.approx(result["runs"]["gpt2"]["tokens"] * math.log(50304), rel=0.01)  # it knows nothing yet
    assert "gpt2 minus a, paired" in done.stdout


def test_a_sample_is_the_prompt_and_what_follows(place):
    flags = ["sample", "a", "--prompt=déjà vu", "--tokens=30"]
    first, again, other = (command("eval.py", *flags, more, cwd=place).stdout for more in ("--seed=1", "--seed=1", "--seed=2"))
    assert first == again != other and first.startswith("déjà vu") and len(first) > len("déjà vu")
    run, = load(place, "a")
    ids = torch.tensor([list("déjà vu".encode("utf-8"))])
    greedy = run.model.generate(ids, 30, temperature=0, n_tokens=257)[0].tolist()
    text = run.tokenizer.decode(greedy[: greedy.index(256)] if 256 in greedy else greedy) + "\n"
    assert command("eval.py", *flags, "--temperature=0", cwd=place).stdout == text
    assert command("eval.py", *flags, "--top-k=1", cwd=place).stdout == text


# ------------------------------------------------------------------------------------------------------------- wrong input

WRONG = [
    ("", "SUBCOMMAND: missing; choose one of perplexity"),
    ("perplexities a", "perplexities: unknown subcommand; choose one of perplexity"),
    ("perplexity", "RUN: missing"),
    ("perplexity nowhere", "nowhere: no such folder"),
    ("perplexity a,a", "a: is named twice"),
    ("perplexity no-model", "no-model: has no model.safetensors"),
    ("perplexity newer", "'square'"),
    ("perplexity newer-field", "depth=3: not a field"),
    ("perplexity damaged", "damaged/config.json: its checksum does not fit"),
    ("perplexity encoder", "encoder: its model is an encoder"),
    ("perplexity a --stride=17", "--stride=17: is more than the context of a, 16"),
    ("perplexity a --stride=9 --context=8", "--stride=9: must be at most --context=8"),
    ("perplexity a --context=32", "--context=32: a sees 16 tokens at most"),
    ("perplexity a --stride=-1", "--stride=-1: must be at least 0"),
    ("perplexity a --stryde=1", "--stryde=1"),
    ("perplexity a --split=test", "'test'"),
    ("perplexity a --data=nowhere.txt", "--data=nowhere.txt: neither a known corpus"),
    ("perplexity a,single", "--data: missing; the runs were trained on different texts"),
    ("perplexity a --out=docs.jsonl", "--out=docs.jsonl: is a file"),
    ("perplexity a --device=cuda", "--device=cuda: this machine"),
    ("sample a", "--prompt=: is empty"),
    ("sample a,b --prompt=x", "--runs=a,b: name one run folder"),
    ("sample a --prompt=x --temperature=-1", "--temperature=-1.0"),
    ("sample a --prompt=x --tokens=0", "--tokens=0"),
]


@pytest.fixture(scope="module")
def broken(place):
    """Run folders that cannot be used, made from a good one."""
    config = read_json(place / "a" / "config.json", "")
    shapes = {"no-model": {}, "newer": {"scorer": "square"}, "newer-field": {"depth": 3}, "encoder": {"causal": False},
              "single": {}}
    for name, change in shapes.items():
        (place / name).mkdir()
        flags = config["flags"] | ({"data": "text.txt"} if name == "single" else {})
        write_json(place / name / "config.json", config | {"model": config["model"] | change, "flags": flags})
        if name != "no-model":
            (place / name / "model.safetensors").write_bytes((place / "a" / "model.safetensors").read_bytes())
    (place / "damaged").mkdir()
    (place / "damaged" / "config.json").write_text('{"flags": {}}', encoding="utf-8")
    (place / "damaged" / "model.safetensors").touch()
    return place


@pytest.mark.parametrize("flags, part", WRONG)
def test_wrong_input_gets_one_line_and_writes_nothing(broken, flags, part):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA GPU")
    before = snapshot(broken)
    refused(command("eval.py", *flags.split(), cwd=broken, check=False), part)
    assert snapshot(broken) == before


def test_flags_are_checked_before_torch_is_imported(place, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')", encoding="utf-8")
    fresh = dict(cwd=place, fresh=True, PYTHONPATH=str(tmp_path))
    refused(command("eval.py", "perplexity", "a", "--stride=-1", check=False, **fresh), "--stride=-1")
    assert "--temperature" in command("eval.py", "sample", "--help", **fresh).stdout
    assert "perplexity RUN" in command("eval.py", "--help", **fresh).stdout
