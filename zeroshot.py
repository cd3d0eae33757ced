"""python eval.py tasks RUN[,RUN...] --tasks=arc_easy,boolq: zero-shot multiple choice, through EleutherAI's lm-eval.

lm-eval makes the prompts and does the scoring: a question is answered by the choice whose text the model finds likeliest
(`acc`), or likeliest for its length (`acc_norm`). Beside each accuracy stand what guessing and what always choosing the
same letter would reach; differences between runs are paired over the items (McNemar's exact test, and a bootstrap interval).

Data comes from the Hugging Face hub, or with --task-data=DIR from files (taskdata.py). Everything else lm-eval can do:
`python eval.py lm-eval RUN` and lm-eval's own flags. The folder --out gets tasks.json (everything) and items.jsonl (the
log-likelihood of every choice, without the texts).
"""

import json
import logging
import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from files import one_line, write_atomically, write_json
from flags import UserError, require
from intervals import mcnemar, paired_bootstrap
from trained import RunFlags, load_trained, provenance, result_folder


@dataclass
class Tasks(RunFlags):
    """Zero-shot accuracy of trained models on lm-eval's tasks."""

    tasks: str = "arc_easy,arc_challenge,boolq,hellaswag,piqa"
    """names of lm-eval's tasks, commas between them"""
    task_data: str = ""
    """folder with <task>.<split>*.jsonl (empty: download from the Hugging Face hub)"""
    limit: int = 0
    """only so many items of each task, from the first (0: all)"""
    batch_size: int = 0
    """texts at once (0: what fits well)"""
    out: str = ""
    """folder for the results (empty: runs/tasks-<runs>)"""

    def names(self):
        return list(dict.fromkeys(name.strip() for name in self.tasks.split(",") if name.strip()))

    def check(self):
        require(self, "tasks", self.names(), "is empty; name some of lm-eval's tasks")
        require(self, "task_data", not self.task_data or os.path.isdir(self.task_data), "no such folder; name another")
        for name in ("limit", "batch_size"):
            require(self, name, getattr(self, name) >= 0, "must be at least 0")
        require(self, "out", not os.path.isfile(self.out), "is a file; name a folder")
        super().check()


def load_tasks(flags, work):
    """({name: lm-eval's task}, {name: the split evaluated}, lm-eval's task manager), with the data. work: a folder that outlives
    the tasks. Raises UserError for an unknown task and for data that is not there or not as it should be."""
    import datasets
    from lm_eval.tasks import TaskManager

    from taskdata import find_tasks, local_task
    paths = find_tasks(flags.names())
    manager = TaskManager(include_defaults=False, include_path=sorted({path.parent for path in paths.values()}))
    if flags.task_data:
        datasets.disable_progress_bars()
    tasks, splits = {}, {}
    for name, path in paths.items():
        config = manager.task_index[name].cfg
        splits[name] = "test" if config.get("test_split") else "validation"
        if flags.task_data:
            path, splits[name] = local_task(name, {**config, "path": path}, flags.task_data, work)
        try:
            tasks[name] = manager.load([str(path)])["tasks"][name]
        except Exception as error:  # of datasets, of the network, of a template that finds no field: many kinds
            where = f"--task-data={flags.task_data}" if flags.task_data else "the Hugging Face hub; --task-data names local files"
            raise UserError(f"--tasks={name}: lm-eval cannot read its data from {where} ({one_line(error)})") from None
    return tasks, splits, manager


def baselines(samples):
    """(chance, majority): the accuracy of guessing, and of always choosing one and the same place, the best in hindsight.
    samples: lm-eval's records of the items; majority is None where the answer is not a place."""
    chance = sum(1 / len(sample["arguments"]) for sample in samples) / len(samples)
    targets = [sample["target"] for sample in samples]
    if not all(isinstance(target, int) for target in targets):
        return chance, None
    return chance, Counter(targets).most_common(1)[0][1] / len(samples)


def summarise(result, samples):
    """{"n", "chance", "majority", and each metric: {"value", "stderr"}} of one run on one task."""
    summary = dict(zip(("chance", "majority"), baselines(samples)), n=len(samples))
    for key, value in result.items():
        metric, _, rest = key.partition(",")  # keys are "acc,none", "acc_stderr,none"
        if rest and not metric.endswith("_stderr"):
            stderr = result.get(f"{metric}_stderr,{rest}")
            summary[metric] = dict(value=float(value), stderr=stderr if isinstance(stderr, float) else None)
    return summary


def difference(task, name, samples, reference_name, reference):
    """One run minus the reference on the same items, for each metric that is right or wrong item by item."""
    result = dict(task=task, run=name, minus=reference_name)
    for metric in samples[0]["metrics"]:
        first, second = ([sample[metric] for sample in these] for these in (samples, reference))
        if all(value in (0, 1) for value in first + second):
            result[metric] = dict(paired_bootstrap(first, second), mcnemar_p=mcnemar(first, second))
    return result


def describe(name, summary):
    parts = [f"{metric} {value['value']:.4f}" + (f" ± {value['stderr']:.4f}" if value["stderr"] is not None else "")
             for metric, value in summary.items() if isinstance(value, dict)]
    return f"  {name}: {', '.join(parts)}"


def describe_difference(pair):
    parts = [f"{metric} {value['mean']:+.4f}" + ("" if value["low"] is None else f" [{value['low']:+.4f}, {value['high']:+.4f}]")
             + f" (McNemar p = {value['mcnemar_p']:.2g})" for metric, value in pair.items() if isinstance(value, dict)]
    return f"  {pair['run']} minus {pair['minus']}, paired: {', '.join(parts)}"


def report(task, split, summaries, differences):
    """Lines about one task. summaries: run -> what `summarise` gave."""
    first = next(iter(summaries.values()))
    majority = "" if first["majority"] is None else f", always the same place {first['majority']:.4f}"
    print(f"{task} ({split}, {first['n']:,} items): chance {first['chance']:.4f}{majority}; ± is one standard error")
    for name, summary in summaries.items():
        print(describe(name, summary))
    for pair in differences:
        print(describe_difference(pair))


def write_items(path, samples):
    """items.jsonl: task, item, the right place, and of every run the log-likelihoods and what is right or wrong; no texts.
    samples: run -> task -> lm-eval's records."""
    lines = []
    for task, items in next(iter(samples.values())).items():
        for number, item in enumerate(items):
            runs = {run: {"log_likelihoods": [response[0] for response in these[task][number]["filtered_resps"]],
                          **{metric: these[task][number][metric] for metric in item["metrics"]}}
                    for run, these in samples.items()}
            lines.append(json.dumps(dict(task=task, item=item["doc_id"], target=item["target"], runs=runs), default=str) + "\n")
    write_atomically(path, "".join(lines).encode("utf-8"))


def main(flags):
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")  # lm-eval's own progress bars; ours look for themselves
    from lmeval import LanguageModel  # first, as it says so where lm-eval is not installed
    import lm_eval

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    samples, results, truncated = {}, {}, {}
    with tempfile.TemporaryDirectory(prefix="ssa-tasks-") as work:
        runs = load_trained(flags)  # before the tasks, which may be downloads
        tasks, splits, manager = load_tasks(flags, Path(work))
        for run in runs:
            model = LanguageModel(run, batch_size=flags.batch_size)
            done = lm_eval.simple_evaluate(model, tasks=list(tasks.values()), limit=flags.limit or None, task_manager=manager)
            samples[run.name], results[run.name], truncated[run.name] = done["samples"], done["results"], model.truncated
    summaries = {task: {run.name: summarise(results[run.name][task], samples[run.name][task]) for run in runs} for task in tasks}
    differences = [difference(task, run.name, samples[run.name][task], runs[0].name, samples[runs[0].name][task])
                   for task in tasks for run in runs[1:]]
    for task in tasks:
        report(task, splits[task], summaries[task], [pair for pair in differences if pair["task"] == task])
    for run in runs:
        if truncated[run.name]:
            print(f"note: {run.name} reads {run.model.config.context} tokens, so {truncated[run.name]:,} choices were scored "
                  "without the beginning of their context")
    folder = result_folder(flags, "tasks", *(run.folder.resolve().name for run in runs))
    write_items(folder / "items.jsonl", samples)
    write_json(folder / "tasks.json", dict(
        tasks=summaries, splits=splits, differences=differences, truncated=truncated, lm_eval=lm_eval.__version__,
        runs={run.name: run.about() for run in runs}, **provenance(flags, runs[0].device)))
    print(f"everything is in {folder}")
