"""Run every notebook of notebooks/ and theory/ from a clean kernel, the code in folded solutions included.

    python notebooks/run_all.py                      all, two at a time, one thread each
    python notebooks/run_all.py 01 --write           those whose names begin so; keep the new outputs

One line a notebook with its seconds; exit code 1 if one fails. --write keeps outputs and drops what differs from run to
run, so that a difference in git is a difference in results. Widgets are dropped too: they need a running kernel.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flags import UserError, fail, tyro_cli  # noqa: E402

AT_ONCE, CELL_SECONDS = 2, 200


@dataclass
class Flags:
    """Run every notebook from a clean kernel, the code in folded solutions included."""

    beginnings: Positional[tuple[str, ...]] = ()
    """beginnings of names, such as 01 (all notebooks if empty)"""
    write: bool = False
    """keep the new outputs"""


def notebooks(beginnings=()):
    """Paths of all notebooks, or of those whose names begin so. Raises UserError where there is none."""
    found = [path for folder in ("notebooks", "theory") for path in sorted((ROOT / folder).glob("*.ipynb"))]
    chosen = [path for path in found if not beginnings or path.name.startswith(tuple(beginnings))]
    if not chosen:
        raise UserError(f"{' '.join(beginnings)}: no notebook begins so; choose among those in notebooks/ and theory/")
    return chosen


if __name__ == "__main__":  # a wrong flag is answered before the seconds that the imports take
    try:
        FLAGS = tyro_cli(Flags, sys.argv[1:], Flags())
        PATHS = notebooks(FLAGS.beginnings)
    except UserError as error:
        fail(error)

import asyncio  # noqa: E402
import copy  # noqa: E402
import os  # noqa: E402
import re  # noqa: E402
import time  # noqa: E402

try:
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
except ImportError as error:
    fail(f'{error.name}: is not installed; pip install -c requirements.txt -e ".[train,notebooks]"')

from files import write_atomically  # noqa: E402


def solutions(notebook):
    """The python code of each folded solution: a solution that fails is as bad as a cell that does."""
    folded = [part for cell in notebook.cells if cell.cell_type == "markdown"
              for part in re.findall(r"<details>.*?</details>", cell.source, re.S)]
    return [code for part in folded for code in re.findall(r"```python\n(.*?)```", part, re.S)]


def cleaned(notebook):
    """The notebook without times, versions of the kernel and widgets."""
    notebook.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
                         "language_info": {"name": "python"}}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if not any("widget" in kind for kind in output.get("data", {}))]
    return notebook


async def executed(path, notebook):
    """The notebook as it is after a run, its folded solutions as cells at its end."""
    whole = copy.deepcopy(notebook)
    whole.cells += [nbformat.v4.new_code_cell(code) for code in solutions(notebook)]
    await NotebookClient(whole, timeout=CELL_SECONDS, resources={"metadata": {"path": str(path.parent)}},
                         coalesce_streams=True, extra_arguments=["--log-level=ERROR"]).async_execute()
    return whole


async def execute(path, write, turn):
    """Run one notebook when it is its turn -> whether it ran without an error."""
    async with turn:
        start, notebook = time.perf_counter(), nbformat.read(path, as_version=4)
        size = len(notebook.cells)
        try:
            try:
                whole = await executed(path, notebook)
            except CellTimeoutError:  # nbclient sometimes waits for ever where a cell makes a widget (its issue 312)
                print(f"once more, a cell took over {CELL_SECONDS} s: {path.relative_to(ROOT)}", flush=True)
                whole = await executed(path, notebook)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"FAILED {path.relative_to(ROOT)}\n{error}", flush=True)
            return False
        if write:
            whole.cells = whole.cells[:size]
            write_atomically(path, (nbformat.writes(cleaned(whole)) + "\n").encode("utf-8"))
        print(f"{time.perf_counter() - start:5.1f} s  {path.relative_to(ROOT)}", flush=True)
        return True


async def main(paths, write):
    turn = asyncio.Semaphore(AT_ONCE)
    return await asyncio.gather(*(execute(path, write, turn) for path in paths))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # kernels inherit it: two at a time are faster than one with two threads
    sys.exit(0 if all(asyncio.run(main(PATHS, FLAGS.write))) else 1)
