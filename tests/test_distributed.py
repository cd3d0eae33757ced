"""train_gpt.py on several processes: the same run as on one, resumed by any number, ended together, and by torchrun
itself."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

import conftest
from checkpoint import load_run
from conftest import ROOT, TINY, command
from metrics import read_metrics

SCRIPT = "train_gpt.py"
# Six sequences on each of two processes, in micro-batches of three.
MANY = [*TINY, "--batch-size=12", "--micro-batch=3", "--device=cpu", "--out=r"]
RESTARTED = [*MANY, "--steps=120", "--save-every=20", "--eval-every=60"]


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Run:
    """`count` processes of a trainer with what torchrun tells each of them, as forks of this one (see conftest.command)."""

    def __init__(self, *flags, cwd, count=2, script=SCRIPT, **env):
        self.count, self.outputs, self.children = count, [], []
        env = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **env}
        for number in range(count):
            out, err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
            child = os.fork()
            if child == 0:
                conftest._run_script([str(ROOT / script), *flags], cwd,
                                     {**env, "RANK": str(number), "LOCAL_RANK": str(number)}, out, err)
            self.children.append(child)
            self.outputs.append((out, err))

    def wait(self, check=True):
        """-> exit codes, outputs, errors, one for each process."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in self.children]
        texts = [[(file.seek(0), file.read().decode("utf-8"))[1] for file in pair] for pair in self.outputs]
        if check:
            assert codes == [0] * self.count, texts
        return codes, [out for out, _ in texts], [err for _, err in texts]


def losses(folder, key="loss"):
    return [line[key] for line in read_metrics(folder / "metrics.jsonl") if key in line]


def same_curve(a, b):
    for key in ("loss", "grad_norm", "val_loss", "val_bpb"):
        assert losses(a, key) and losses(a, key) == pytest.approx(losses(b, key), abs=1e-5), key


def test_two_processes_are_one_run(folder):
    command(SCRIPT, *MANY, cwd=folder)
    shutil.move(folder / "r", folder / "one")
    _, out, err = Run(*MANY, cwd=folder).wait()
    same_curve(folder / "one", folder / "r")
    assert "a sample:" in out[0] and out[1] == "" and "2 a step on each of 2 processes" not in out[0]
    one, two = load_run(folder / "one")[0].state_dict(), load_run(folder / "r")[0].state_dict()
    assert list(one) == list(two) and all(one[name].sub(two[name]).abs().max() < 1e-5 for name in one)
    assert {p.name for p in (folder / "one").iterdir()} == {p.name for p in (folder / "r").iterdir()}


def test_a_signal_to_one_stops_all_at_one_step_and_any_number_resumes(folder):
    long = [*MANY, "--steps=50", "--save-every=25", "--eval-every=25"]
    command(SCRIPT, *long, "--out=whole", cwd=folder)
    for count, then, number in ((2, 1, signal.SIGTERM), (1, 2, signal.SIGINT)):
        run = Run(*long, cwd=folder, count=count)
        wait_for_lines(folder / "r", 15)
        os.kill(run.children[-1], number)
        codes, out, _ = run.wait(check=False)
        assert codes == ([143, 143] if count == 2 else [130])  # whoever got no signal itself says SIGTERM
        stopped = int(re.search(r": saved after step (\d+); continue with\n  .*python\S* .*train_gpt.py --out=r --resume", out[0])[1])
        assert stopped < 50 and losses(folder / "r", "step")[-1] == stopped
        _, out, _ = Run("--out=r", "--resume", cwd=folder, count=then).wait()
        assert f"resumed after step {stopped}" in out[0]
        same_curve(folder / "whole", folder / "r")
        shutil.rmtree(folder / "r")


def wait_for_lines(run, count):
    path, deadline = run / "metrics.jsonl", time.monotonic() + 180
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert time.monotonic() < deadline, "no metrics after three minutes"
        time.sleep(0.002)


def test_when_one_dies_the_other_ends_soon_with_one_line(folder):
    run = Run(*MANY, "--steps=100000", cwd=folder)
    wait_for_lines(folder / "r", 5)
    start = time.monotonic()
    os.kill(run.children[1], signal.SIGKILL)
    codes, _, err = run.wait(check=False)
    assert time.monotonic() - start < 60 and codes == [1, -signal.SIGKILL]
    [line] = [line for line in err[0].splitlines() if line.startswith("error: ")]
    assert "has lost another process of this run" in line and "--resume" in line and "Traceback" not in err[0]


def test_every_process_draws_its_own_dropout_and_repeats_it(folder):
    for out in ("r", "again"):
        Run(*MANY, "--dropout=0.3", f"--out={out}", cwd=folder).wait()
    assert losses(folder / "r") == losses(folder / "again")
    command(SCRIPT, *MANY, "--dropout=0.3", "--out=one", cwd=folder)
    assert losses(folder / "one") != pytest.approx(losses(folder / "r"), abs=1e-4)


def test_the_batch_must_divide(folder):
    codes, _, err = Run(*MANY, "--batch-size=9", cwd=folder).wait(check=False)
    assert codes == [2, 2] and "--batch-size=9: must be a multiple of 6, so that 2 processes have equal shares" in err[0]
    assert not (folder / "r").exists()


def test_many_processes_say_once_that_a_flag_is_wrong(folder):
    codes, _, err = Run("--lr=-1", cwd=folder).wait(check=False)
    assert codes == [2, 2] and err[0].startswith("error: --lr=-1.0") and err[1] == ""


def torchrun(*flags, cwd, **env):
    command = [sys.executable, "-m", "torch.distributed.run", *flags, str(ROOT / SCRIPT), *RESTARTED, "--resume"]
    return subprocess.Popen(command, cwd=cwd, text=True, encoding="utf-8", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            env={**os.environ, "OMP_NUM_THREADS": "1", **env})


def test_two_machines_lose_a_worker_and_go_on(folder):
    """Two torchruns on loopback, as on two machines; a killed worker makes both start their workers anew."""
    where = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=test",
             f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1", "--monitor-interval=0.2"]
    # Without this variable the new workers would find the addresses of the old ones (pytorch issue 135712).
    nodes = [torchrun(*where, cwd=folder, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1") for _ in range(2)]
    wait_for_lines(folder / "r", 30)
    [worker] = Path(f"/proc/{nodes[1].pid}/task/{nodes[1].pid}/children").read_text().split()
    os.kill(int(worker), signal.SIGKILL)
    texts = [node.communicate(timeout=240) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], texts
    assert re.search(r"^resumed after step [246]0$", "".join(out for out, _ in texts), re.M), texts
    assert losses(folder / "r", "step")[-1] == 120 and len(losses(folder / "r")) == 120
    command(SCRIPT, *RESTARTED, "--out=whole", cwd=folder)
    assert losses(folder / "whole") == pytest.approx(losses(folder / "r"), abs=1e-4)
