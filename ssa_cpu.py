"""Compiles, loads and calls ssa_cpu.cpp, the CPU kernel. Where that is impossible, `why_not` says why in one line.

The library goes to the user's cache under a name made of its source and its build command, so that a change of either,
another PyTorch or another kind of CPU gets a library of its own. It is compiled aside and moved into place in one step:
any number of processes may build at once, and none ever sees half a file.
"""

import atexit
import ctypes
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from ssa_blockwise import empty_like_heads

SOURCE = Path(__file__).with_name("ssa_cpu.cpp")
if not SOURCE.exists():  # installed by pip, not run from the repository
    roots = SOURCE.parent, Path(sys.prefix)  # pip install --target DIR puts it below DIR
    SOURCE = next((root / "share" / "ssa" / SOURCE.name for root in roots if (root / "share" / "ssa").is_dir()), SOURCE)
VECTORS = {"AVX2": ["-mavx2", "-mfma"], "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]}


# -------------------------------------------------------------------------------------------------- compiling, loading

def build_command():
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "g++", "clang++"))), None)
    if compiler is None:
        raise OSError("no C++ compiler (g++ or clang++) on the PATH")
    # -O3 for vectorised loops. The two -fno flags let them stay so: nobody reads errno or the floating-point flags.
    return [compiler, "-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
            *VECTORS.get(torch.backends.cpu.get_cpu_capability(), []), str(SOURCE),
            "-L" + str(Path(torch.__file__).parent / "lib"), "-ltorch_cpu"]


def build():
    """The path of the compiled library."""
    command = build_command()
    name = hashlib.sha256(SOURCE.read_bytes() + " ".join([torch.__version__, *command]).encode()).hexdigest()[:16]
    library = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    library /= f"ssa_cpu_{name}.so"
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(dir=library.parent)
    except OSError:  # a home that cannot be written: this process compiles for itself
        folder = tempfile.mkdtemp()
        library = Path(folder) / library.name
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    aside = Path(folder) / "building.so"
    done = subprocess.run([*command, "-o", str(aside)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command[0]} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    os.replace(aside, library)
    return library


@functools.cache
def load():
    """(library, None) or (None, why not)."""
    try:
        library = ctypes.CDLL(str(build()))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        return None, str(error)
    library.ssa_scratch_size.restype = ctypes.c_int64
    library.ssa_scratch_size.argtypes = [ctypes.c_int64] * 4
    for function in (library.ssa_forward, library.ssa_backward):
        function.restype, function.argtypes = ctypes.c_int, [ctypes.c_char_p]
    return library, None


def why_not():
    """None if the kernel can run, else the reason in one line."""
    return load()[1]


@functools.cache
def bfloat16_pays():
    """True where the CPU multiplies bfloat16 faster than float32; elsewhere bf16 operands are widened tile by tile."""
    return bool(load()[0].ssa_bfloat16_pays())


# -------------------------------------------------------------------------------------------------------- calling

def forward(q, k, v, b, n, mask, causal, scale):
    """As ssa_blockwise.forward, for float32 and bfloat16; None if the scores are too extreme for the kernel."""
    out = empty_like_heads(v, q.size(1), q.size(2), v.size(3))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    done = _call("ssa_forward", q, k, v, b, n, mask, causal, scale, [out], lse)
    return (out, lse) if done else None


def backward(dout, q, k, v, out, lse, b, n, mask, causal, scale):
    """As ssa_blockwise.backward, for float32 and bfloat16; None if the scores are too extreme for the kernel."""
    dq, dk, dv = (empty_like_heads(x, *x.shape[1:]) for x in (q, k, v))
    sums = torch.empty(2, *q.shape[:2], dtype=torch.float64)  # b's and n's, one a (batch, head)
    done = _call("ssa_backward", q, k, v, b, n, mask, causal, scale, [out, dout, dq, dk, dv], lse, sums)
    return (dq, dk, dv, *(x.sum(0).float() for x in sums)) if done else None


def _call(function, q, k, v, b, n, mask, causal, scale, tensors, lse, sums=None):
    """Fill in the struct Problem of ssa_cpu.cpp, field by field in its order (each takes 8 bytes), and run."""
    library, reason = load()
    if reason:
        raise RuntimeError(f"the CPU kernel cannot run: {reason}")
    (B, H, Q, D), (_, Hkv, K, Dv) = q.shape, v.shape
    threads = max(1, min(torch.get_num_threads(), B * H))
    size = library.ssa_scratch_size(K, D, Dv, function == "ssa_backward")
    arrays = [b.contiguous(), n.contiguous(), lse, sums, mask, torch.empty(threads * size)]
    tensors = [x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v, *tensors)]
    narrow = q.dtype == torch.bfloat16
    fields = [B, H, Hkv, Q, K, D, Dv, narrow, narrow and bfloat16_pays(), causal, threads, size]
    for x in arrays:
        fields.append(0 if x is None else x.data_ptr())
    fields += (0, 0, 0, 0) if mask is None else mask.expand(B, H, Q, K).stride()  # 0 where a dimension is broadcast
    for x in tensors:
        fields += x.data_ptr(), *x.stride()[:3]
    fields += [0] * (4 * (8 - len(tensors)))  # forward has no gradients
    return getattr(library, function)(struct.pack(f"{len(fields)}qd", *fields, scale))
