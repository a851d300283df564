"""Quick local comparisons with pytest-benchmark: ``pytest benchmarks/ --benchmark-only``.

pytest would load the folder above as a package of its bare name, a second time. So this folder is none, the
one above is collected as a plain folder, and everything else is imported by its full name. A benchmark shares
its machine with nobody: with ``--benchmark-only`` there is one process.
"""

from pathlib import Path
from typing import Any

import pytest

from keyedopt.benchmarks.compare import RequestError, chosen
from keyedopt.benchmarks.subjects import SUBJECTS

FOLDER = Path(__file__).resolve().parents[1]
#: Who is measured if nobody is named.
BY = ("fused", "reference", "torch", "fbgemm")


class PlainFolder:
    """Has the folder of benchmarks collected without its ``__init__.py``."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Dir | None:
        """Return a plain folder for that one."""
        return pytest.Dir.from_parent(parent, path=path) if path.resolve() == FOLDER else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the names that ``keyedopt bench`` has, too."""
    group = parser.getgroup("keyedopt benchmarks")
    group.addoption("--workload", action="append", default=[], help="only this workload; repeatable")
    group.addoption("--task", action="append", default=[], help="only this task; repeatable")
    group.addoption("--by", action="append", default=[], help=f"one of {', '.join(SUBJECTS)}; repeatable")
    group.addoption("--rounds", type=int, default=10, help="runs of each; default: 10")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run in one process, whatever the configuration says."""
    if config.getoption("benchmark_only", False):
        config.option.numprocesses = 0
        config.option.dist = "no"


def pytest_configure(config: pytest.Config) -> None:
    """Register what a conftest cannot say of the folder above its own."""
    config.pluginmanager.register(PlainFolder())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give the tasks that are asked for, or the default set."""
    if "implementation" not in metafunc.fixturenames:
        return
    option: Any = metafunc.config.getoption
    try:
        pairs = [(work.name, task.name) for work, task in chosen(option("workload"), option("task"))]
    except RequestError as error:
        raise pytest.UsageError(str(error)) from error
    by = option("by") or BY
    unknown = [name for name in by if name not in SUBJECTS]
    if unknown or option("rounds") < 1:
        wrong = f"there is no implementation {unknown[0]!r}" if unknown else "--rounds must be at least 1"
        raise pytest.UsageError(f"{wrong}; there are {', '.join(SUBJECTS)}" if unknown else wrong)
    metafunc.parametrize("implementation", by)
    metafunc.parametrize(("workload", "task"), pairs)
