"""The action and the pre-commit hook are files that can be read, and call commands that exist."""

import tomllib
from pathlib import Path

import pytest
import yaml
from test_documented_commands import commands, parse

ROOT = Path(__file__).parents[1]


def test_the_action_checks_its_target():
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    assert action["inputs"]["target"]["required"]
    steps = action["runs"]["steps"]
    assert all(step["shell"] == "bash" for step in steps)
    (found,) = commands(steps[-1]["run"].replace("$ARGUMENTS", action["inputs"]["arguments"]["default"]))
    parse(found)
    assert "${{" not in "".join(step["run"] for step in steps), "input is passed by the environment"


def test_the_hook_checks():
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    parse([*hook["entry"].split()[1:], "acme.optim"])


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_container_installs_extras_that_exist(name):
    text = (ROOT / "containers" / f"{name}.Dockerfile").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    asked = text.partition('".[')[2].partition("]")[0].split(",")
    assert name in asked
    assert set(asked) <= set(extras)
