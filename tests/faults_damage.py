"""Damage each file that continuing or loading a run reads: it must be named, and never trained on.

Three ways, at random places: one bit flips, the file is cut short, a block becomes zeros. What may follow:

    refused     exit code 2, one line that names the file, the run folder as it was
    replaced    a line that names the file; the checkpoint before it is used, and the run ends as if nothing had happened
    lost        metrics.jsonl alone: a line that names it, the weights as if nothing had happened; some of its numbers are gone
                (the last evaluation is in the checkpoint too)
"""

import random
from collections import Counter

from checkpoint import load_run
from conftest import snapshot
from faults_kill import Undisturbed
from faults_programs import copy_of, short_cuts
from flags import UserError

HOW = ("a flipped bit", "cut short", "a block of zeros")


def damage(path, how, rng):
    """Change a file; -> where."""
    content = bytearray(path.read_bytes())
    before, place = bytes(content), rng.randrange(len(content))
    if how == "a flipped bit":
        content[place] ^= 1 << rng.randrange(8)
    elif how == "cut short":
        del content[place:]
    else:
        while content == before:  # zeros may have been zeros before
            place = rng.randrange(len(content))
            length = min(rng.randrange(1, 4096), len(content) - place)
            content[place:place + length] = bytes(length)
    path.write_bytes(content)
    return place


def files_of(undisturbed):
    """The files of a finished run that continuing it reads, one entry each."""
    folder = undisturbed.folder
    return [sorted(folder.glob(pattern))[-1].relative_to(folder) for pattern in undisturbed.program.damageable]


def damaged_and_continued(undisturbed, file, how, rng):
    """-> a record; "verdict" is one of the words above, or says what is wrong."""
    program = undisturbed.program
    with copy_of(undisturbed.folder) as folder:
        place, before = damage(folder / file, how, rng), snapshot(folder / "r")
        done = program.run(folder, *program.again, check=False, before=short_cuts)
        named = file.name.removesuffix(".sha256") in done.stderr  # a checkpoint's checksum is part of it
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        result, after = program.result(folder) if done.returncode == 0 else None, snapshot(folder / "r")
        changed = {name for name in before | after if before.get(name) != after.get(name)}
        if "Traceback" in done.stderr:
            verdict = "a traceback: " + done.stderr[-1500:]
        elif not named:
            verdict = f"not named: exit {done.returncode}, {done.stderr[-500:]}"
        elif done.returncode == 2 and len(errors) == 1:
            verdict = "refused" if not changed else f"refused, but changed {changed}"
        elif done.returncode == 0 and result == undisturbed.result:
            verdict = "replaced"
        elif done.returncode == 0 and file.name == "metrics.jsonl" and result["weights"] == undisturbed.result["weights"]:
            verdict = "lost"
        else:
            verdict = f"went on to another end: exit {done.returncode}"
    return {"file": str(file), "how": how, "at byte": place, "verdict": verdict}


def damaged_and_loaded(undisturbed, how, rng):
    """model.safetensors, which --init-from and whoever uses the model read."""
    with copy_of(undisturbed.folder) as folder:
        place = damage(folder / "r" / "model.safetensors", how, rng)
        try:
            load_run(folder / "r")
            verdict = "loaded all the same"
        except UserError as error:
            verdict = "refused" if "model.safetensors" in str(error) else f"not named: {error}"
    return {"file": "r/model.safetensors", "how": how, "at byte": place, "verdict": verdict}


def long_form(program, n, seed=0):
    rng, records = random.Random(seed), []
    with Undisturbed(program) as undisturbed:
        files = files_of(undisturbed)
        for i in range(n):
            file, how = files[i % len(files)], HOW[i // len(files) % len(HOW)]
            records += [damaged_and_continued(undisturbed, file, how, rng), damaged_and_loaded(undisturbed, HOW[i % 3], rng)]
    return {"files": [str(file) for file in files], "verdicts": Counter(r["verdict"] for r in records), "cases": records}
