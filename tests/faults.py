"""The long form of the fault tests: many more kills, damages and cases than `pytest tests/test_faults.py` tries.

    python tests/faults.py --out=results/reliability                       two and a half hours
    python tests/faults.py --only=kill,damage --kills=10 --damages=30

Each part writes a JSON file with every case, its verdict, the machine and the date, and prints a line of a table. It exits
with 1 if any case went wrong.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from flags import UserError, fail, require, tyro_cli  # noqa: E402

EXAMPLE = r"Failing test case: .*?\n\S*\s*\)\n"  # as hypothesis prints it
PARTS = ("kill", "damage", "hostile", "processes", "numerics", "triton")


@dataclass
class Flags:
    """The long form of the fault tests."""

    out: str = "results/reliability"
    """folder for the JSON files"""
    only: str = ",".join(PARTS)
    """parts to run"""
    programs: str = ""
    """programs to kill and damage, such as train_gpt,data (all if empty)"""
    kills: int = 50
    """of each program, at moments chosen evenly over their kinds"""
    clock: int = 10
    """of each program, at random times"""
    damages: int = 200
    """of each program's files, and as many of its weights"""
    processes: int = 10
    """runs of two processes, one of them killed"""
    examples: int = 10_000
    """cases of each numerical test (through Triton's interpreter half a second each)"""
    tests: str = ""
    """numerical tests with one of these words in their names, such as ssa-plain,softmax (all if empty)"""
    seed: int = 0
    """of all choices"""

    def check(self, programs):
        """Raise UserError for a value that cannot work. programs: the names known."""
        for name, known in (("only", PARTS), ("programs", programs)):
            for word in getattr(self, name).split(",") if getattr(self, name) else ():
                require(self, name, word in known, f"{word!r} is unknown; choose among {', '.join(known)}")
        for name in ("kills", "clock", "damages", "processes", "examples", "seed"):
            require(self, name, getattr(self, name) >= 0, "must be at least 0")


def main(flags, known):
    import torch

    import faults_damage
    import faults_kill
    import faults_processes
    torch.set_num_threads(1)
    parts, wrong = flags.only.split(","), 0
    programs = {name: known[name] for name in (flags.programs.split(",") if flags.programs else known)}
    print("| what | cases | as it must be | seconds |\n|---|---|---|---|", flush=True)
    if "kill" in parts:
        for name, program in programs.items():
            wrong += part(flags, f"kill-{name}", lambda: judge_kills(
                faults_kill.long_form(program, flags.kills, flags.clock, flags.seed)))
    if "damage" in parts:
        for name, program in programs.items():
            if program.damageable:
                wrong += part(flags, f"damage-{name}", lambda: judge(
                    faults_damage.long_form(program, flags.damages, flags.seed), {"refused", "replaced", "lost"}))
    if "hostile" in parts:
        wrong += part(flags, "hostile", lambda: judge(hostile(), {"refused", "handled"}))
    if "processes" in parts:
        wrong += part(flags, "processes", lambda: judge_processes(faults_processes.long_form(flags.processes, flags.seed)))
    if "numerics" in parts:
        wrong += part(flags, "numerics", lambda: judge(numerics(flags.examples, flags.tests), {"passed"}))
    if "triton" in parts:
        wrong += part(flags, "triton", lambda: judge(triton(flags.examples), {"passed"}))
    return wrong


def part(flags, name, function):
    """Run a part, write its JSON file, print its line; -> how many cases went wrong."""
    from run import machine
    start = time.monotonic()
    result, n, wrong = function()
    seconds = round(time.monotonic() - start)
    chosen = {name: value for name, value in asdict(flags).items() if name != "out"}
    about = {"date": time.strftime("%Y-%m-%d"), "machine": machine("cpu"), "flags": chosen, "seconds": seconds, "count": n,
             "went wrong": wrong}
    Path(flags.out).mkdir(parents=True, exist_ok=True)
    lists = [key for key, value in result.items() if isinstance(value, list)]
    rows = {key: "@" + key for key in lists}  # one line a case
    text = json.dumps(about | result | rows, indent=1, ensure_ascii=False)
    for key in lists:
        cases = ",\n".join("  " + json.dumps(case, ensure_ascii=False) for case in result[key])
        text = text.replace(f'"@{key}"', f"[\n{cases}\n ]")
    (Path(flags.out) / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(f"| {name} | {n} | {n - wrong} | {seconds} |", flush=True)
    return wrong


def judge(result, good):
    """(result, number of cases, how many of them have no verdict in `good`)."""
    cases = [case for value in result.values() if isinstance(value, list) for case in value if isinstance(case, dict)]
    return result, len(cases), sum(case["verdict"] not in good for case in cases)


def judge_kills(result):
    cases = result["kills"] + result["kills by the clock"] + result["disk full"]
    wrong = [case for case in cases if not case["same"] or case["left behind"] or not case.get("one line", True)]
    return result, len(cases), len(wrong)


def judge_processes(result):
    cases = result["cases"]
    return result, len(cases), sum(
        case["seconds until the other ended"] > 60 or len(case["said"]) != 1 or any(case["codes then"])
        or case["largest difference of a loss"] is None or case["largest difference of a loss"] > 1e-5 for case in cases)


def hostile():
    from faults_hostile import HOSTILE, check
    from faults_kill import Undisturbed
    from faults_programs import PROGRAMS
    with Undisturbed(PROGRAMS["train_gpt"]) as undisturbed:
        return {"cases": [check(case, undisturbed.folder) for case in HOSTILE]}


def numerics(examples, words="", workers=2, **env):
    """The property tests, or those with one of these words in their names, through pytest, with so many cases each."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        named = f" and ({' or '.join(words.split(','))})" if words else ""
        chosen = ["-k", "triton"] if env else [
            "-k", f"not triton and (numerics or finite or 60_digit){named}", "tests/test_ssa.py"]
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), f"--junitxml={report}", "tests/test_numerics.py",
                   *chosen]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL,
                       env={**os.environ, "SSA_EXAMPLES": str(examples), "OMP_NUM_THREADS": "1", **env})
        cases = []
        for test in xml.etree.ElementTree.parse(report).iter("testcase"):
            problems = [problem for problem in test if problem.tag in ("failure", "error", "skipped")]
            verdict = " ".join(f"{p.tag}: {p.get('message', '')[:500]} {''.join(re.findall(EXAMPLE, p.text or '', re.S))}"
                               for p in problems) or "passed"
            cases.append({"test": test.get("name"), "seconds": float(test.get("time")), "verdict": verdict})
        skipped = [case for case in cases if case["verdict"].startswith("skipped")]
        return {"examples of each": examples, "tests": [case for case in cases if case not in skipped],
                "skipped": [f"{case['test']}: {case['verdict']}" for case in skipped]}


def triton(examples):
    """The kernels of GPUs through Triton's interpreter: ten parts with seeds of their own, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(lambda seed: numerics(examples // 10, "", 0, SSA_SEED=str(seed), TRITON_INTERPRET="1"),
                              range(10)))
    return {"examples of each": examples // 10,
            "tests": [{"seed": seed} | case for seed, part in enumerate(parts) for case in part["tests"]],
            "skipped": [case for part in parts for case in part["skipped"]]}


if __name__ == "__main__":
    try:
        flags = tyro_cli(Flags, sys.argv[1:], Flags())
        from faults_programs import PROGRAMS  # after the flags, since it takes seconds
        flags.check(PROGRAMS)
    except UserError as error:
        fail(error)
    sys.exit(1 if main(replace(flags, out=str(Path(flags.out).resolve())), PROGRAMS) else 0)
