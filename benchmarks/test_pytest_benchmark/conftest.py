"""Quick local comparisons with pytest-benchmark: ``pytest benchmarks/ --benchmark-only``.

pytest would import the folder above a second time, as a package of its bare name. Therefore it is collected
as a plain folder, this folder is not a package, and modules are imported by their full names. With
``--benchmark-only`` there is one process, because a benchmark must not share its machine. The name of this
folder begins with ``test`` because pytest reads the options of a conftest only in such folders.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from keyedopt.benchmarks.asv.implementations import IMPLEMENTATIONS
from keyedopt.benchmarks.compare import RequestError, chosen
from keyedopt.benchmarks.timing import Clock, Job, once

FOLDER = Path(__file__).resolve().parents[1]
#: The default implementations.
BY = ("fused", "reference", "torch", "fbgemm")


class PlainFolder:
    """Collects the folder of benchmarks as a plain folder, without its ``__init__.py``."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Dir | None:
        """Return a plain folder for the folder of benchmarks."""
        return pytest.Dir.from_parent(parent, path=path) if path.resolve() == FOLDER else None


class CoreTimer:
    """The timer that pytest-benchmark reads: the sum of the seconds that the timing core has measured."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        """Return the seconds so far."""
        return self.seconds


TIMER = CoreTimer()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let pytest-benchmark read `TIMER` in all benchmarks."""
    for item in items:
        if FOLDER in item.path.resolve().parents:
            item.add_marker(pytest.mark.benchmark(timer=TIMER))


@pytest.fixture
def measure(benchmark: Any) -> Callable[[Clock, Job, int, int], None]:
    """Return a function that times some rounds of a job by the timing core, after warm-up rounds."""

    def call(clock: Clock, job: Job, rounds: int, warmup_rounds: int = 0) -> None:
        def run() -> None:
            TIMER.seconds += once(clock, job)

        benchmark.pedantic(run, rounds=rounds, iterations=1, warmup_rounds=warmup_rounds)

    return call


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options with the names of ``keyedopt bench run``."""
    group = parser.getgroup("keyedopt benchmarks")
    group.addoption("--workload", action="append", default=[], help="only this workload; repeatable")
    group.addoption("--task", action="append", default=[], help="only this task; repeatable")
    group.addoption(
        "--by", action="append", default=[], help=f"one of {', '.join(IMPLEMENTATIONS)}; repeatable"
    )
    group.addoption("--rounds", type=int, default=10, help="runs of each benchmark; default: 10")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run in one process, even if the configuration says otherwise."""
    if config.getoption("benchmark_only", False):
        config.option.numprocesses = 0
        config.option.dist = "no"


def pytest_configure(config: pytest.Config) -> None:
    """Register the hook for the folder above, which a conftest cannot define itself."""
    config.pluginmanager.register(PlainFolder())


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize with the requested tasks, or with the default set."""
    if "implementation" not in metafunc.fixturenames:
        return
    option: Any = metafunc.config.getoption
    try:
        pairs = [(work.name, task.name) for work, task in chosen(option("workload"), option("task"))]
    except RequestError as error:
        raise pytest.UsageError(str(error)) from error
    by = option("by") or BY
    unknown = [name for name in by if name not in IMPLEMENTATIONS]
    if unknown:
        raise pytest.UsageError(f"no implementation {unknown[0]!r}: give one of {', '.join(IMPLEMENTATIONS)}")
    if option("rounds") < 1:
        raise pytest.UsageError("--rounds must be at least 1")
    metafunc.parametrize("implementation", by)
    metafunc.parametrize(("workload", "task"), pairs)
