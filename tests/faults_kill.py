"""Kill a program at a chosen moment, continue it, and compare with the run that nothing disturbed.

In the fork that runs the program, `Moments` counts what is worth dying at: half of a write, before and after a file is put on
disk, gets its name, or is removed, before and after a step, and in an evaluation. At the chosen number it sends itself
SIGKILL, which no program can catch. So a kill is repeated by repeating its number. Kills by the clock, from outside, come
on top of that, for the moments nobody has thought of.
"""

import builtins
import os
import random
import re
import resource
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import torch

import training
from faults_programs import copy_of, folder_for, short_cuts


class Moments:
    """Called in the fork. report: a file that gets the name of every moment, a line each; last: the number to die at."""

    def __init__(self, report=None, last=None):
        self.report, self.last, self.count = report, last, 0

    def __call__(self):
        short_cuts()
        if self.report:
            self.report = os.open(self.report, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for name in ("fsync", "replace", "rename", "unlink", "remove", "mkdir"):
            setattr(os, name, self.around(name, getattr(os, name)))
        training.Training.end_step = self.around("step", training.Training.end_step)
        torch.nn.Module.eval = self.around("evaluation", torch.nn.Module.eval)
        opened = builtins.open
        builtins.open = lambda file, mode="r", *args, **more: (
            TornFile(self, opened(file, mode, *args, **more)) if set(mode) & set("wax") else opened(file, mode, *args, **more))

    def around(self, name, function):
        def wrapped(*args, **more):
            self.has_come(f"before {name}")
            result = function(*args, **more)
            self.has_come(f"after {name}")
            return result
        return wrapped

    def has_come(self, name, last_words=lambda: None):
        if self.report:
            os.write(self.report, f"{name}\n".encode())
        if self.count == self.last:
            last_words()
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1


class TornFile:
    """A file opened for writing; each write is a moment at which half of it reaches the disk."""

    def __init__(self, moments, file):
        self.moments, self.file = moments, file

    def write(self, content):
        half = content[:len(content) // 2] if isinstance(content, str) else memoryview(content).cast("B")
        half = half if isinstance(half, str) else half[:len(half) // 2]
        self.moments.has_come("half a write", lambda: (self.file.write(half), self.file.flush()))
        return self.file.write(content)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.file.close()


class Undisturbed:
    """A finished run of a program: its folder, result, moments (names in their order), and the sizes of the files that it
    wrote, in rising order."""

    def __init__(self, program):
        self.program, self._folder = program, folder_for(program)
        self.folder = self._folder.__enter__()
        read = set(self.folder.rglob("*"))
        report = Path(str(self.folder) + ".moments")
        program.run(self.folder, *program.again, before=Moments(report))
        self.result, self.moments = program.result(self.folder), report.read_text(encoding="utf-8").splitlines()
        report.unlink()
        written = [path.stat().st_size for path in set(self.folder.rglob("*")) - read if path.is_file()]
        self.sizes = sorted({size for size in written if size > 500})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._folder.__exit__(None, None, None)


def choose(moments, n, rng):
    """n moments, as evenly over their names as their numbers allow: there are hundreds of writes, but two evaluations."""
    left = {name: rng.sample(at, len(at)) for name in sorted(set(moments))
            for at in [[i for i, other in enumerate(moments) if other == name]]}
    chosen = []
    while len(chosen) < n and any(left.values()):
        chosen += [at.pop() for at in left.values() if at][:n - len(chosen)]
    return chosen


def killed_and_continued(undisturbed, *moments):
    """Kill the program at each of the moments in turn, continuing it in between; then let it end. -> a record."""
    program = undisturbed.program
    with folder_for(program) as folder:
        at = []
        for moment in moments:
            done = program.run(folder, *program.again, check=False, before=Moments(last=moment))
            at.append(undisturbed.moments[moment] if done.returncode == -signal.SIGKILL else "ended before")
        return {"moments": list(moments), "killed": at, **ended_like(undisturbed, folder)}


def killed_by_the_clock(undisturbed, seconds):
    """Kill the program from outside, `seconds` after its start; then continue it."""
    program = undisturbed.program
    with folder_for(program) as folder:
        def clock():
            short_cuts()
            threading.Thread(target=lambda: (time.sleep(seconds), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
        done = program.run(folder, *program.again, check=False, before=clock)
        at = f"after {seconds:.2f} s" if done.returncode == -signal.SIGKILL else "ended before"
        return {"killed": [at], **ended_like(undisturbed, folder)}


def seconds_of_a_run(program):
    """As the machine is now, others using it too: the quicker of two."""
    def once():
        with folder_for(program) as folder:
            start = time.monotonic()
            program.run(folder, *program.again, before=short_cuts)
            return time.monotonic() - start
    return min(once(), once())


def ended_like(undisturbed, folder):
    """Continue the program in a folder to its end, and compare."""
    done = undisturbed.program.run(folder, *undisturbed.program.again, check=False, before=short_cuts)
    came_from = re.search(r"^resumed after step (\d+)|^continuing after ([\d,]+) tokens", done.stdout, re.M)
    same = done.returncode == 0 and undisturbed.program.result(folder) == undisturbed.result
    left = [str(p.relative_to(folder)) for p in folder.rglob(".*")  # half-made token folders go after a day
            if p.name != ".lock" and ".unfinished-" not in p.parent.name]
    return {"resumed": came_from and came_from[0], "same": same, "left behind": left,
            "error": "" if same else done.stderr[-2000:]}


def disk_full(undisturbed, most_bytes):
    """No file may grow beyond most_bytes (EFBIG, which the program meets where it would meet ENOSPC); then there is room again.
    -> a record: how it ended, and whether what was there goes on to the same end."""
    program = undisturbed.program

    def limit():
        short_cuts()
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    with folder_for(program) as folder:
        done = program.run(folder, *program.again, check=False, before=limit)
        lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        one_line = done.returncode == 2 and len(lines) == 1 and "Traceback" not in done.stderr
        return {"most bytes": most_bytes, "exit": done.returncode, "error line": lines[:1], "one line": one_line,
                **ended_like(undisturbed, folder)}


def long_form(program, kills, clock_kills, seed=0):
    """All of it for one program -> a dict for the JSON file."""
    rng = random.Random(seed)
    with Undisturbed(program) as undisturbed:
        records = []
        for moment in choose(undisturbed.moments, kills, rng):
            second = [rng.randrange(len(undisturbed.moments) // 2)] if rng.random() < 0.3 else []
            records.append(killed_and_continued(undisturbed, moment, *second))
        by_clock = [killed_by_the_clock(undisturbed, rng.uniform(0, seconds_of_a_run(program))) for _ in range(clock_kills)]
        full = [disk_full(undisturbed, size - 1) for size in undisturbed.sizes]
    return {"moments of a run": Counter(undisturbed.moments), "kills": records, "kills by the clock": by_clock,
            "disk full": full}


__all__ = ["Undisturbed", "choose", "copy_of", "disk_full", "killed_and_continued", "killed_by_the_clock", "long_form"]
