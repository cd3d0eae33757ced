"""eval.py tasks and lm-eval: the model class against plain loops, local data through lm-eval's own tasks, without a network."""

import functools
import json
import os
import socket
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("lm_eval", reason='lm-eval is not installed (pip install -e ".[tasks]")')
import lm_eval.evaluator  # noqa: F401  (imported here for the forks of this process, see conftest.command)
import lm_eval.tasks
import scipy.stats  # noqa: F401
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model

from conftest import TINY, command, refused, snapshot
from files import read_json
from flags import UserError
from intervals import mcnemar
from lmeval import LanguageModel, command_line
from model import Transformer
from taskdata import CHECKS, read_records
from trained import RunFlags, load_trained
from zeroshot import Tasks, load_tasks

DATA = os.environ.get("SSA_DATA_DIR")


def arc(number, answer, labels="ABCD"):
    texts = [f"choice {label} of {number}" + " more" * i for i, label in enumerate(labels)]
    choices = {"text": texts, "label": list(labels)}
    return {"id": str(number), "question": f"Which, {number}?", "choices": choices, "answerKey": answer}


# Items of our own in the published schemas. ARC has items of 3 to 5 choices, labelled by letters or numbers.
ITEMS = {
    "arc_easy.test": [arc(1, "B"), arc(2, "3", "1234"), arc(3, "E", "ABCDE"), arc(4, "A", "ABC"), arc(5, "B"), arc(6, "B")],
    "arc_easy.validation": [arc(9, "A")],
    "boolq.validation": [{"question": f"is {i} so", "passage": f"It is {i}. " * i, "answer": i % 3 == 0} for i in range(1, 8)],
    "hellaswag.validation.first6": [
        {"ind": i, "activity_label": "Cooking", "ctx_a": "A man cooks [title] soup.", "ctx_b": "he", "ctx": "unused",
         "endings": ["eats it.", "sings [step] aloud.", "sleeps on the long grass", "runs."], "label": str(i % 4)}
        for i in range(6)],
    "piqa.validation": [{"goal": f"Open box {i}", "sol1": "lift the lid", "sol2": "burn it", "label": i // 3} for i in range(5)],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with two tiny runs, a and b, and task data in `items`."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "text.txt").write_text("the key and the value attend to less of more " * 130, encoding="utf-8")
    for scorer, name in (("ssa", "a"), ("softmax", "b")):
        command("train_gpt.py", *TINY, f"--scorer={scorer}", f"--out={name}", cwd=folder)
    (folder / "items").mkdir()
    for name, records in ITEMS.items():
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "items" / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def lm(place):
    return LanguageModel(load_trained(RunFlags(runs=str(place / "a")))[0], batch_size=3)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*args):
        raise OSError("the network was used")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)  # it runs `pip list`, for seconds


def requests(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=argument, idx=0) for argument in arguments]


def log_p(lm, ids):
    """log p of the next token after ids, in float64 along the plain path: (V,)."""
    model = Transformer(replace(lm.run.model.config, path="plain")).double()
    model.load_state_dict(lm.run.model.state_dict())
    with torch.no_grad():
        return model.eval()(torch.tensor([ids]))[0][0, -1].log_softmax(-1)


def by_hand(lm, ids, first, reach):
    """(sum of log p of ids[first:], greedy) with every token after at most reach(its number) to its number - 1."""
    total, greedy = 0.0, True
    for t in range(first, len(ids)):
        p = log_p(lm, ids[reach(t):t])
        total, greedy = total + p[ids[t]].item(), greedy and p.argmax().item() == ids[t]
    return total, greedy


# -------------------------------------------------------------------------------------------------------- the model class

def test_log_likelihoods_by_hand(lm):
    """The model sees 16 tokens. lm-eval reads (context + continuation)[-17:-1]."""
    cases = {("the key", " and"): 0, ("the", " é句"): 0, ("", "value"): 0,
             ("a context that is longer than the model's", " value"): None, ("the key and", " the value att"): None}
    before, pairs = lm.truncated, list(cases) + [("the key", " and a continuation longer than the context")]
    got = lm.loglikelihood(requests("loglikelihood", *pairs))
    for pair, start, (total, greedy) in zip(pairs, cases.values(), got):
        context = list(pair[0].encode()) or [256]
        ids = context + list(pair[1].encode())
        begin = max(0, len(ids) - 17) if start is None else 0
        assert start is None or len(ids) <= 17
        assert total == pytest.approx(by_hand(lm, ids, len(context), lambda t: begin)[0], abs=1e-4)
        assert greedy is by_hand(lm, ids, len(context), lambda t: begin)[1]
    # Beyond lm-eval: windows of 16 that move on by 8, the first one ending 8 tokens into what is beyond it.
    ids, first = list("".join(pairs[-1]).encode()), len(pairs[-1][0])

    def reach(t):
        stop = 15 if t <= 15 else 16 if t == 16 else 16 + -(-(t - 16) // 8) * 8
        return max(0, min(stop, len(ids) - 1) - 16)
    assert got[-1][0] == pytest.approx(by_hand(lm, ids, first, reach)[0], abs=1e-4)
    assert lm.truncated - before == 2
    for token in (log_p(lm, ids[:3]).argmax().item(), 0):
        (_, greedy), = lm._loglikelihood_tokens([(("", ""), ids[:3], [token])])
        assert greedy is (token != 0)


def test_order_and_batches_change_nothing(lm, place):
    pairs = [("the key " * n, "value" * m) for n in (1, 3, 2) for m in (2, 5, 1)]
    alone = LanguageModel(str(place / "a"), batch_size=1)
    wanted = [result for pair in pairs for result in alone.loglikelihood(requests("loglikelihood", pair))]
    for model in (lm, get_model("ssa").create_from_arg_string(f"run={place / 'a'}", {"batch_size": "auto"})):
        got = model.loglikelihood(requests("loglikelihood", *pairs))
        assert [value for value, _ in got] == pytest.approx([value for value, _ in wanted], abs=1e-4)


def test_rolling_log_likelihoods_use_the_windows_of_lm_eval(lm):
    texts = ["", "k", "the key and the value attend to less of more"]
    got = lm.loglikelihood_rolling(requests("loglikelihood_rolling", *[(text,) for text in texts]))
    for text, total in zip(texts, got):
        wanted = 0.0
        for inputs, targets in lm_eval.utils.get_rolling_token_windows(list(text.encode()), 256, 16, 1):
            ids = inputs + targets[-1:]
            wanted += by_hand(lm, ids, len(ids) - len(targets), lambda t: 0)[0]
        assert total == pytest.approx(wanted, abs=1e-4)


def test_the_scorer_is_in_effect(lm, place):
    pair = requests("loglikelihood", ("the key and", " the value"))
    (before, _), = lm.loglikelihood(pair)
    for name in ("raw_b", "raw_n"):
        changed = LanguageModel(str(place / "a"))
        with torch.no_grad():
            getattr(changed.run.model.scorers()[0], name).add_(3.0)
        (after, _), = changed.loglikelihood(pair)
        assert abs(after - before) > 1e-5


def test_generated_text_is_greedy_and_ends_at_the_words_asked_for(lm):
    context = "the key and the value attend"  # longer than the model: the last 16 - 8 tokens are read
    options = {"until": [], "max_gen_toks": 8, "do_sample": False}
    ids = list(context.encode())[-8:]
    for _ in range(8):
        ids.append(log_p(lm, ids)[:257].argmax().item())
    new = ids[8:]
    text = lm.run.tokenizer.decode(new[: new.index(256)] if 256 in new else new)
    got, = lm.generate_until(requests("generate_until", (context, options)))
    assert got == text
    stopped, = lm.generate_until(requests("generate_until", (context, options | {"until": [text[2:4]]})))
    assert stopped == text.split(text[2:4])[0]
    long, = lm.generate_until(requests("generate_until", (context, {"until": [], "max_gen_toks": 40, "temperature": 1.0})))
    assert len(long) > 0
    with pytest.raises(UserError, match="top_p"):
        lm.generate_until(requests("generate_until", (context, options | {"top_p": 0.5})))


# ------------------------------------------------------------------------------------------------------------ the command

def test_the_command_scores_local_data_with_lm_evals_tasks(place, no_network):
    done = command("eval.py", "tasks", "a,b", "--tasks=arc_easy,boolq,hellaswag,piqa", "--task-data=items", "--out=out",
                   cwd=place)
    result = read_json(place / "out" / "tasks.json", "")
    items = [json.loads(line) for line in (place / "out" / "items.jsonl").read_text("utf-8").splitlines()]
    gold = {"arc_easy": [1, 2, 4, 0, 1, 1], "boolq": [0, 0, 1, 0, 0, 1, 0], "hellaswag": [0, 1, 2, 3, 0, 1],
            "piqa": [0, 0, 0, 1, 1]}
    chance = {"arc_easy": (4 / 4 + 1 / 5 + 1 / 3) / 6, "boolq": 0.5, "hellaswag": 0.25, "piqa": 0.5}
    majority = {"arc_easy": 3 / 6, "boolq": 5 / 7, "hellaswag": 2 / 6, "piqa": 3 / 5}
    assert result["splits"] == {"arc_easy": "test", "boolq": "validation", "hellaswag": "validation", "piqa": "validation"}
    choices = {"arc_easy": [record["choices"]["text"] for record in ITEMS["arc_easy.test"]],
               "hellaswag": [["eats it.", "sings aloud.", "sleeps on the long grass", "runs."]] * 6,
               "piqa": [["lift the lid", "burn it"]] * 5}
    for task, targets in gold.items():
        these = [item for item in items if item["task"] == task]
        assert [item["target"] if task != "hellaswag" else int(item["target"]) for item in these] == targets
        for run in "ab":
            told = result["tasks"][task][run]
            assert (told["n"], told["chance"], told["majority"]) == (len(targets), pytest.approx(chance[task]), majority[task])
            values = [item["runs"][run]["log_likelihoods"] for item in these]
            right = [int(np.argmax(row)) == target for row, target in zip(values, targets)]
            assert told["acc"]["value"] == pytest.approx(np.mean(right))
            assert told["acc"]["stderr"] == pytest.approx(np.std(right, ddof=1) / len(right) ** 0.5)
            if task in choices:
                norm = [int(np.argmax(np.array(row) / [len(text) for text in texts])) == target
                        for row, texts, target in zip(values, choices[task], targets)]
                assert told["acc_norm"]["value"] == pytest.approx(np.mean(norm))
        pair, = [pair for pair in result["differences"] if pair["task"] == task]
        right = [[item["runs"][run]["acc"] for item in these] for run in "ba"]
        assert pair["acc"]["mean"] == pytest.approx(np.mean(right[0]) - np.mean(right[1]))
        assert pair["acc"]["mcnemar_p"] == pytest.approx(mcnemar(*right))
    assert "arc_easy (test, 6 items): chance 0.2556, always the same place 0.5000" in done.stdout
    assert "b minus a, paired: acc" in done.stdout and "without the beginning of their context" in done.stdout


def test_prompts_are_those_of_lm_eval(place, tmp_path, no_network, lm):
    flags = Tasks(tasks="arc_easy,boolq,hellaswag,piqa", task_data=str(place / "items"))
    tasks, *_ = load_tasks(flags, tmp_path)
    prompts = {"arc_easy": "Question: Which, 1?\nAnswer:", "boolq": "It is 1. \nQuestion: is 1 so?\nAnswer:",
               "hellaswag": "Cooking: A man cooks. soup. He", "piqa": "Question: Open box 0\nAnswer:"}
    for name, prompt in prompts.items():
        doc = tasks[name].eval_docs[0]
        assert tasks[name].doc_to_text(doc) == prompt
        choices = tasks[name].doc_to_choice(doc)
        wanted = lm.loglikelihood(requests("loglikelihood", *[(prompt, f" {choice}") for choice in choices]))
        tasks[name].build_all_requests(limit=1, rank=0, world_size=1)
        assert lm.loglikelihood(tasks[name].instances) == wanted
    assert tasks["boolq"].doc_to_choice(tasks["boolq"].eval_docs[0]) == ["no", "yes"]


@pytest.mark.skipif(not DATA, reason="SSA_DATA_DIR is not set: no public task data")
def test_public_data_loads_whole_with_every_answer_in_range(tmp_path, no_network):
    counts = {"arc_easy.test": 2376, "arc_easy.validation": 570, "arc_challenge.test": 1172, "arc_challenge.validation": 299,
              "boolq.validation": 3270, "hellaswag.validation": 1000, "piqa.validation": 1838}
    records = {}
    for name, n in counts.items():
        path, = Path(DATA, "zeroshot").glob(f"{name}*.jsonl")
        records[name] = read_records(path, CHECKS[name.split(".")[0]])
        assert len(records[name]) == n
    assert sum(record["label"] for record in records["boolq.validation"]) / 3270 == pytest.approx(0.6217, abs=1e-4)  # published
    tasks, splits, _ = load_tasks(Tasks(tasks="arc_challenge", task_data=str(Path(DATA, "zeroshot"))), tmp_path)
    task, docs = tasks["arc_challenge"], tasks["arc_challenge"].eval_docs
    assert splits == {"arc_challenge": "test"} and len(docs) == 1172
    for doc, record in list(zip(docs, records["arc_challenge.test"]))[::100]:
        assert doc["choices"]["text"][task.doc_to_target(doc)] == dict(
            zip(record["choices"]["label"], record["choices"]["text"]))[record["answerKey"]]


def test_lm_evals_own_command_takes_a_run(place, tmp_path, no_network, monkeypatch, capsys):
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", functools.partial(lm_eval.tasks.TaskManager, include_defaults=False))
    monkeypatch.setattr("sys.argv", [])
    (tmp_path / "own.yaml").write_text(json.dumps(dict(
        task="own", dataset_path="json", dataset_kwargs=dict(data_files={"test": str(place / "items" / "piqa.validation.jsonl")}),
        test_split="test", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{goal}}",
        metric_list=[dict(metric="bits_per_byte", aggregation="bits_per_byte", higher_is_better=False)])), encoding="utf-8")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    command_line(str(place / "a"), ["--tasks", "own", "--include_path", str(tmp_path), "--limit", "4", "--output_path",
                                    str(tmp_path / "out")])
    assert "bits_per_byte" in capsys.readouterr().out
    path, = (tmp_path / "out").rglob("results_*.json")
    told = json.loads(path.read_text(encoding="utf-8"))["results"]["own"]["bits_per_byte,none"]
    model = LanguageModel(str(place / "a"))
    texts = [record["goal"] for record in ITEMS["piqa.validation"][:4]]
    nats = -sum(model.loglikelihood_rolling(requests("loglikelihood_rolling", *[(text,) for text in texts])))
    assert told == pytest.approx(nats / np.log(2) / sum(map(len, texts)), rel=1e-4)
    with pytest.raises(UserError, match="lm-eval: .*nonsense"):
        command_line(str(place / "a"), ["--tasks", "nonsense"])


# ------------------------------------------------------------------------------------------------------------ wrong input

WRONG = [
    ("tasks a --tasks=arc_esy --task-data=items", "--tasks=arc_esy: lm-eval has no task of this name"),
    ("tasks a --tasks=", "--tasks=: is empty"),
    ("tasks a --tasks=piqa --limit=-1", "--limit=-1"),
    ("tasks nowhere --tasks=piqa", "nowhere: no such folder"),
    ("tasks a --tasks=piqa --task-data=nowhere", "--task-data=nowhere: no such folder"),
    ("tasks a --tasks=arc_challenge --task-data=items", "no file arc_challenge.test*.jsonl or arc_challenge.validation*.jsonl"),
    ("tasks a --tasks=piqa --task-data=json", "piqa.validation.jsonl line 2: is not JSON"),
    ("lm-eval nowhere --tasks piqa", "nowhere: no such folder"),
]


@pytest.fixture(scope="module")
def broken(place):
    (place / "json").mkdir()
    (place / "json" / "piqa.validation.jsonl").write_text(
        '{"goal": "g", "sol1": "s", "sol2": "t", "label": 0}\n{"goal": \n', encoding="utf-8")
    return place


@pytest.mark.parametrize("flags, part", WRONG)
def test_wrong_input_gets_one_line_and_writes_nothing(broken, no_network, flags, part):
    before = snapshot(broken)
    refused(command("eval.py", *flags.split(), cwd=broken, check=False), part)
    assert snapshot(broken) == before


@pytest.mark.parametrize("task, content, part", [
    ("boolq", '{"question": "q", "passage": "p", "answer": "yes"}', "line 1: has neither `answer`, true or false, nor `label`"),
    ("boolq", '{"question": "q", "answer": true}', "line 1: field `passage` is null, not a text"),
    ("hellaswag", '{"ctx_a": "a", "ctx_b": "b", "activity_label": "l", "endings": "e", "label": "0"}', "`endings` is not a list"),
    ("hellaswag", '{"ctx_a": "a", "ctx_b": "b", "activity_label": "l", "endings": ["e"], "label": "1"}', "a number from 0 to 0"),
    ("piqa", '{"goal": "g", "sol1": "s", "sol2": "t", "label": -1}', "field `label` is -1, not a number from 0 to 1"),
    ("arc_easy", json.dumps(arc(1, "D", "ABC")), "field `answerKey` is \"D\", not one of the labels ['A', 'B', 'C']"),
    ("arc_easy", '{"question": "q", "choices": ["a"], "answerKey": "A"}', "field `choices` has not two lists"),
    ("piqa", "[1]", "line 1: is not a JSON object"),
    ("piqa", "\n", "has no records"),
])
def test_records_of_another_schema_are_named(tmp_path, task, content, part):
    (tmp_path / "items.jsonl").write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as error:
        read_records(tmp_path / "items.jsonl", CHECKS[task])
    assert part in str(error.value)


def test_other_files_of_another_schema_are_named(tmp_path):
    (tmp_path / "winogrande.validation.jsonl").write_text('{"other": "schema"}\n', encoding="utf-8")
    with pytest.raises(UserError, match="--tasks=winogrande: lm-eval cannot read its data from --task-data="):
        load_tasks(Tasks(tasks="winogrande", task_data=str(tmp_path)), tmp_path)
    for name in ("piqa.validation.jsonl", "piqa.validation.old.jsonl"):
        (tmp_path / name).write_text("{}\n", encoding="utf-8")
    with pytest.raises(UserError, match="has several files for piqa"):
        load_tasks(Tasks(tasks="piqa", task_data=str(tmp_path)), tmp_path)


def test_without_lm_eval_the_extra_is_named(place, tmp_path):
    (tmp_path / "lm_eval.py").write_text("raise ImportError('no lm_eval')", encoding="utf-8")
    for words in (["tasks", "a", "--tasks=piqa"], ["lm-eval", "a", "--tasks", "piqa"]):
        refused(command("eval.py", *words, cwd=place, check=False, fresh=True, PYTHONPATH=str(tmp_path)), 'pip install -c')
