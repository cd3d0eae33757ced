"""README and packaging say what is there."""

import io
import re
import tomllib
from contextlib import redirect_stdout

from conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
PINS = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").split() if "==" in line)


def test_the_example_prints_what_its_comments_say():
    code = re.search(r"```python\n(.*?)```", README, re.S).group(1)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(code, {})
    claimed = re.findall(r"# (tensor.*)", code)
    assert len(claimed) == 2 and printed.getvalue().split("\n")[:2] == claimed


def test_two_commands_and_the_second_runs_the_tests():
    section = README.split("## Two commands")[1].split("\n## ")[0]
    commands = re.findall(r"```\n(.*?)\n```", section, re.S)
    assert len(commands) == 2 and all("\n" not in c and "-c requirements.txt" in c for c in commands)
    assert "train_gpt.py --preset=laptop --scorer=ssa" in commands[0] and "-m pytest" in commands[1]


def test_the_file_table_names_every_file():
    table = README.split("## Files")[1].split("\n## ")[0]
    for path in [*ROOT.glob("*.py"), *ROOT.glob("*.cpp")]:
        assert f"`{path.name}`" in table, path.name
    for name in re.findall(r"`(\w+\.(?:py|cpp))`", README):
        assert (ROOT / name).exists(), name


def test_links_inside_the_project_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_every_dependency_has_a_floor_and_a_pin_that_meets_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + [x for extra in project["optional-dependencies"].values() for x in extra]
    floors = dict(re.split(">=", requirement.split(";")[0]) for requirement in wanted)
    del floors["triton"]  # requirements.txt says why
    assert set(floors) == set(PINS)
    for name, floor in floors.items():
        version = [int(x) for x in re.findall(r"\d+", PINS[name])]
        assert version >= [int(x) for x in re.findall(r"\d+", floor)], name
