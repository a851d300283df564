"""Tutorials as they stand: the vendor's in an empty folder, that of clauses in a clone; their output too."""

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from making import without_progress

ROOT = Path(__file__).parents[1]
CLAUSES = ROOT / "docs" / "howto" / "clauses.md"
TUTORIAL = ROOT / "docs" / "tutorials" / "vendor.md"


def blocks():
    """Return the tutorial's commands, each with what is shown of its output."""
    tutorial = TUTORIAL.read_text(encoding="utf-8").partition("\n## ")[0]
    found = []
    for kind, body in re.findall(r"^```(\w*)\n(.*?)^```$", tutorial, flags=re.M | re.S):
        if kind == "bash":
            found.append((body, []))
        else:
            found[-1][1].extend(body.splitlines())
    return found


def of_readme():
    """Return the failure that the README shows of the tutorial."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return readme.partition("```\nfail ")[2].partition("```")[0].splitlines()[1:]


def shown(line, output):
    """Whether a line is in the output, where … stands for anything."""
    pattern = ".*".join(map(re.escape, line.split("…")))
    return re.search(f"^{pattern}$", output, flags=re.M) is not None


@pytest.fixture
def environment(tmp_path):
    """Make an environment to install into, which has all that this one has; nothing is fetched.

    ``keyedopt`` and ``pip`` are those of this environment; pip builds with the setuptools that is here.
    """
    home = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (places,) = home.glob("lib/python*/site-packages")
    (places / "outer.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n", encoding="utf-8"
    )
    python = home / "bin" / "python"
    offline = "-q --no-deps --no-index --no-build-isolation"
    commands = {
        "keyedopt": f'exec {python} -m keyedopt.cli.main "$@"',
        "pip": f'verb=$1; shift; exec {python} -m pip "$verb" {offline} "$@"',
    }
    for name, line in commands.items():
        (home / "bin" / name).write_text(f"#!/bin/bash\n{line}\n", encoding="utf-8")
        (home / "bin" / name).chmod(0o755)
    return {**os.environ, "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}


@pytest.mark.complete
def test_a_newcomer_gets_from_nothing_to_a_green_report(environment, tmp_path):
    found = blocks()
    assert [block.split()[:2] for block, _ in found] == [
        ["keyedopt", "init-adapter"],
        ["sed", "-i"],
        ["keyedopt", "explain"],
        ["keyedopt", "report"],
        ["sed", "-i"],
    ]
    folder = tmp_path / "empty"
    folder.mkdir()
    codes, pages = [], []
    for block, lines in found:
        done = subprocess.run(
            ["bash", "-c", block], cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert without_progress(done.stderr) == ""
        codes.append(done.returncode)
        lines = [*lines, *(of_readme() if any(line.startswith("fail ") for line in lines) else [])]
        missing = [line for line in lines if not shown(line, done.stdout)]
        assert not missing, done.stdout
        if "keyedopt report" in block:
            pages.append((folder / "site" / "index.html").read_text(encoding="utf-8"))
    # The fault is a red gate, and its case fails again; everything else is well.
    assert codes == [0, 1, 1, 0, 0]
    red, green = pages
    for part in (">not conformant<", '"ALGO-002"', "test_sgd_momentum[SGD-dampening]", "weight after step 2"):
        assert part in red
    assert ">not conformant<" not in green
    assert ">partly checked<" in green


@pytest.mark.complete
def test_a_newcomer_adds_a_clause(tmp_path):
    text = CLAUSES.read_text(encoding="utf-8")
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)
    (case,) = [body for kind, body in found if kind == "python"]
    clause, mutant, known = [body for kind, body in found if kind == "toml"]
    printed = [body for kind, body in found if not kind]
    clone, packages = tmp_path / "clone", tmp_path / "site" / "keyedopt"
    subprocess.run(["git", "clone", "-q", "--depth", "1", ROOT.as_uri(), clone], check=True)
    packages.mkdir(parents=True)
    for folder in ("conformance", "reference", "fused", "cli", "tools", "reports", "benchmarks"):
        (packages / folder).symlink_to(clone / folder)

    def add(file, body, before=None):
        path = clone / "conformance" / file
        old = path.read_text(encoding="utf-8").rstrip("\n")
        place = old.index(before) if before else len(old)
        path.write_text(f"{old[:place]}\n\n\n{body}\n{old[place:]}", encoding="utf-8")

    add("spec/wrapper.toml", clause, before="[[nothing]]")
    add("suite/wrapper/test_wrapper_basics.py", case)
    add("mutants/wrapper.toml", mutant)
    add("expectations/torchrec.toml", known)
    environment = {**os.environ, "PYTHONPATH": str(packages.parent)}
    for line in (
        "-m pytest -q -n 0 --pyargs keyedopt.conformance.suite.wrapper --implementation reference "
        "-k keeps_the_memory",
        "-m keyedopt.cli.main mutants wrapper-zeroes-a-copy-of-gradients",
        "-m keyedopt.tools.spec_pages",
        "-m pytest -q -n 0 tests/conformance/test_specification.py",
    ):
        done = subprocess.run(
            [sys.executable, *line.split()],
            cwd=clone,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if " mutants " in line:
            assert done.stdout == printed[0]
