"""Run every notebook of notebooks/ and theory/ from a clean kernel, the code in folded solutions included.

    python notebooks/run_all.py                      all, two at a time, one thread each
    python notebooks/run_all.py 01 --write           those whose names begin so; keep the new outputs

One line a notebook with its seconds; exit code 1 if one fails. --write keeps outputs and drops what differs from run to
run, so that a difference in git is a difference in results. Widgets are dropped too: they need a running kernel.
"""

import argparse
import asyncio
import copy
import os
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from files import write_atomically  # noqa: E402

AT_ONCE, CELL_SECONDS = 2, 600


def notebooks(beginnings=()):
    """Paths of all notebooks, or of those whose names begin so."""
    found = [path for folder in ("notebooks", "theory") for path in sorted((ROOT / folder).glob("*.ipynb"))]
    return [path for path in found if not beginnings or path.name.startswith(tuple(beginnings))]


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


async def execute(path, write, turn):
    """Run one notebook when it is its turn -> whether it ran without an error."""
    async with turn:
        start, notebook = time.perf_counter(), nbformat.read(path, as_version=4)
        size = len(notebook.cells)
        whole = copy.deepcopy(notebook)
        whole.cells += [nbformat.v4.new_code_cell(code) for code in solutions(notebook)]
        client = NotebookClient(whole, timeout=CELL_SECONDS, resources={"metadata": {"path": str(path.parent)}},
                                coalesce_streams=True, extra_arguments=["--log-level=ERROR"])
        try:
            await client.async_execute()
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("beginnings", nargs="*", metavar="NAME", help="the beginning of a notebook's name, such as 01")
    parser.add_argument("--write", action="store_true", help="keep the new outputs")
    args = parser.parse_args()
    paths = notebooks(args.beginnings)
    if not paths:
        parser.error(f"{' '.join(args.beginnings)}: no notebook begins so")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # kernels inherit it: two at a time are faster than one with two threads
    sys.exit(0 if all(asyncio.run(main(paths, args.write))) else 1)
