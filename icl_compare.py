"""A comparison of scorers: train each run in a process of its own, gather what the tests measured, one table and figures.

Runs are paired by seed: the same initial weights (but for the scorer's own), the same batches, the same test sets. Seeds differ
more than scorers do, so a difference counts only against the interval of the paired differences. One seed has no interval.
"""

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from files import read_json, write_atomically
from flags import UserError
from intervals import paired_t_interval, t_interval


def main(flags):
    """Train, test, print one table, draw; -> the exit code."""
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    runs = flags.runs()
    check_first(runs)
    scorers = len({run.scorer for run in runs})
    folder = Path(flags.out)
    if flags.results:
        folder = Path(flags.results) / (flags.name if scorers <= 2 else f"{flags.name}-{scorers}-scorers")
    require_ours(Path(flags.out), runs)
    for name, path in (("--out", Path(flags.out)), ("--results", folder)):
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{name}={path}: cannot be written ({error.strerror}); choose another folder") from None
    print(f"preset {flags.preset}, {flags.task} with {flags.asked} labels: {len(runs)} runs -> {flags.out}")
    code = train_all(runs, flags)
    if code:
        return code
    results = {}
    for run in runs:
        summary, shift = (read_json(Path(run.out) / name, "train the run again with --overwrite")
                          for name in ("summary.json", "shift.json"))
        result = summary | shift
        write_lines(folder / f"{run.scorer}-s{run.seed}.json", result)
        results.setdefault(run.scorer, []).append(result)
    rows = compare(results)
    write_lines(folder / "comparison.json", dict(command=shlex.join(["python", *sys.argv]), date=time.strftime("%Y-%m-%d"),
                                                 seeds=[run.seed for run in runs if run.scorer == runs[0].scorer], rows=rows))
    text = table(rows, results, flags)
    write_atomically(folder / "table.txt", text.encode("utf-8"))
    print(text)
    import icl_figures  # here, because matplotlib takes a second that a wrong flag should not wait for
    print(f"written to {folder}: table.txt, comparison.json, a JSON a run, {', '.join(icl_figures.draw_all(results, folder))}")
    return 0


def require_ours(folder, runs):
    """Raise UserError for a folder with files of others: our tables and figures would replace some."""
    names = {Path(run.out).name + ending for run in runs for ending in ("", ".log")}
    ours = any((Path(run.out) / "config.json").exists() for run in runs)
    if folder.is_dir() and not ours and {path.name for path in folder.iterdir()} - names:
        raise UserError(f"--out={folder}: is not empty and holds no run of this comparison; choose another folder")


def write_lines(path, values):
    """A dict as JSON, a line a key, numbers to five digits: to be read and kept, beside the exact ones in the run folders."""
    lines = [f"{json.dumps(key)}: {json.dumps(rounded(value))}" for key, value in values.items()]
    write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode("utf-8"))


def rounded(values):
    if isinstance(values, dict):
        return {key: rounded(value) for key, value in values.items()}
    if isinstance(values, list):
        return [rounded(value) for value in values]
    return float(f"{values:.5g}") if isinstance(values, float) else values


def train_all(runs, flags):
    """Every run as a process, some at a time; -> 0, or the exit code of the first that failed."""
    jobs, waiting, running, code = flags.jobs or os.cpu_count() or 1, list(runs), {}, 0
    stopped = []
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches the runs, too: they save and end, we wait for them
        signal.signal(number, lambda number, frame: stopped.append(number))
    while running or (waiting and not code and not stopped):
        while waiting and len(running) < jobs and not code and not stopped:
            run = waiting.pop(0)
            log = Path(f"{run.out}.log")
            with open(log, "a", encoding="utf-8") as file:
                process = subprocess.Popen(run.command(), stdout=file, stderr=subprocess.STDOUT)
                running[process] = log, file.tell()
            print(f"started {run.scorer} with seed {run.seed} (log: {log})")
        if stopped:
            for process in running:
                process.send_signal(signal.SIGTERM)
        time.sleep(0.1)
        for process in [process for process in running if process.poll() is not None]:
            log, begin = running.pop(process)
            lines = log.read_bytes()[begin:].decode("utf-8", errors="replace").strip().splitlines() or ["no output"]
            errors = [line for line in lines if line.startswith("error: ")] if process.returncode else []
            print(f"{log.stem}: {(errors or lines)[-1]}", file=sys.stderr if process.returncode else sys.stdout)
            code = code or process.returncode
    if stopped:
        words = [word for word in sys.argv if word not in ("--overwrite", "--resume")]
        print(f"stopped; continue with\n  {shlex.join([sys.executable, *words, '--resume'])}")
        return 130
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    return code


def check_first(runs):
    """Raise UserError for what this machine cannot do, before any run has begun."""
    import torch  # here, so that a wrong flag is answered before the seconds that this takes

    from model import Transformer
    from run import decide
    with contextlib.redirect_stdout(io.StringIO()):  # the runs print their decisions themselves
        for run in {run.scorer: run for run in runs}.values():
            torch.manual_seed(run.seed)
            decide(run, Transformer(run.model_config()))


# ---------------------------------------------------------------------------------------------------------------- the table

def measures(result):
    """(name, value, what answers without thought score, whether training reached the positions) of one run. Errors: the share of
    wrong answers, or the squared error from the fourth point on."""
    basis = result["in_distribution"]["baselines"]
    yield "in distribution", result["in_distribution"]["error"], best(basis), True
    if result["task"] == "linear":
        for cell in result["functions"]["cells"]:
            if (cell["sigma_x"], cell["sigma_f"]) in ((3, 1), (10, 1), (1, 3), (1, 10), (3, 3), (10, 10)):
                name = f"sigma_x {cell['sigma_x']}, sigma_f {cell['sigma_f']}"
                yield name, cell["model"], best({k: cell[k] for k in ("zero", "3 nearest", "averaging")}), cell["trained"]
        return
    for cell in result["lengths"]:
        if cell["error"] is not None and (cell["length"], cell["sigma"]) in (
                (20, 1), (40, 1), (80, 1), (120, 1), (200, 1), (40, 10), (40, 30), (120, 10), (200, 30)):
            constants = {k: cell[k] for k in ("constant_true", "constant_false", "copy_last")}
            yield f"length {cell['length']}, sigma {cell['sigma']}", cell["error"], best(constants), cell["trained"]
    if "outlier" in result:
        for part, words in (("before", "before it"), ("own", "itself, harmless"), ("sign", "itself, deciding or not"),
                            ("after", "behind a harmless one"), ("missed", "behind a deciding one")):
            for size in (1e2, 1e6):
                value = result["outlier"]["summary"][part][result["outlier"]["magnitudes"].index(size)]
                yield f"outlier {size:.0e}: {words}", value, None if part == "missed" else 0.5, True
        for name, found in result["interventions"].items():
            if "swapped" not in name:  # into what differs between scorers
                own = found["outlier"]["own"][result["outlier"]["magnitudes"].index(1e6)]
                yield f"outlier 1e+06: itself, {name}", own, 0.5, True
                for cell in found["wide"]:
                    if cell["error"] is not None:
                        yield f"length {cell['length']}, sigma {cell['sigma']}, {name}", cell["error"], 0.5, cell["trained"]


def best(baselines):
    """The least error of the answers that take no thought (least squares is thought: the right answer to `linear`)."""
    return min(value for name, value in baselines.items() if value is not None and name != "least squares")


def compare(results):
    """A row a measure: for every scorer its interval over seeds, and its difference to the first one, paired by seed."""
    listed = {scorer: [list(measures(run)) for run in runs] for scorer, runs in results.items()}
    first, rows = next(iter(listed)), []
    for i, (name, _, baseline, trained) in enumerate(listed[first][0]):
        values = {scorer: [run[i][1] for run in runs] for scorer, runs in listed.items()}
        rows.append(dict(measure=name, trained=trained, baseline=baseline,
                         scorers={scorer: t_interval(v) for scorer, v in values.items()},
                         differences={scorer: paired_t_interval(values[first], v) for scorer, v in values.items()
                                      if scorer != first}))
    return rows


def table(rows, results, flags):
    """The comparison as text."""
    scorers = list(results)
    seeds = len(results[scorers[0]])
    percent = flags.task != "linear"

    def show(interval):
        if interval is None:
            return "-"
        text = number(interval["mean"], percent)
        return text if interval["n"] == 1 else f"{text} [{number(interval['low'], percent)}, {number(interval['high'], percent)}]"

    head = ["% wrong" if percent else "squared error", *scorers]
    if len(scorers) == 2:
        head.append(" - ".join(scorers))
    lines = [head + ["without thought"]]
    for row in rows:
        cells = [show(row["scorers"][s]) for s in scorers]
        if len(scorers) == 2:
            cells.append(show(row["differences"][scorers[1]]))
        baseline = "-" if row["baseline"] is None else number(row["baseline"], percent)
        lines.append([row["measure"] + ("" if row["trained"] else " *"), *cells, baseline])
    widths = [max(map(len, column)) for column in zip(*lines)]
    text = "\n".join("  ".join([line[0].ljust(widths[0])] + [c.rjust(w) for c, w in zip(line[1:], widths[1:])]) for line in lines)
    notes = [f"{flags.name}, {seeds} seeds; mean and 95 % interval over seeds, differences paired by seed" if seeds > 1 else
             f"{flags.name}, one seed: no interval, and seeds differ more than scorers do"]
    notes.append(f"{flags.test_sequences} sequences in a cell: chance alone moves a share of 10 % by "
                 f"{196 * (0.09 / flags.test_sequences) ** 0.5:.1f} points" if percent else
                 f"{flags.test_sequences} sequences in a cell")
    if not percent:
        notes.append("from the fourth point on; without thought: the best of zero, 3 nearest, averaging (least squares: 0)")
    if not all(row["trained"] for row in rows):
        notes.append("* at positions that training never reached")
    return "\n".join([text, *notes]) + "\n"


def number(value, percent):
    return f"{100 * value:.2f}" if percent else f"{value:.3g}"
