"""The repository keeps its shape: who imports whom, what is installed, lint, types, doctests."""

import ast
import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import LONGEST

from keyedopt.conformance.run import replay

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = {
    name.removeprefix("keyedopt."): ROOT / folder
    for name, folder in PROJECT["tool"]["setuptools"]["package-dir"].items()
}

SUITE = ROOT / "conformance" / "suite"

#: Which parts of keyedopt a part may import.
ALLOWED = {
    "reference": {"reference"},
    "fused": {"fused", "reference"},  # of the reference all but the arithmetic below
    "conformance": {"conformance"},
    "benchmarks": {"benchmarks", "conformance"},
    "reports": {"reports"},  # result files are all it knows
    "cli": {"cli", "conformance", "reference", "fused", "benchmarks", "reports"},
    "tools": {"tools", "conformance", "reference", "fused", "benchmarks", "reports", "cli"},
}

#: The arithmetic of the reference, which the fused implementation must not share; the enumerations are types.
ARITHMETIC = ("keyedopt.reference.rules", "keyedopt.reference.norms")
TYPES = {"BiasCorrection", "Decay", "EpsPlacement", "Rows"}

#: What the reference may import: torch and the standard library.
REFERENCE_NEEDS = {"torch", *sys.stdlib_module_names}


def sources(folder):
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute and by full name"
            yield node.module


def test_the_table_of_arrows_covers_every_part():
    assert set(ALLOWED) == set(FOLDERS)


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_only_the_parts_it_may(part):
    for path in sources(FOLDERS[part]):
        for module in imported(path):
            assert module.partition(".")[0] not in FOLDERS, f"{path} imports {module} by its bare name"
            if module.startswith("keyedopt."):
                assert module.split(".")[1] in ALLOWED[part], f"{path} imports {module}"


def test_the_fused_implementation_shares_no_arithmetic():
    for path in sources(FOLDERS["fused"]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                head = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for name in (alias.name for alias in node.names if alias.name not in TYPES):
                    assert not f"{head}{name}".startswith(ARITHMETIC), f"{path} imports {head}{name}"


def test_the_reference_needs_torch_alone():
    for path in sources(FOLDERS["reference"]):
        for module in imported(path):
            assert module.partition(".")[0] in REFERENCE_NEEDS | {"keyedopt"}, f"{path} imports {module}"


def test_no_kernel_is_tuned_by_replaying_an_update():
    """What is tried to be timed is done, and an update that is done again is another one."""
    for path in sources(FOLDERS["fused"]):
        assert not re.search("autotune|do_bench", path.read_text(encoding="utf-8"), re.I), path


def test_cases_use_torch_alone():
    allowed = {"torch", "pytest", "hypothesis", *sys.stdlib_module_names}
    for path in sources(SUITE):
        for module in imported(path):
            ours = module.startswith("keyedopt.conformance.suite.support.")
            assert ours or module.partition(".")[0] in allowed, f"{path} imports {module}"


def definitions():
    """Yield what the files of the suite define at module level: file, name, statement."""
    for path in sources(SUITE):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Import | ast.ImportFrom):
                yield from ((path.stem, name, node) for name in replay._defined(node))


def test_cases_share_their_helpers_and_do_not_copy_them():
    found = {}
    for file, name, node in definitions():
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            text = ast.unparse(node).replace(name, "", 1)
            other = found.setdefault(text, f"{file}.{name}")
            assert other == f"{file}.{name}", f"{other} is {file}.{name}: it belongs in a support file"


def test_a_name_that_cases_share_means_one_thing():
    """A case as a script is its own file and all support files in one namespace."""
    shared = {name: file for file, name, _ in definitions() if (SUITE / "support" / f"{file}.py").exists()}
    for file, name, _ in definitions():
        assert shared.get(name, file) == file, f"{file} defines {name}, which is a name of {shared[name]}"


def test_every_package_is_installed():
    found = {
        f"keyedopt.{'.'.join([part, *path.parent.relative_to(folder).parts])}"
        for part, folder in FOLDERS.items()
        for path in folder.rglob("__init__.py")
    }
    assert found == set(PROJECT["tool"]["setuptools"]["packages"])


def test_no_module_is_loaded_under_a_bare_name():
    code = (
        "import sys, keyedopt.conformance.run.runner, keyedopt.cli.main, keyedopt.reference;"
        f"print([name for name in {list(FOLDERS)!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    assert not set(FOLDERS) & set(sys.modules)


def test_the_files_that_are_begun_first_are_there():
    assert [name for name in LONGEST if not any((ROOT / "tests").rglob(f"{name}.py"))] == []
    assert len(set(LONGEST)) == len(LONGEST)


@pytest.mark.parametrize("part", FOLDERS)
def test_files_can_be_read_in_one_sitting(part):
    limit = 210 if part == "reference" else 400
    for path in sources(FOLDERS[part]):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        assert lines <= limit, f"{path.relative_to(ROOT)} has {lines} lines, more than {limit}"


@pytest.mark.parametrize("part", FOLDERS)
def test_every_folder_says_what_it_is(part):
    assert (FOLDERS[part] / "README.md").read_text(encoding="utf-8").strip()


@pytest.mark.parametrize("arguments", [["check"], ["format", "--check"]], ids=lambda a: a[0])
def test_ruff(arguments):
    command = [sys.executable, "-m", "ruff", *arguments, "."]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_types(tmp_path):
    """Mypy does not follow the editable install, so it reads a tree of links."""
    (tmp_path / "keyedopt").mkdir()
    for part, folder in FOLDERS.items():
        (tmp_path / "keyedopt" / part).symlink_to(folder)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "--namespace-packages", "--explicit-package-bases"]
    done = subprocess.run([*command, "keyedopt"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def modules():
    for part in FOLDERS:
        package = importlib.import_module(f"keyedopt.{part}")
        yield package.__name__
        for item in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if "findings." not in item.name and not item.name.endswith("__main__"):
                yield item.name


@pytest.mark.parametrize("name", list(modules()))
def test_doctests(name):
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert failed == 0


def test_the_reference_has_doctests():
    """A doctest that nobody runs proves nothing; this one counts them."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [
        test
        for name in modules()
        if name.startswith("keyedopt.reference")
        for test in finder.find(importlib.import_module(name))
        if test.examples
    ]
    assert len(found) >= 5
