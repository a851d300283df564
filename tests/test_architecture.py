"""The repository keeps its shape: who imports whom, what is installed, lint, types, doctests."""

import ast
import difflib
import doctest
import importlib
import os
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import LONGEST

from keyedopt import fused, reference
from keyedopt.conformance.run import replay
from keyedopt.reference.keyed.bulk import ONE_BY_ONE

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
    "fused": {"fused", "reference"},  # but none of the reference's arithmetic
    "conformance": {"conformance"},
    "benchmarks": {"benchmarks", "conformance"},
    "ptx": {"ptx"},
    "reports": {"reports", "conformance"},  # of conformance only the packages below
    "cli": {"cli", "conformance", "reference", "fused", "benchmarks", "reports"},
    "tools": {"tools", "conformance", "reference", "fused", "benchmarks", "ptx", "reports", "cli"},
}

#: Packages that may import only these packages of keyedopt.
LEAVES = {
    "conformance/spec": ("conformance.spec",),
    "conformance/results": ("conformance.results", "conformance.spec"),
    "reports": ("reports", "conformance.results", "conformance.spec"),
}

#: The arithmetic of the reference: the fused implementation has its own.
ARITHMETIC = {"rules", "norms", "embedding.lookup", "embedding.backward", "embedding.update"}
#: Names of these modules that the fused implementation may use: they compute nothing, or are overridden.
NO_ARITHMETIC = {
    *("BiasCorrection", "Decay", "EpsPlacement", "Rows"),
    *("BackwardClip", "FusedModuleClips", "clip_in_backward", "backward_clip"),
}

#: The largest share of the lines of two files with one name that may be alike.
ALIKE = 0.2

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


@pytest.mark.parametrize("folder", LEAVES)
def test_a_leaf_imports_only_its_packages(folder):
    allowed = [f"keyedopt.{package}" for package in LEAVES[folder]]
    for path in sources(ROOT / folder):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            )
            head = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in (f"{head}{name}" for name in names):
                ours = any(f"{name}.".startswith(f"{package}.") for package in allowed)
                assert ours or not name.startswith("keyedopt."), f"{path} imports {name}"


def arithmetic(module):
    """Return whether a module is one of the reference's arithmetic."""
    name = module.removeprefix("keyedopt.reference.")
    return name != module and any(name == one or name.startswith(f"{one}.") for one in ARITHMETIC)


def test_the_modules_of_the_arithmetic_exist():
    for name in ARITHMETIC:
        path = FOLDERS["reference"] / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), name


def test_the_fused_implementation_has_its_own_arithmetic():
    for path in sources(FOLDERS["fused"]):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not any(arithmetic(alias.name) for alias in node.names), path
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    own = alias.name in NO_ARITHMETIC or not (arithmetic(node.module) or arithmetic(whole))
                    assert own, f"{path} imports {alias.name} from {node.module}"


def code_lines(path):
    """Return the lines of a file as `ast` writes them, without docstrings and imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            if isinstance(body, list) and body:  # an absent `else` must not become one
                body[:] = [one for one in body if not skipped(one)] or [ast.Pass()]
    lines = (line.strip() for line in ast.unparse(tree).splitlines())
    return [line for line in lines if len(line) > 1 and line != "pass"]


def skipped(node):
    """Return whether a statement is an import, a docstring, or the list of exported names."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    exports = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    return text or exports or isinstance(node, ast.Import | ast.ImportFrom)


def alike(one, other):
    """Return the share of the lines of one file that the other file repeats in the same order."""
    first, second = code_lines(one), code_lines(other)
    blocks = difflib.SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / max(1, len(first))


def pairs():
    """Return the files of the reference and the fused implementation that have the same name."""
    named = {}
    for path in sources(FOLDERS["reference"]):
        named.setdefault(path.name, []).append(path)
    return [
        (one, other)
        for other in sources(FOLDERS["fused"])
        for one in named.get(other.name, ())
        if other.name != "__init__.py"
    ]


@pytest.mark.parametrize(("one", "other"), pairs(), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_two_files_of_one_name_repeat_each_other(one, other):
    share = alike(one, other)
    assert share <= ALIKE, f"{share:.0%} of the lines are alike: let the fused file import the reference's"


def test_a_copied_file_is_found(tmp_path):
    copied = tmp_path / "copied.py"
    copied.write_text((FOLDERS["reference"] / "warmup.py").read_text(encoding="utf-8"))
    assert alike(FOLDERS["reference"] / "warmup.py", copied) == 1
    copied.write_text("from keyedopt.reference.warmup import WarmupOptimizer\n")
    assert alike(FOLDERS["reference"] / "warmup.py", copied) == 0


#: What the fused implementation re-exports: there is nothing to gain by another class.
RE_EXPORTED = [
    *("KeyedOptimizer", "CombinedOptimizer", "OptimizerWrapper", "WarmupOptimizer", "WarmupPolicy"),
    *("WarmupStage", "SemisyncOptimizer", "FaultTolerantOptimizer", "FusedOptimizer", "EmptyFusedOptimizer"),
    *("FusedOptimizerModule", "GradientClipping"),
    *("apply_optimizer_in_backward", "in_backward_optimizer_filter"),
]


@pytest.mark.parametrize("name", RE_EXPORTED)
def test_there_is_one_wrapper_family(name):
    assert getattr(fused, name) is getattr(reference, name)


@pytest.mark.parametrize("name", ["KeyedOptimizerWrapper", "GradientClippingOptimizer"])
def test_a_faster_wrapper_is_a_subclass(name):
    assert issubclass(getattr(fused, name), getattr(reference, name))


def test_importing_fused_leaves_the_reference_as_it_is():
    assert reference.KeyedOptimizer.bulk is ONE_BY_ONE
    assert reference.KeyedOptimizerWrapper.bulk is ONE_BY_ONE
    assert fused.KeyedOptimizerWrapper.bulk is not ONE_BY_ONE


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
    unsupported_without = {
        "test_sharded_model_parallel": {"torchrec"},
        "keyed_jagged": {"torchrec"},
        "replica_groups": {"torchft"},
    }
    for path in sources(SUITE):
        more = unsupported_without.get(path.stem, set())
        for module in imported(path):
            ours = module.startswith(("keyedopt.conformance.suite.support.", "keyedopt.conformance.golden."))
            assert ours or module.partition(".")[0] in allowed | more, f"{path} imports {module}"


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
    clashes = {
        f"{file} defines {name} of {shared[name]}" for file, name, _ in definitions() if name in shared
    }
    assert clashes == {f"{file} defines {name} of {file}" for name, file in shared.items()}


def test_every_package_is_installed():
    found = {
        f"keyedopt.{'.'.join([part, *path.parent.relative_to(folder).parts])}"
        for part, folder in FOLDERS.items()
        for path in folder.rglob("__init__.py")
    }
    assert found | {"keyedopt"} == set(PROJECT["tool"]["setuptools"]["packages"])


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
    limit = 240 if part == "reference" else 440
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
    command += ["--namespace-packages", "--explicit-package-bases", "keyedopt"]
    cache = {"MYPY_CACHE_DIR": str(ROOT / ".mypy_cache"), **os.environ}
    done = subprocess.run(command, cwd=tmp_path, env=cache, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def modules(names=tuple(f"keyedopt.{part}" for part in FOLDERS)):
    """Yield all modules but the pretend accelerator's, which change torch, and a library without Python."""
    for name in names:
        if any(part in name for part in ("findings.", "conformance.pretend", "__main__", "ptx._machine")):
            continue
        yield name
        path = getattr(importlib.import_module(name), "__path__", ())
        yield from modules([item.name for item in pkgutil.iter_modules(path, f"{name}.")])


@pytest.mark.parametrize("name", list(modules()))
def test_doctests(name, request):
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name)):
        if any("torchrec" in one.source for one in test.examples):
            request.getfixturevalue("torchrec")
        assert runner.run(test).failed == 0


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
