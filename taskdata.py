"""Local files in place of the data sets that lm-eval's tasks download.

    DIR/<task>.<split>*.jsonl      such as arc_easy.test.jsonl, boolq.validation.jsonl, hellaswag.validation.first1000.jsonl

A task keeps lm-eval's own configuration, prompts and scoring: a YAML file that includes lm-eval's is written, in which only the
place of the data is another (`dataset_path: json`). Records have the schema of the Hugging Face data set; for the tasks below
each is checked first. google/boolq says `answer: true` where lm-eval's BoolQ, made for super_glue, reads `label: 1`.
"""

import importlib.util
import json
import re
from pathlib import Path

from files import one_line
from flags import UserError

SPLITS = ("test", "validation")  # lm-eval evaluates the first that a task has


def find_tasks(names):
    """{name: path of the YAML file in which lm-eval defines this task}. Raises UserError for an unknown name and for a group.

    lm-eval's own index of its 14,000 files takes 20 seconds; one expression over their text takes one.
    """
    root = Path(importlib.util.find_spec("lm_eval").origin).parent / "tasks"
    task, found = re.compile(rb"^task:\s*['\"]?([^\s'\"#]+)", re.MULTILINE), {}
    for path in sorted(root.rglob("*.yaml")):
        if match := task.search(path.read_bytes()):
            found.setdefault(match[1].decode("utf-8"), path)
    for name in names:
        if name not in found:
            raise UserError(f"--tasks={name}: lm-eval has no task of this name; choose one of `lm-eval ls tasks`, such as "
                            f"{', '.join(CHECKS)} (for a group of tasks: python eval.py lm-eval RUN --tasks {name})")
    return {name: found[name] for name in names}


# ---- Schemas: each function takes a record and returns it as lm-eval's configuration wants it, or raises ValueError -----


def texts(record, *names):
    for name in names:
        if not isinstance(record.get(name), str):
            raise ValueError(f"field `{name}` is {json.dumps(record.get(name))[:60]}, not a text")
    return {name: record[name] for name in names}


def choice(value, n):
    """A label, number or digits, as an int below n."""
    if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value)) or int(value) >= n:
        raise ValueError(f"field `label` is {json.dumps(value)}, not a number from 0 to {n - 1}")
    return int(value)


def arc(record):
    choices = record.get("choices")
    lists = [choices.get(name) if isinstance(choices, dict) else None for name in ("text", "label")]
    if not all(isinstance(values, list) and all(isinstance(value, str) for value in values) for values in lists):
        raise ValueError("field `choices` has not two lists of texts, `text` and `label`")
    if len(lists[0]) != len(lists[1]) or record.get("answerKey") not in lists[1]:
        raise ValueError(f"field `answerKey` is {json.dumps(record.get('answerKey'))}, not one of the labels {lists[1]}")
    return texts(record, "question", "answerKey") | {"choices": {"text": lists[0], "label": lists[1]}}


def boolq(record):
    if not isinstance(record.get("answer"), bool) and "label" not in record:
        raise ValueError("has neither `answer`, true or false, nor `label`, 1 or 0")
    label = int(record["answer"]) if "answer" in record else choice(record["label"], 2)
    return texts(record, "question", "passage") | {"label": label}


def hellaswag(record):
    endings = record.get("endings")
    if not isinstance(endings, list) or not endings or not all(isinstance(ending, str) for ending in endings):
        raise ValueError("field `endings` is not a list of texts")
    label = str(choice(record.get("label"), len(endings)))
    return texts(record, "activity_label", "ctx_a", "ctx_b") | {"endings": endings, "label": label}


def piqa(record):
    return texts(record, "goal", "sol1", "sol2") | {"label": choice(record.get("label"), 2)}


CHECKS = {"arc_easy": arc, "arc_challenge": arc, "boolq": boolq, "hellaswag": hellaswag, "piqa": piqa}


# ---- Files ------------------------------------------------------------------------------------------------------------


def read_records(path, check):
    """The checked records of a JSON lines file. Raises UserError naming the line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({one_line(error)}); fetch it again") from None
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("is not a JSON object")
            records.append(check(record))
        except (ValueError, RecursionError) as error:
            reason = "is not JSON" if isinstance(error, json.JSONDecodeError) else str(error)
            raise UserError(f"{path} line {number}: {reason}; a line has the schema of the Hugging Face data set") from None
    if not records:
        raise UserError(f"{path}: has no records; fetch it again")
    return records


def local_task(name, config, folder, work):
    """(path of a YAML file, split): the task `name` with its data from `folder`. config: lm-eval's of this task, whose YAML file
    is config["path"]; work: a folder for what is written. Raises UserError."""
    found = {}
    for split in SPLITS:
        if config.get(f"{split}_split") is None:  # as HellaSwag's test, whose labels are not public
            continue
        paths = sorted(Path(folder).glob(f"{name}.{config[f'{split}_split']}*.jsonl"))
        if len(paths) > 1:
            files = " and ".join(path.name for path in paths)
            raise UserError(f"--task-data={folder}: has several files for {name}, {files}; keep one")
        if paths:
            found[split] = paths[0]
    if not found:
        wanted = " or ".join(f"{name}.{config[f'{split}_split']}*.jsonl" for split in SPLITS if config.get(f"{split}_split"))
        raise UserError(f"--task-data={folder}: has no file {wanted}; put it there, or leave --task-data out to download")
    split = next(split for split in SPLITS if split in found)
    records = read_records(found[split], CHECKS.get(name, dict))
    data = work / f"{name}.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    # JSON is YAML. Splits that are not there are switched off, and with them examples in the prompt: this is zero-shot.
    override = dict(include=str(config["path"]), dataset_path="json", dataset_name=None, training_split=None,
                    fewshot_split=None, num_fewshot=0, validation_split=None, test_split=None,
                    dataset_kwargs=dict(data_files={split: str(data)}, cache_dir=str(work / "cache")))
    override[f"{split}_split"] = split
    path = work / f"{name}.yaml"
    path.write_text(json.dumps(override), encoding="utf-8")
    return path, split
