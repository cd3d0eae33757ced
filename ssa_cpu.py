"""Compiles, loads and calls ssa_cpu.cpp, the CPU kernel. Where that is impossible, `why_not` says why in one line.

The library goes to the user's cache under a name made of its source and its build command, so that a change of either,
another PyTorch or another kind of CPU gets a library of its own. It is compiled aside and moved into place in one step:
any number of processes may build at once, and none ever sees half a file.
"""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from ssa_blockwise import empty_like_heads

SOURCE = Path(__file__).with_name("ssa_cpu.cpp")
VECTORS = {"AVX2": ["-mavx2", "-mfma"], "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma"]}


# -------------------------------------------------------------------------------------------------- compiling, loading

def build_command():
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), None)
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
    cache = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    library = cache / f"ssa_cpu_{name}.so"
    if library.exists():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True)
        folder = tempfile.mkdtemp(dir=cache)
    except OSError:  # a home that is read-only or absent: this process compiles for itself
        folder = tempfile.mkdtemp()
        library = Path(folder) / library.name
    aside = Path(folder) / "building.so"
    done = subprocess.run([*command, "-o", str(aside)], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command[0]} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    os.replace(aside, library)
    if library.parent != Path(folder):
        os.rmdir(folder)
    return library


@functools.cache
def load():
    """(library, None) or (None, why not)."""
    try:
        library = ctypes.CDLL(str(build()))
    except OSError as error:
        return None, str(error)
    library.ssa_scratch_size.restype = ctypes.c_int64
    library.ssa_scratch_size.argtypes = [ctypes.c_int64] * 3
    for function in (library.ssa_forward, library.ssa_backward):
        function.restype, function.argtypes = ctypes.c_int, [ctypes.POINTER(Problem)]
    return library, None


def why_not():
    """None if the kernel can run, else the reason in one line."""
    return load()[1]


# -------------------------------------------------------------------------------------------------------- calling

class Tensor4(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "head", "row"))]


class Problem(ctypes.Structure):
    """The struct Problem of ssa_cpu.cpp, field by field."""
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("B", "H", "Hkv", "Q", "K", "D", "Dv", "bfloat16", "causal", "threads")),
        ("scale", ctypes.c_double),
        *((name, Tensor4) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("b", "n", "lse", "db", "dn", "mask")),
        *((name, ctypes.c_int64) for name in ("mask_batch", "mask_head", "mask_row", "mask_col")),
        ("scratch", ctypes.c_void_p), ("scratch_size", ctypes.c_int64)]


def forward(q, k, v, b, n, mask, causal, scale):
    """As ssa_blockwise.forward, for float32 and bfloat16; None if the scores are too extreme for the kernel."""
    out = empty_like_heads(v, q.size(1), q.size(2), v.size(3))
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    done = _call("ssa_forward", q, k, v, b, n, mask, causal, scale, {"out": out}, {"lse": lse})
    return (out, lse) if done else None


def backward(dout, q, k, v, out, lse, b, n, mask, causal, scale):
    """As ssa_blockwise.backward, for float32 and bfloat16; None if the scores are too extreme for the kernel."""
    dq, dk, dv = (empty_like_heads(x, *x.shape[1:]) for x in (q, k, v))
    db, dn = (torch.empty(q.shape[:2], dtype=torch.float64) for _ in range(2))  # one sum a (batch, head)
    done = _call("ssa_backward", q, k, v, b, n, mask, causal, scale,
                 {"out": out, "dout": dout, "dq": dq, "dk": dk, "dv": dv}, {"lse": lse, "db": db, "dn": dn})
    return (dq, dk, dv, db.sum(0).float(), dn.sum(0).float()) if done else None


def _call(function, q, k, v, b, n, mask, causal, scale, tensors, arrays):
    library, reason = load()
    if reason:
        raise RuntimeError(f"the CPU kernel cannot run: {reason}")
    (B, H, Q, D), (_, Hkv, K, Dv), threads = q.shape, v.shape, torch.get_num_threads()
    size = library.ssa_scratch_size(K, D, Dv)
    keep = []  # whatever the struct points to must outlive the call

    def rows(x):
        keep.append(x if x.stride(3) == 1 else x.contiguous())
        return Tensor4(keep[-1].data_ptr(), *keep[-1].stride()[:3])

    def array(x):
        keep.append(x.contiguous())
        return keep[-1].data_ptr()

    problem = Problem(B, H, Hkv, Q, K, D, Dv, q.dtype == torch.bfloat16, causal, threads, scale)
    for name, tensor in {"q": q, "k": k, "v": v, **tensors}.items():
        setattr(problem, name, rows(tensor))
    for name, tensor in {"b": b, "n": n, **arrays}.items():
        setattr(problem, name, array(tensor))
    if mask is not None:
        keep.append(mask)
        problem.mask = mask.data_ptr()
        wide = mask.expand(B, H, Q, K)  # a broadcast dimension gets stride 0
        problem.mask_batch, problem.mask_head, problem.mask_row, problem.mask_col = wide.stride()
    problem.scratch, problem.scratch_size = array(torch.empty(threads * size)), size
    return getattr(library, function)(ctypes.byref(problem))
