"""eval.py zorro and blimp: scores against independent formulas, ties, the trigram baseline, the report."""

import json
import math
import os
from collections import Counter

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import grammar
import intervals
import mlm_data
import mlm_score
from checkpoint import load_run, run_id, save_model
from conftest import command, refused
from flags import UserError
from test_babyberta import TINY, nursery, speech, tiny, tokenizer, train  # noqa: F401  (fixtures)

SCRIPT = "eval.py"
PAIRS = [("the dogs is red .", "the dog is red ."), ("look at this books .", "look at this book ."),
         ("he like the ball .", "he likes the big ball ."), ("what do it see ?", "what does it see ?")]


@pytest.fixture
def suite(nursery):  # noqa: F811
    """The nursery with a suite of two paradigms and a run `r`."""
    (nursery / "suite").mkdir()
    for name, pairs in (("agreement-a", PAIRS), ("agreement-b", PAIRS[::-1] + PAIRS[:2]), ("case-c", PAIRS[1:3])):
        text = "".join(f"{bad}\n{good}\n" for bad, good in pairs)
        (nursery / "suite" / f"{name}.txt").write_text(text, encoding="utf-8")
    train(nursery, "--out=r")
    return nursery


def zorro(folder, *flags, **more):
    return command(SCRIPT, "zorro", *flags, "--sentences=suite", "--threads=1", cwd=folder, **more)


# ----------------------------------------------------------------------------------------------------------------- scores

@pytest.mark.parametrize("scorer", ["ssa", "softmax"])
def test_scores_are_those_of_each_sentence_alone(tokenizer, scorer):  # noqa: F811
    model = tiny(scorer)
    ids = mlm_score.encode(tokenizer, [s for s in speech(60, seed=4) if 2 < len(s.split()) < 9], 32, "here")
    seen = []
    holistic = mlm_score.holistic(model, tokenizer, ids, seen.append)
    mlm = mlm_score.pseudo_log_likelihood(model, tokenizer, ids, seen.append)
    assert sum(seen) == 2 * len(ids)
    for one, mean, total in zip(ids, holistic, mlm):
        alone = torch.from_numpy(one)
        assert mean == pytest.approx(F.cross_entropy(model(alone[None])[0][0], alone).item(), abs=1e-5)
        nats = 0.0
        for place in range(1, len(one) - 1):
            masked = alone.clone()
            masked[place] = tokenizer.token_to_id("<mask>")
            nats -= model(masked[None])[0][0, place].log_softmax(-1)[alone[place]].item()
        assert total == pytest.approx(nats, abs=1e-4)


def test_a_model_that_finds_all_alike_is_never_right(suite):
    model, config = load_run(suite / "r")
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    save_model(suite / "r" / "model.safetensors", model, 6, run_id(config))
    zorro(suite, "r", "--scoring=both", "--out=z")
    results = json.loads((suite / "z" / "zorro.json").read_text(encoding="utf-8"))["results"]
    assert results[0]["ties"] == 12 and results[0]["overall"]["mean"] == 0
    # Masked in turn, a sentence with a token more is less likely; only these differ.
    equal = sum(len({len(mlm_data.read_tokenizer(suite / "tokenizer.json").encode(s).ids) for s in pair}) == 1
                for pair in PAIRS + PAIRS[::-1] + PAIRS[:2] + PAIRS[1:3])
    assert results[1]["ties"] == equal < 12


def test_an_equal_pair_is_wrong_and_counted():
    paradigms = [grammar.Paradigm("a", "a", ["w", "x", "y", "z"], ["W", "X", "Y", "Z"])]
    scores = np.array([2.0, 2.0, 2.0, 2.0, 1.0, 3.0, 2.0, 2.0 - 1e-6])
    (right, tie), = grammar.outcomes(lambda sentences, where: scores, paradigms).values()
    assert right.tolist() == [True, False, False, False] and tie.tolist() == [False, False, True, True]


def test_the_trigram_is_add_k_over_counts(tokenizer):  # noqa: F811
    texts, k, V = speech(80, seed=1), 0.3, tokenizer.get_vocab_size()
    corpus = mlm_data.Sentences(texts, tokenizer, 64, min_words=1)
    threes, twos, start = Counter(), Counter(), tokenizer.token_to_id("<s>")
    for text in texts:
        line = [start, *tokenizer.encode(text).ids]
        for window in zip(line, line[1:], line[2:]):
            threes[window] += 1
            twos[window[:2]] += 1
    others = speech(20, seed=2) + ["zebra quux ."]
    scores = grammar.Trigram(corpus, k).score(others, "")
    for text, score in zip(others, scores):
        line = [start, *tokenizer.encode(text).ids]
        nats = [-math.log((threes[w] + k) / (twos[w[:2]] + k * V)) for w in zip(line, line[1:], line[2:])]
        assert score == pytest.approx(sum(nats) / len(nats))


# ----------------------------------------------------------------------------------------------------------------- report

def test_the_report_holds_every_pair_and_beside_it_chance_and_trigram(suite):
    train(suite, "--scorer=softmax", "--out=s")
    done = zorro(suite, "r,s", "--out=z")
    values = json.loads((suite / "z" / "zorro.json").read_text(encoding="utf-8"))
    assert [c["run"] for c in values["results"]] == ["r", "s", "trigram"] and values["pairs"] == 12 and values["chance"] == 0.5
    assert [values["runs"][name]["scorer"] for name in "rs"] == ["ssa", "softmax"]
    model, tok, _ = mlm_score.load(suite / "r", "cpu")
    ids = mlm_score.encode(tok, [s for pair in PAIRS for s in pair], 32, "")
    nats = [F.cross_entropy(model(torch.from_numpy(i)[None])[0][0], torch.from_numpy(i)).item() for i in ids]
    right = [good < bad for bad, good in zip(nats[::2], nats[1::2])]
    ours = values["results"][0]
    assert ours["paradigms"]["agreement-a"]["mean"] == np.mean(right)
    bits = {name: np.unpackbits(np.frombuffer(bytes.fromhex(text), dtype=np.uint8))[:n] for (name, text), n in
            zip(ours["outcomes"].items(), (4, 6, 2))}
    assert bits["agreement-a"].tolist() == right and ours["overall"]["mean"] == pytest.approx(np.concatenate([*bits.values()]).mean())
    assert ours["phenomena"]["agreement"]["n"] == 10 and set(ours["phenomena"]) == {"agreement", "case"}
    difference = values["differences"][0]
    assert (difference["run"], difference["minus"]) == ("r", "s")
    assert difference["overall"]["mean"] == pytest.approx(ours["overall"]["mean"] - values["results"][1]["overall"]["mean"])
    assert len(values["differences"]) == 3 and (suite / "z" / "zorro.png").stat().st_size > 5000
    for part in ("agreement-a", "chance", "[3] trigram", "overall r (holistic)", "r - s (holistic)"):
        assert part in done.stdout


def test_the_weights_step_is_said(suite):
    for name in ("resume-00000006.pt", "resume-00000006.pt.sha256"):
        (suite / "r" / name).unlink()
    model, config = load_run(suite / "r")
    save_model(suite / "r" / "model.safetensors", model, 4, run_id(config))
    done = zorro(suite, "r", "--out=z")
    assert "note: the weights of r are those after step 4 of 6" in done.stdout
    assert json.loads((suite / "z" / "zorro.json").read_text(encoding="utf-8"))["runs"]["r"]["step"] == 4


def test_a_paradigm_in_two_files_is_named(suite):
    for name in ("a", "a (copy)"):
        (suite / f"{name}.jsonl").write_text(json.dumps(dict(sentence_good="the dog is", sentence_bad="the dog are", UID="x")) + "\n")
    (suite / "two").mkdir()
    for path in suite.glob("*.jsonl"):
        path.rename(suite / "two" / path.name)
    refused(command(SCRIPT, "blimp", "r", "--sentences=two", cwd=suite, check=False), "has the paradigm x of two/")


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no folder here that nobody can write to")
def test_a_folder_that_cannot_be_written_is_tried_before_the_work(suite):
    refused(zorro(suite, "r", "--out=/proc/self", check=False), "--out=/proc/self: cannot be written")


def test_intervals_are_those_of_the_bootstrap_over_pairs():
    rng = np.random.default_rng(0)
    a, b = rng.random(400) < 0.6, rng.random(400) < 0.5
    for ours, expected in ((grammar.interval(a), intervals.bootstrap(a, n_resamples=5000)),
                           (grammar.interval(a.astype(int) - b), intervals.paired_bootstrap(a, b, n_resamples=5000))):
        assert ours["n"] == 400 and ours["mean"] == pytest.approx(expected["mean"])
        assert ours["low"] == pytest.approx(expected["low"], abs=0.006) and ours["high"] == pytest.approx(expected["high"], abs=0.006)


def test_blimps_lines_give_what_the_same_pairs_give_as_zorro(suite):
    (suite / "blimp").mkdir()
    lines = [json.dumps(dict(sentence_good=good, sentence_bad=bad, UID="agreement-a", linguistics_term="agreement"))
             for bad, good in PAIRS]
    (suite / "blimp" / "a.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    zorro(suite, "r", "--corpus=none", "--out=z")
    command(SCRIPT, "blimp", "r", "--sentences=blimp", "--threads=1", "--corpus=none", "--out=z", cwd=suite)
    first, second = (json.loads((suite / "z" / f"{name}.json").read_text(encoding="utf-8"))["results"][0] for name in
                     ("zorro", "blimp"))
    assert first["paradigms"]["agreement-a"] == second["paradigms"]["agreement-a"] and len(second["paradigms"]) == 1


def test_bad_suites_and_runs_get_one_line(suite):
    def change(path, text):
        (suite / path).parent.mkdir(exist_ok=True)
        (suite / path).write_bytes(text)
        return f"--sentences={(suite / path).parent.name}"
    for flags, part in (
            (["r", change("odd/a.txt", b"one\ntwo\nthree\n")], "a.txt: has 3 lines, an odd number"),
            (["r", change("gap/a.txt", b"one\n\n")], "a.txt line 2: is empty"),
            (["r", change("latin/a.txt", "déjà\nvu\n".encode("latin-1"))], "a.txt: not UTF-8 at byte 1"),
            (["r", change("long/a.txt", b"the " * 10_000 + b"\nthe\n")], "a sentence 1: has 10002 tokens, more than the model's 32"),
            (["r", change("none/a.dat", b"")], "--sentences=none: no .txt files there"),
            (["", "--sentences=suite"], "RUN: missing"), (["nowhere", "--sentences=suite"], "nowhere"),
            (["r", "--sentences=suite", "--corpus=gone.txt"], "gone.txt: cannot be read"),
            (["r", "--sentences=suite", "--scoring=guess"], "'guess'"), (["r", "--sentences=suite", "--limit=-1"], "--limit=-1")):
        refused(command(SCRIPT, "zorro", *flags, "--out=z", cwd=suite, check=False), part)
        assert not (suite / "z").exists()
    refused(command(SCRIPT, "blimp", "r", "--out=z", cwd=suite, check=False), "--sentences=: missing")
    mlm_data.train_tokenizer(speech(50), 280).save(str(suite / "r" / "tokenizer.json"))
    refused(zorro(suite, "r", "--out=z", check=False), "tokenizer.json: has 280 entries, the model 3")


def test_phenomena_are_those_of_the_suite(tmp_path):
    names = {"filler-gap-wh_question_object": "filler-gap", "agreement_subject_verb-in_simple_question": "agreement_subject_verb",
             "binding-principle_a": "binding"}
    for name, phenomenon in names.items():
        (tmp_path / f"{name}.txt").write_text("a\nb\n", encoding="utf-8")
        assert grammar.read_zorro(tmp_path / f"{name}.txt").phenomenon == phenomenon
    with pytest.raises(UserError, match="sentence_good"):
        (tmp_path / "x.jsonl").write_text('{"sentence_bad": "a"}\n', encoding="utf-8")
        grammar.read_blimp(tmp_path / "x.jsonl")


def test_the_public_suite_has_46000_pairs():
    data = os.environ.get("SSA_DATA_DIR")
    if not data:
        pytest.skip("SSA_DATA_DIR is not set: no Zorro")
    paradigms = grammar.read_suite(grammar.Zorro(sentences=f"{data}/zorro"))
    assert len(paradigms) == 23 and {len(p.good) for p in paradigms} == {len(p.bad) for p in paradigms} == {2000}
    by_name = {p.name: p for p in paradigms}
    first = by_name["agreement_determiner_noun-between_neighbors"]
    assert (first.bad[0], first.good[0]) == ("this colors must be white .", "this color must be white .")
    import remote
    assert {f"{name}.txt" for name in by_name} == set(remote.SENTENCES["zorro"].names)
