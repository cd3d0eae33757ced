"""Notebooks are what they should be when opened: run from a clean kernel, free of one machine's traces, with links that lead
somewhere. That they run at all is a step of its own: notebooks/run_all.py."""

import ast
import json
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest
from conftest import ROOT

PATHS = [path for folder in ("notebooks", "theory") for path in sorted((ROOT / folder).glob("*.ipynb"))]
LONGEST_CELL, LARGEST_NOTEBOOK = 16, 1_500_000  # lines of code, bytes
every_notebook = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.name)


@cache
def cells(path, kind):
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def source(cell):
    return "".join(cell["source"])


def printed(path):
    """All text in the outputs of a notebook."""
    texts = []
    for output in (output for cell in cells(path, "code") for output in cell["outputs"]):
        data = {kind: text for kind, text in output.get("data", {}).items() if not kind.startswith("image/")}
        texts += ["".join(text) if isinstance(text, list) else str(text) for text in (output.get("text", ""), *data.values())]
    return "\n".join(texts)


@every_notebook
def test_outputs_are_those_of_a_clean_kernel_without_errors(path):
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs and not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]
    assert any("image/png" in output.get("data", {}) for output in outputs) or path.parent.name == "theory"


@every_notebook
def test_nothing_of_one_machine_and_one_run_is_kept(path):
    """No absolute path, no address in memory, no time, no metadata that changes; and no file too large to open."""
    text = path.read_text(encoding="utf-8")
    found = re.search(r"(?<![\w./:-])/(home|root|usr|tmp|work|Users|opt|mnt|var)/|[A-Z]:\\\\\w|at 0x[0-9a-f]{4}", printed(path))
    assert not found, found
    found = re.search(r"\d\s?(ms|µs|it/s|steps?/s|tokens/s|seconds)\b|Wall time|CPU times|\b\d+:\d\d:\d\d\b", printed(path))
    assert not found, found
    assert not any(cell["metadata"] for cell in json.loads(text)["cells"]) and "widget-view" not in text
    assert set(json.loads(text)["metadata"]) == {"kernelspec", "language_info"}
    assert len(text.encode("utf-8")) < LARGEST_NOTEBOOK


def definitions(code):
    """Names of functions and classes at the top level."""
    return {node.name for node in ast.parse(code).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


@cache
def project():
    """(module names, what their top levels define) of the project's files."""
    files = [*ROOT.glob("*.py"), *(ROOT / "theory").glob("*.py")]
    defined = set().union(*(definitions(file.read_text(encoding="utf-8")) for file in files))
    return {file.stem for file in files}, defined - {"main", "report", "preset"}


def python(path):
    """The code of each cell, IPython's own lines left out."""
    return [re.sub(r"^[%!].*", "", source(cell), flags=re.M) for cell in cells(path, "code")]


@every_notebook
def test_it_imports_the_project_and_redefines_nothing_of_it(path):
    modules, defined = project()
    again = definitions("\n".join(python(path))) & defined
    assert not again, again
    imported = {name.split(".")[0] for code in python(path) for node in ast.walk(ast.parse(code))
                for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else
                             [alias.name for alias in node.names] if isinstance(node, ast.Import) else [])}
    assert imported & modules


@every_notebook
def test_it_opens_with_a_title_and_versions_and_its_cells_are_small(path):
    assert re.match(r"# \S", source(cells(path, "markdown")[0]))
    if path.parent.name == "notebooks":
        assert re.match(r"Python 3\.\d+", "".join(cells(path, "code")[0]["outputs"][0]["text"]))
    assert all(len(line) <= 130 for code in python(path) for line in code.splitlines())
    lengths = [len(code.splitlines()) for code in python(path)]
    assert max(lengths) <= LONGEST_CELL and sum(lengths) / len(lengths) <= 11, lengths


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("0[1-6]*.ipynb")), ids=lambda path: path.name)
def test_exercises_have_folded_solutions(path):
    text = "\n".join(source(cell) for cell in cells(path, "markdown"))
    exercises = re.findall(r"^(\d+)\. ", text.split("## Exercises")[1].split("<details>")[0], re.M)
    solutions = re.findall(r"<details><summary>Solution (\d+)</summary>\n\n.*?</details>", text, re.S)
    assert exercises == solutions == [str(i + 1) for i in range(len(exercises))] and len(exercises) >= 3


def test_the_results_notebook_misses_what_the_readme_lacks(monkeypatch):
    """Its own check would be worth nothing if a renamed row, a changed number or another sentence passed."""
    code, = [code for code in python(ROOT / "notebooks" / "07_results.ipynb") if "def tabulate" in code]
    monkeypatch.chdir(ROOT / "notebooks")
    names = dict(json=json, Path=Path, display=str, Markdown=str)
    exec(code, names)
    names["README"] = "| | a | b | c |\n|---|---|---|---|\n| row | 1.0 | 2.0 | more |\n\nIt took 1.82\ntimes as long.\n"
    names["tabulate"](["", "a", "b"], [["row", "1.0", "2.0"]])
    names["tabulate"](["", "x"], [["another", "3"]], readme=False)
    names["says"]("took 1.82 times")
    ab = ["", "a", "b"]
    for header, row in ((ab, ["line", "1.0", "2.0"]), (ab, ["row", "1.0", "2"]), (["", "b", "a"], ["row", "1.0", "2.0"])):
        with pytest.raises(AssertionError, match="the README has"):
            names["tabulate"](header, [row])
    with pytest.raises(AssertionError, match="not in the README"):
        names["says"]("took 1.8 times")


def links(text):
    """Targets of markdown links inside the project, code left out."""
    text = re.sub(r"```.*?```|`[^`\n]*`(?!\])", "", text, flags=re.S)
    return [unquote(target) for target in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text)]


@pytest.mark.parametrize("path", [*PATHS, *sorted(ROOT.glob("*.md")), *sorted((ROOT / "theory").glob("*.md"))],
                         ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    markdown = map(source, cells(path, "markdown")) if path.suffix == ".ipynb" else [path.read_text(encoding="utf-8")]
    for target in links("\n".join(markdown)):
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        assert there.exists() and there.is_relative_to(ROOT), target
        if anchor and there.suffix == ".md":
            headings = re.findall(r"^#+ (.*)", there.read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings], target


def test_the_readme_leads_to_every_notebook():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert PATHS
    for path in PATHS:
        assert f"]({path.relative_to(ROOT).as_posix()})" in readme, path.name
