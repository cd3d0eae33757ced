"""No fault loses work or lies: the short form. The long form is `python tests/faults.py`, its results are in
results/reliability.md. (Processes that lose each other: test_distributed.py; scores and masks: test_numerics.py.)"""

import os
import random
import signal

import pytest

import run
from conftest import TINY, command, refused, snapshot
from faults_damage import HOW, damage, damaged_and_continued, damaged_and_loaded, files_of
from faults_hostile import HOSTILE, check
from faults_kill import Moments, Undisturbed, choose, disk_full, killed_and_continued
from faults_programs import PROGRAMS, copy_of, short_cuts
from files import write_atomically

TRAINERS = [name for name, program in PROGRAMS.items() if program.damageable]


@pytest.fixture(scope="module")
def undisturbed():
    """undisturbed(name): a finished run of the program, made once."""
    runs = {}

    def of(name):
        if name not in runs:
            runs[name] = Undisturbed(PROGRAMS[name])
        return runs[name]

    yield of
    for each in runs.values():
        each.__exit__()


# ------------------------------------------------------------------------------------------------------- killed, disk full

@pytest.mark.parametrize("name", PROGRAMS)
def test_killed_at_any_moment_a_program_goes_on_to_the_same_end(name, undisturbed):
    run, rng = undisturbed(name), random.Random(3)
    moments = sorted(choose(run.moments, 8, rng))
    for some in (moments[0::2], moments[1::2]):
        record = killed_and_continued(run, *some[:2], *(moment // 3 for moment in some[2:]))  # what is left grows shorter
        assert record["same"] and not record["left behind"] and "ended before" not in record["killed"][:2], record


def test_killed_between_the_last_checkpoint_and_its_weights_a_run_writes_them_when_it_goes_on(undisturbed):
    run = undisturbed("train_gpt")
    last = max(i for i, name in enumerate(run.moments[:-10]) if name == "before step")
    replaced = [i for i in range(last, len(run.moments)) if run.moments[i] == "before replace"]
    for moment in replaced[:3]:  # the checkpoint, its checksum, the weights
        assert killed_and_continued(run, moment)["same"], moment


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_full_disk_is_one_line_and_what_was_there_goes_on(name, undisturbed):
    run = undisturbed(name)
    for size in (run.sizes[0], run.sizes[-1]):
        record = disk_full(run, size - 1)
        assert record["one line"] and record["same"], record


def test_killed_while_it_replaces_a_run_a_program_can_be_told_again(undisturbed):
    run = undisturbed("train_gpt")
    again = [*run.program.flags, "--overwrite"]
    for moment in (2, 7, 14):  # its first moments are removals
        with copy_of(run.folder) as folder:
            done = command("train_gpt.py", *again, cwd=folder, check=False, before=Moments(last=moment))
            assert done.returncode == -signal.SIGKILL
            done = command("train_gpt.py", *run.program.flags, "--resume", cwd=folder, check=False, before=short_cuts)
            assert done.returncode in (0, 2) and "Traceback" not in done.stderr, done.stderr
            if done.returncode == 2:
                assert "replace it with --overwrite" in done.stderr or "start anew with --overwrite" in done.stderr
                command("train_gpt.py", *again, cwd=folder, before=short_cuts)
            assert run.program.result(folder) == run.result, moment


# ------------------------------------------------------------------------------------------------------------------ damaged

@pytest.mark.parametrize("name", TRAINERS)
def test_damage_to_any_file_that_is_read_is_named_and_never_trained_on(name, undisturbed):
    run, rng, seen = undisturbed(name), random.Random(4), set()
    for number, file in enumerate(files_of(run)):
        record = damaged_and_continued(run, file, HOW[number % 3], rng)
        assert record["verdict"] in ("refused", "replaced", "lost"), record
        seen.add(record["verdict"])
    assert {"refused", "replaced"} <= seen
    for how in HOW:
        assert damaged_and_loaded(run, how, rng)["verdict"] == "refused"


def test_when_every_checkpoint_is_damaged_nothing_is_lost_and_the_user_decides(undisturbed):
    with copy_of(undisturbed("train_gpt").folder) as folder:
        for path in (folder / "r").glob("resume-*.pt"):
            damage(path, "a flipped bit", random.Random(5))
        before = snapshot(folder / "r")
        done = command("train_gpt.py", "--out=r", "--resume", cwd=folder, check=False)
        refused(done, "no whole checkpoint is left")
        assert snapshot(folder / "r") == before


# ------------------------------------------------------------------------------------------------------------------ hostile

@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.__name__.replace("_", " "))
def test_a_hostile_file_is_refused_or_handled_and_touches_nothing_else(case, undisturbed):
    record = check(case, undisturbed("train_gpt").folder)
    assert record["verdict"] in ("refused", "handled"), record


def test_a_file_is_never_written_through_a_link(tmp_path):
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / f".new.{os.getpid()}.tmp").symlink_to(tmp_path / "precious")
    write_atomically(tmp_path / "new", b"content")
    assert (tmp_path / "precious").read_bytes() == b"precious" and (tmp_path / "new").read_bytes() == b"content"
    assert not (tmp_path / "new").is_symlink()


def test_another_users_lock_is_named(folder, monkeypatch):
    def refuse(*args, **more):
        raise PermissionError(13, "Permission denied")
    monkeypatch.setattr(run.filelock.FileLock, "acquire", refuse)
    refused(command("train_gpt.py", *TINY, "--out=r", cwd=folder, check=False), "cannot be opened (Permission denied)")


def test_what_killed_processes_left_of_tokenising_goes_after_a_day(folder):
    for name, age in (("old", 2 * 86400), ("new", 60)):
        path = folder / "data" / f"text-txt-bytes-0.unfinished-{name}"
        path.mkdir(parents=True)
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    command("train_gpt.py", *TINY, "--steps=1", cwd=folder)
    assert [path.name[-3:] for path in (folder / "data").glob("*.unfinished-*")] == ["new"]
