"""Type checkers see every signature of an installed keyedopt: an argument that is not there is an error."""

import enum
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from keyedopt import fused, reference

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.complete
#: Marks the lines of a program that are wrong.
WRONG = "  # wrong"

PROGRAM = """
import torch
from keyedopt import fused, reference

w = torch.nn.Parameter(torch.ones(4, 2))
table = fused.EmbeddingBagConfig(4, 2, name="t", feature_names=["f"])
bags = fused.EmbeddingBagCollection([table], fused.RowWiseAdagrad, {"lr": 0.1})
keyed = fused.KeyedOptimizerWrapper({"w": w}, lambda params: fused.Adam(params, lr=0.1, foreach=True))
clipped = fused.GradientClippingOptimizer(keyed, fused.GradientClipping.NORM, max_gradient=1.0)
both = fused.CombinedOptimizer([("tables", bags.fused_optimizer), clipped])
warm = fused.WarmupOptimizer(both, [fused.WarmupStage(fused.WarmupPolicy.LINEAR, max_iters=10)])
warm.step()
sums = fused.AccumulateAdagrad([w], lr=0.1, use_accumulate=True, accumulate_step=4)
sums.load_state_dict(reference.AccumulateAdagrad([w]).state_dict())
fused.Adam([w], 0.1, (0.9, 0.99), capturable="yes")  # wrong
fused.SGD([w], lr="fast")  # wrong
fused.WarmupStage(policy="linear", max_iter=3)  # wrong
clipped.clipping  # wrong
"""


def program():
    """Return a program of which lines are wrong: some by hand, and a call of each public name."""
    called = [
        f"{package.__name__.rpartition('.')[2]}.{name}(no_such_argument=1){WRONG}"
        for package in (reference, fused)
        for name in package.__all__
        if callable(found := getattr(package, name))
        and not (inspect.isclass(found) and issubclass(found, enum.Enum))
    ]
    assert len(called) >= 60
    return PROGRAM + "\n".join(called) + "\n"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Install keyedopt beside the packages that are here, as pip does; return its Python and a program."""
    folder = tmp_path_factory.mktemp("types")
    built = shutil.ignore_patterns("build", ".*", "*.so", "*.egg-info", "__pycache__")
    source = shutil.copytree(ROOT, folder / "source", ignore=built)
    pip = [sys.executable, "-m", "pip", "wheel", str(source), "--no-deps", "--no-build-isolation", "-q"]
    subprocess.run([*pip, "-w", str(folder)], check=True, env=without_compiler())
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=False)
    python = folder / "venv" / "bin" / "python"
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(pip, check=True)
    (folder / "program.py").write_text(program())
    return python, folder / "program.py"


def without_compiler():
    """Return an environment in which pip builds no extension, because types need none."""
    return {**os.environ, "CC": "false", "CXX": "false"}


def mypy(python, file):
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), file.name]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False)
    return [int(line) for line in re.findall(rf"^{file.name}:(\d+): error", done.stdout, re.M)], done.stdout


def pyright(python, file):
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error"]
    command += ["--pythonpath", str(python), file.name]
    done = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [one["range"]["start"]["line"] + 1 for one in found if one["severity"] == "error"], done.stdout


@pytest.mark.parametrize("checker", [mypy, pyright], ids=lambda checker: checker.__name__)
def test_a_wrong_argument_is_an_error_and_a_right_one_is_not(installed, checker):
    found, said = checker(*installed)
    lines = installed[1].read_text().splitlines()
    assert {*found} == {number for number, line in enumerate(lines, 1) if line.endswith(WRONG)}, said
