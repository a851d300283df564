"""Shared by the tests of the harness."""

import os
import shutil
from pathlib import Path

import pytest
from making import case_with, drawn_case, functions, observing_case

from keyedopt.conformance import runner


def pytest_collection_modifyitems(items):
    """Slow tests, those that run the whole suite, come last."""
    items.sort(key=lambda item: "test_suite_verdicts" in item.nodeid or "test_mutants" in item.nodeid)


@pytest.fixture(scope="session")
def torchrec():
    """Skip where torchrec is not installed, unless it has to be (CI)."""
    try:
        import torchrec
    except ImportError:
        if os.environ.get("KEYEDOPT_REQUIRE_TORCHREC") == "1":
            raise
        pytest.skip("torchrec is not installed: see the README, section torchrec")
    return torchrec


FAULTS = """

class KeyedOptimizerWrapper(KeyedOptimizerWrapper):
    def load_state_dict(self, state_dict):
        pass


class GradientClippingOptimizer(GradientClippingOptimizer):
    def step(self, closure=None):
        return OptimizerWrapper.step(self, closure)
"""


@pytest.fixture(scope="session")
def acme(tmp_path_factory):
    """Write a library that keyedopt knows nothing of: ``acme``, in a sound and in a wrong version."""
    source = Path(__file__).parents[1] / "reference"
    folders = {}
    for version, faults in (("sound", ""), ("wrong", FAULTS)):
        folders[version] = tmp_path_factory.mktemp(version)
        package = folders[version] / "acme"
        shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
        for path in package.rglob("*.py"):
            path.write_text(path.read_text(encoding="utf-8").replace("keyedopt.reference", "acme"))
        with (package / "__init__.py").open("a") as file:
            file.write(faults)
    return folders


@pytest.fixture(scope="session")
def failed(acme):
    """Check the wrong library: a case with drawn inputs fails, and several with given ones."""
    loading = {case.clauses[0] for case in functions() if case.file.startswith("test_keyed_load")}
    others = [case.clauses[0] for case in (drawn_case(), case_with("dtype"), observing_case())]
    options = runner.Options(clauses=(*sorted(loading)[:8], *others))
    return runner.run("acme", options, path=[str(acme["wrong"])])
