"""What every trainer needs once: the decisions about this machine, the run folder, the optimiser, signals.

Decisions (device, dtype, threads, micro-batch, compile, path) are taken once, printed a line each, written to config.json,
and reused when the run is resumed, so that a resumed run computes what the undisturbed one would have.
"""

import ctypes
import math
import os
import platform
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import filelock
import torch

import ssa_cpu
import ssa_flash
from files import sha256, write_json
from flags import UserError, fail, flag

# Dense bf16 (and TF32 as PyTorch uses it for float32: not set here, so float32 has no entry) matrix peaks in FLOP/s, from
# the makers' data sheets. MFU is reported on these devices only.
PEAK_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "A10G": 70e12, "4090": 165e12}

RUN_FILES = ("config.json", "model.safetensors", "metrics.jsonl", "summary.json", "loss.png", "sample.txt", "shift.json",
             "tokenizer.json")


# -------------------------------------------------------------------------------------------------------------- decisions

def decide(flags, model, saved=None, processes=1):
    """The decisions of this run, as a dict of name -> value, each printed with its reason; `saved`: reuse these instead.
    `processes` share every batch.

    Raises UserError where a flag asks for what this machine cannot do.
    """
    if saved is not None:
        decisions = dict(saved)
        _require_known(decisions, f"{flags.out}/config.json")
        _require_device(decisions["device"], "the run was started on it; resume it there")
        share = share_of_batch(flags, processes)
        decisions["micro_batch"] = math.gcd(decisions["micro_batch"], share)  # the run may have had another number of processes
        print(f"decided when the run began: {', '.join(f'{k} {v}' for k, v in decisions.items())}")
        torch.set_num_threads(decisions["threads"])
        return decisions
    decisions, reasons = {}, {}
    decisions["device"], reasons["device"] = pick_device(flags.device)
    if flags.threads:
        torch.set_num_threads(flags.threads)
    decisions["threads"], reasons["threads"] = torch.get_num_threads(), "--threads" if flags.threads else "PyTorch's choice"
    decisions["micro_batch"], reasons["micro_batch"] = _pick_micro_batch(flags, model.config, decisions["device"], processes)
    decisions["dtype"], reasons["dtype"] = _pick_dtype(flags.dtype, decisions, model.config)
    decisions["path"], reasons["path"] = _pick_path(flags, decisions, model)
    decisions["compile"], reasons["compile"] = _pick_compile(flags, decisions)
    for name, value in decisions.items():
        print(f"{name}: {value} ({reasons[name]})")
    return decisions


def _require_known(decisions, path):
    """Raise UserError for decisions that this program does not take."""
    choices = {"device": ("cpu", "cuda", "mps"), "dtype": ("float32", "bfloat16"), "path": ssa_flash.PATHS,
               "compile": ("off", "on"), "threads": range(1, 1025), "micro_batch": range(1, 10**6 + 1)}
    for name, known in choices.items():
        if decisions.get(name) not in known:
            raise UserError(f"{path}: {name} {decisions.get(name)!r}: cannot be right; restore it, or start anew with "
                            "--overwrite")


def _require_device(device, remedy):
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available[device]:
        raise UserError(f"--device={device}: this machine or this PyTorch has none; {remedy}")


def pick_device(wanted):
    if wanted != "auto":
        _require_device(wanted, "use --device=auto")
        return wanted, "--device"
    if torch.cuda.is_available():
        return "cuda", torch.cuda.get_device_name()
    if torch.backends.mps.is_available():
        return "mps", "no CUDA GPU, but Apple's Metal"
    return "cpu", "no GPU found"


def share_of_batch(flags, processes):
    """Sequences of a step that each process computes."""
    unit = processes * max(1, flags.micro_batch)
    if flags.batch_size % unit:
        raise UserError(f"--batch-size={flags.batch_size}: must be a multiple of {unit}, so that {processes} processes "
                        f"have equal shares{' of whole micro-batches' if flags.micro_batch else ''}; change it, or their number")
    return flags.batch_size // processes


def _pick_micro_batch(flags, model, device, processes):
    share = share_of_batch(flags, processes)
    if flags.micro_batch:
        return flags.micro_batch, "--micro-batch"
    # About 16k tokens fill a GPU and 8k the caches and cores of a CPU; more only costs memory.
    most = max(1, (16384 if device == "cuda" else 8192) // (flags.typical_length or model.context))
    size = max(d for d in range(1, min(share, most) + 1) if share % d == 0)
    return size, f"{share // size} a step" if processes == 1 else f"{share // size} a step on each of {processes} processes"


def _pick_dtype(wanted, decisions, model):
    if wanted != "auto":
        return wanted, "--dtype"
    if decisions["device"] == "mps":
        return "float32", "the safe choice on Metal"
    # On a CPU that has no bfloat16 units its products are slower by a hundred times: then few rows must do.
    rows = min(decisions["micro_batch"] * model.context, 4096 if decisions["device"] == "cuda" else 512)

    def operands(dtype):  # of the feed-forward product of this model
        return (torch.randn(shape, device=decisions["device"], dtype=dtype)
                for shape in ((rows, model.n_embd), (model.n_embd, model.n_ff or model.n_embd)))

    pairs = {dtype: tuple(operands(dtype)) for dtype in (torch.float32, torch.bfloat16)}
    times = {dtype: [] for dtype in pairs}
    for _ in range(20):  # in turn, and the fastest of each counts: whatever else the machine does falls on both
        for dtype, (a, b) in pairs.items():
            start = time.perf_counter()
            (a @ b).sum().item()  # item() waits for a GPU
            times[dtype].append(time.perf_counter() - start)
    ratio = min(times[torch.float32]) / min(times[torch.bfloat16])
    # Autocast pays for its casts, so bf16 must win clearly in the product alone to win in the model.
    return ("bfloat16" if ratio > 1.5 else "float32"), f"a bfloat16 product runs at {ratio:.2f} times the speed of float32"


def _pick_path(flags, decisions, model):
    config, scorer = model.config, model.scorers()[0]
    shape = (decisions["micro_batch"], config.n_head, config.context, config.head_dim)
    if flags.path != "auto":
        reason = ssa_flash.why_not(flags.path, scorer, decisions["device"], config.dropout)
        if reason:
            raise UserError(f"--path={flags.path}: {reason}; use --path=auto")
        return flags.path, "--path"
    return ssa_flash.pick_path(torch.device(decisions["device"]), getattr(torch, decisions["dtype"]), scorer, shape,
                               config.dropout)


def _pick_compile(flags, decisions):
    compiler = decisions["device"] != "cpu" or os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if flags.compile == "on" and not compiler:
        raise UserError("--compile=on: no C++ compiler was found; install g++ or clang++, or use --compile=off")
    if flags.compile != "auto":
        return flags.compile, "--compile"
    if decisions["device"] == "cuda":
        return "on", "fuses what surrounds the matrix products"
    if decisions["device"] == "mps":
        return "off", "not dependable on Metal"
    if decisions["path"] != "plain":
        return "off", "a fused path gains little from it on a CPU"
    if ssa_cpu.why_not():  # it has tried to compile something
        return "off", ssa_cpu.why_not()
    if flags.steps < 300:
        return "off", "too few steps to earn back the compilation"
    return "on", "fuses the passes of the plain path over the scores"


def keep_freed_memory():
    """On Linux: what is freed stays with this process, for the next step asks for as much again. Otherwise glibc gives blocks
    back to the kernel and gets them anew, page by page: 4,000 page faults a step of BabyBERTa, a fifth of its time."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, another operating system
        return
    mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, the highest that glibc takes: smaller blocks come from the heap
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: whose free end is not given back


def machine(device):
    """Processor, Python and PyTorch in one line, for the summary."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} x {processor()}"
    return f"{name}, Python {platform.python_version()}, torch {torch.__version__}"


def processor():
    """The CPU's name."""
    try:  # Linux; platform.processor() is empty there
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return next(line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def compiled(model, decisions):
    """The function to train with: the model itself, or its compiled wrapper. Save the model, never the wrapper."""
    return torch.compile(model, dynamic=False) if decisions["compile"] == "on" else model


def autocast(decisions):
    """The context in which the forward pass runs."""
    return torch.autocast(decisions["device"], dtype=torch.bfloat16, enabled=decisions["dtype"] == "bfloat16")


def peak_flops(decisions):
    """This device's peak in FLOP/s in the run's dtype, or None where it is not known."""
    if decisions["device"] != "cuda" or decisions["dtype"] != "bfloat16":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAK_BF16.items() if part in name), None)


# -------------------------------------------------------------------------------------------------------------- run folder

def open_run(flags, saved):
    """Make the run folder, or say why not: an existing run is kept unless --overwrite. Nothing is deleted but a run's files.
    While this process lives no other one may train in it."""
    folder = Path(flags.out)
    _lock(folder)
    try:
        if folder.exists() and not folder.is_dir():
            raise UserError(f"--out={flags.out}: is a file; name a folder")
        content = {p.name for p in folder.iterdir()} if folder.exists() else set()
        ours = {name for name in content
                if name in RUN_FILES or re.fullmatch(r"resume-\d+\.pt(\.sha256)?|\..+\.\d+\.tmp", name)}
        half_written = {name for name in ours if name.endswith(".tmp")}  # by a process that was killed
        # Others write a config.json too; every run of ours begins with its metrics.
        if content and not saved and "metrics.jsonl" not in ours:
            raise UserError(f"--out={flags.out}: is not empty and not a run folder; choose another folder")
        # Nothing but empty metrics: a process was killed before config.json was there, and nothing is lost.
        begun = content and (content - half_written != {"metrics.jsonl"} or (folder / "metrics.jsonl").stat().st_size)
        if begun and not saved and not flags.overwrite:
            remedy = "continue it with --resume" if "config.json" in ours else "its config.json is gone; restore it"
            raise UserError(f"--out={flags.out}: holds a run already; {remedy}, replace it with --overwrite, or choose another "
                            "folder")
        # The metrics go last: a folder without them is no longer one of ours.
        for name in sorted(half_written if saved else ours, key=lambda name: (name == "metrics.jsonl", name)):
            (folder / name).unlink()
        folder.mkdir(parents=True, exist_ok=True)
        if not saved:
            (folder / "metrics.jsonl").touch()
        return folder
    except OSError as error:
        raise UserError(f"--out={flags.out}: cannot be written ({error.strerror}); choose another folder") from None


def _lock(folder):
    name = f"ssa-run-{sha256(str(folder.resolve()).encode('utf-8'))[:16]}.lock"
    lock = filelock.FileLock(Path(tempfile.gettempdir()) / name, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout:
        raise UserError(f"--out={folder}: another process is training in it; wait for it, or choose another folder") from None
    except OSError as error:
        raise UserError(f"--out={folder}: its lock {lock.lock_file} cannot be opened ({error.strerror}), perhaps another user's; "
                        "remove that file, or name another folder for such files with TMPDIR") from None
    _locks.append(lock)  # held until this process ends, however it ends


_locks = []


def write_config(folder, flags, model, decisions, **more):
    """config.json: everything that made this run, enough to load its model and to repeat it. Returns it."""
    config = dict(flags=asdict(flags), model=model.config.to_dict(), decisions=decisions, torch=torch.__version__, **more)
    write_json(folder / "config.json", config)
    return config


def resume_command(flags):
    """The command that continues this run, with the Python that runs it."""
    return shlex.join([sys.executable, sys.argv[0], f"{flag('out')}={flags.out}", "--resume"])


# --------------------------------------------------------------------------------------------------------------- optimiser

def make_optimizer(model, flags):
    """AdamW that decays the matrices of linear layers alone: not norms, embeddings, biases, nor a scorer's b, n, tau."""
    decay, rest = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            matrix = name.endswith(("qkv.weight", "proj.weight", "up.weight", "read_in.weight", "read_out.weight"))
            (decay if matrix else rest).append(parameter)
    groups = [dict(params=decay, weight_decay=flags.weight_decay), dict(params=rest, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=flags.lr, betas=(0.9, flags.beta2), fused=True)


def learning_rate(step, flags):
    """Of the step-th update, counted from 0: a line up to lr over `warmup` updates, then a cosine down to min_lr."""
    if step < flags.warmup:
        return flags.lr * (step + 1) / flags.warmup
    progress = (step - flags.warmup) / max(1, flags.steps - flags.warmup)
    return flags.min_lr + (flags.lr - flags.min_lr) * (1 + math.cos(math.pi * progress)) / 2


# ---------------------------------------------------------------------------------------------------- the scorer in effect

def require_scorer_in_effect(model):
    """After the first backward pass: stop unless every trained scorer parameter has a gradient that is not 0.

    A model that computes softmax under the name of SSA trains as well as any, and nobody notices; its b and n have no
    gradient. (The published code of the paper does just that on recent PyTorch.)
    """
    for layer, scorer in enumerate(model.scorers()):
        for name, parameter in scorer.named_parameters():
            if parameter.requires_grad and (parameter.grad is None or not parameter.grad.any()):
                gradient = None if parameter.grad is None else parameter.grad.tolist()
                raise SystemExit(f"error: layer {layer}, {type(scorer).__name__}.{name}: its gradient is {gradient}, so the "
                                 "scorer is not in effect; this is a defect of the program, please report it")


def require_finite_weights(model, step):
    """Stop rather than write a checkpoint that holds inf or NaN."""
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise SystemExit(f"error: step {step}: {name} is no longer finite; stopped, the last checkpoint is kept; try a "
                             "smaller --lr")


def scorer_values(model):
    """The scorers' scalars by name, layer and head, such as {"b": [[...], ...], "n": [[...], ...]}; {} where there are none."""
    values = {}
    for scorer in model.scorers():
        for raw, _ in scorer.named_parameters():
            name = raw.removeprefix("raw_")
            values.setdefault(name, []).append([round(x, 8) for x in getattr(scorer, name).tolist()])
    return values


def largest_change(before, after):
    """{"b": the largest |change| over layers and heads, ...} between two results of `scorer_values`."""
    return {name: max(abs(x - y) for xs, ys in zip(before[name], after[name]) for x, y in zip(xs, ys)) for name in after}


# ----------------------------------------------------------------------------------------------- random state and signals

def random_state(device):
    """What dropout draws from; batches and samples have generators of their own."""
    return {"cpu": torch.get_rng_state(), **({"cuda": torch.cuda.get_rng_state()} if device == "cuda" else {})}


def set_random_state(state, device):
    torch.set_rng_state(state["cpu"])
    if device == "cuda":
        torch.cuda.set_rng_state(state["cuda"])


class Interrupted:
    """True once SIGINT or SIGTERM has come: the loop saves and leaves. A second one ends the program at once."""

    def __init__(self):
        self.signal = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._remember)

    def _remember(self, number, frame):
        self.signal = signal.Signals(number).name
        signal.signal(number, signal.SIG_DFL)

    def __bool__(self):
        return self.signal is not None

    def end_at_once(self, line):
        """From now on, where there is no next step, a signal ends the program with this line."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: fail(line, code=130))
