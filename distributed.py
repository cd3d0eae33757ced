"""One run on many processes: torchrun --nproc-per-node=N train_gpt.py ... (torch's DistributedDataParallel, DDP).

Every process holds the whole model and computes its share of the rows of every batch; DDP adds up the gradients
during the last backward pass of a step. What a run computes depends on the total batch alone, not on how many
processes share it. Process 0 alone prints and writes. Without torchrun all of this does nothing: there is one
process, it is number 0.
"""
import contextlib
import os
import signal
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import filelock
import torch
import torch.distributed as dist

from files import one_line, sha256
from flags import UserError, fail

# Until the first step, processes may wait for each other while one of them downloads and tokenises. From then on they are
# in step: one from which nothing is heard for so long is gone, and the others end within a minute.
PREPARING, IN_STEP = timedelta(hours=6), timedelta(seconds=50)


class Processes:
    """The processes of this run. number: which one this is, of `count`; local: its number on this machine."""

    def __init__(self, wanted_device):
        self.number, self.count, self.local = (int(os.environ.get(name, default)) for name, default in
                                               (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
        self.first, self.group = self.number == 0, None
        if self.count == 1:
            return
        cuda = wanted_device in ("auto", "cuda") and torch.cuda.is_available()
        if cuda:
            if self.local >= torch.cuda.device_count():
                raise UserError(f"--nproc-per-node: this machine has {torch.cuda.device_count()} GPUs, none for process "
                                f"{self.local}; start fewer processes, or use --device=cpu")
            torch.cuda.set_device(self.local)
        if not self.first:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")
        dist.init_process_group("nccl" if cuda else "gloo", timeout=PREPARING)

    @property
    def many(self):
        return self.count > 1

    def get_in_step(self):
        """Wait for all processes; from now on none of them waits long for another."""
        if self.many:
            dist.barrier()
            self.group = dist.new_group(timeout=IN_STEP)

    @contextlib.contextmanager
    def one_at_a_time(self, folder):
        """The processes of a machine go through this block one by one: the first one makes what the others find."""
        name = f"ssa-{sha256(str(Path(folder).resolve()).encode('utf-8'))[:16]}.lock"
        with filelock.FileLock(Path(tempfile.gettempdir()) / name) if self.many else contextlib.nullcontext():
            yield

    def from_first(self, value):
        """Process 0's value, on all of them."""
        if self.many:
            values = [value]
            dist.broadcast_object_list(values, src=0)
            value = values[0]
        return value

    def require_same(self, value, complaint):
        """Stop where a process does not find what process 0 has found."""
        if self.from_first(value) != value:
            raise UserError(f"process {self.number}: {complaint}")

    def rows(self, batch_size):
        """This process's share of the rows of a batch."""
        share = batch_size // self.count
        return range(self.number * share, (self.number + 1) * share)

    def wrap(self, model):
        """The function to train with. Save the model itself, whose names have no `module.` before them."""
        if not self.many:
            return model
        return torch.nn.parallel.DistributedDataParallel(model, process_group=self.group, gradient_as_bucket_view=True)

    def sum(self, *numbers):
        """Each of the numbers added up over all processes, in float64."""
        if not self.many:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.all_reduce(total, group=self.group)
        return total.tolist()

    def seed_dropout(self, seed, step):
        """Each process drops with random numbers of its own, fixed by the step, so that resuming repeats them. (Another
        number of processes draws others: with dropout, runs are equal for equal numbers of processes only.)"""
        if self.many:
            torch.manual_seed(int(sha256(f"dropout {seed} {step} {self.number}".encode("utf-8"))[:15], 16))

    def end(self):
        if self.many:
            dist.destroy_process_group()


def is_lost_connection(error):
    """Whether an exception is how torch tells that another process has gone."""
    words = ("gloo", "nccl", "connection", "timed out")
    named = isinstance(error, dist.DistError) or any(word in str(error).lower() for word in words)
    return named and int(os.environ.get("WORLD_SIZE", 1)) > 1


def end_after_loss(error):
    """Say so in one line and end; under torchrun not before it has had time to notice, and to end this process itself.
    (If the survivors on other machines ended by themselves, their torchruns would count that as failures of their own,
    and the machines would restart one after the other instead of together.)"""
    print(f"error: process {os.environ['RANK']} has lost another process of this run ({one_line(error)[:120]}); stopped, "
          "the last checkpoint is kept; start again with --resume", file=sys.stderr, flush=True)
    deadline = time.monotonic() + (30 if "TORCHELASTIC_RUN_ID" in os.environ else 0)
    while time.monotonic() < deadline and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # see run.Interrupted
        time.sleep(0.1)
    sys.exit(1)


@contextlib.contextmanager
def errors_in_one_line():
    """Around a trainer's main(): what a user can cause ends the program with one line, anything else with its traceback."""
    try:
        yield
    except UserError as error:
        fail(error)
    except BrokenPipeError:  # as in `python train_gpt.py | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that Python can flush what it still holds, and is quiet
        fail("stdout was closed, so the run ends here; its last checkpoint is kept; start again with --resume", code=1)
    except RuntimeError as error:
        if not is_lost_connection(error):
            raise
        end_after_loss(error)
