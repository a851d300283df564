"""A clean checkout builds an sdist, and from it a wheel that works, with the C++ extensions and without."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.complete
#: The extensions, by the begin of the names of their files.
COMPILED = tuple(
    f"keyedopt/{name}." for name in ("fused/backends/native/_kernels", "fused/bulk/_bulk", "ptx/_machine")
)
NO_COMPILER = {"CC": "false", "CXX": "false"}
#: Compiles without optimization: what is tested here is the wheel, not the speed of its kernels.
QUICK = '#!/bin/sh\nexec c++ "$@" -O0\n'

USE = """
import json, warnings
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from keyedopt import fused, ptx, reference
    param = torch.nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    fused.SGD([param], lr=0.5).step()
print(json.dumps([fused.__file__, param.tolist(), sorted(fused.extensions.missing())]))
print(sum("C++ extensions are missing" in str(one.message) for one in caught))
"""


def run(*command, **environment):
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Build the sdist of a clone, which has only what is committed."""
    folder = tmp_path_factory.mktemp("sdist")
    subprocess.run(["git", "clone", "-q", "--depth", "1", ROOT.as_uri(), folder / "clone"], check=True)
    run("-m", "build", "--sdist", "--no-isolation", "--outdir", folder, folder / "clone")
    (made,) = folder.glob("*.tar.gz")
    return made


def wheel_of(sdist, folder, **environment):
    """Build a wheel from an sdist without a network, as `python -m build` does; return it and its files."""
    with tarfile.open(sdist) as tar:
        tar.extractall(folder)
    source = folder / sdist.name.removesuffix(".tar.gz")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source, **environment)
    (made,) = folder.glob("*.whl")
    with zipfile.ZipFile(made) as archive:
        return made, archive.namelist()


def install(wheel, folder):
    """Install a wheel in a folder of its own; return the environment in which Python imports it."""
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target"]
    run(*pip, folder, wheel)
    return {"PYTHONPATH": str(folder)}


def test_the_sdist_has_the_sources_and_nothing_that_was_compiled(sdist):
    with tarfile.open(sdist) as tar:
        inside = {name.partition("/")[2] for name in tar.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files", "fused", "ptx", "reference", "conformance", "reports", "benchmarks", "cli"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert sorted(name for name in tracked if name not in inside) == []
    assert [name for name in inside if name.endswith((".so", ".pyc", ".o"))] == []
    assert {"README.md", "LICENSE", "pyproject.toml", "CHANGELOG.md"} <= inside


def test_its_wheel_imports_steps_and_checks(sdist, tmp_path):
    quick = tmp_path / "quick-c++"
    quick.write_text(QUICK)
    quick.chmod(0o755)
    wheel, files = wheel_of(sdist, tmp_path, CC=str(quick), CXX=str(quick))
    if shutil.which("c++"):  # an extension that does not compile is left out without an error
        assert [name for name in COMPILED if not any(file.startswith(name) for file in files)] == []
    environment = install(wheel, tmp_path / "site")
    said = run("-c", USE, **environment)
    assert str(tmp_path / "site") in said
    assert "[0.5, 0.5]" in said
    if shutil.which("c++"):
        assert said.endswith("[0.5, 0.5], []]\n0\n")
    assert "CLIP-001" in run("-m", "keyedopt", "explain", "CLIP-001", **environment)
    assert "gate: green" in run("-m", "keyedopt", "check", "fused", "--area", "wrapper", **environment)


def test_its_wheel_works_without_a_compiler(sdist, tmp_path):
    wheel, files = wheel_of(sdist, tmp_path, **NO_COMPILER)
    assert [name for name in files if name.endswith(".so")] == []
    said = run("-c", USE, **install(wheel, tmp_path / "site"))
    lacking = '["keyedopt.fused.backends.native._kernels", "keyedopt.fused.bulk._bulk"]'
    assert said.endswith(f"[0.5, 0.5], {lacking}]\n1\n")
