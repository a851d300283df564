"""A round of an A/B comparison: two fresh processes measure two builds alternately.

A process keeps its placement in memory, so runs of one process are not independent. Comparisons therefore
take several rounds, each of fresh processes.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from keyedopt.benchmarks import build_process
from keyedopt.benchmarks.build_process import BuildProcess
from keyedopt.benchmarks.timing import result_error

#: A workload and a task, by name.
Key = tuple[str, str]


@dataclass(frozen=True)
class Request:
    """What a round measures.

    Args:
        trees: the folders to import the first and the second build from.
        targets: the implementation to measure in each of them.
        device, threads: where, and on how many threads.
        imports: modules to import first.
    """

    trees: tuple[Path, Path]
    targets: tuple[str, str]
    device: str = "cpu"
    threads: int = 1
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Measured:
    """The result of one comparison in one round.

    Args:
        key: the workload and the task.
        seconds: the lower quartile of each build; None if one of them cannot do the task.
        why: the reason if `seconds` is None.
        error: the difference of their results (`timing.result_error`); None if it was not computed.
    """

    key: Key
    seconds: tuple[float, float] | None
    why: str = ""
    error: float | None = None

    @property
    def slowdown(self) -> float | None:
        """The logarithm of the second build's time over the first's."""
        return None if self.seconds is None else math.log(self.seconds[1] / self.seconds[0])


def measure(
    request: Request,
    wanted: Sequence[Key],
    compare_results: bool = False,
    progress: Callable[[Key], object] = lambda key: None,
) -> Iterator[Measured]:
    """Start two fresh processes, and measure each comparison.

    Args:
        request: the builds.
        wanted: the comparisons.
        compare_results: whether to compute `Measured.error`.
        progress: called before each comparison.

    Raises:
        ProcessError: a process ended or hung.
    """
    with contextlib.ExitStack() as stack:
        files = ["", ""]
        if compare_results:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="keyedopt-results-"))
            files = [str(Path(folder) / f"{side}.pt") for side in (0, 1)]
        both = [BuildProcess(tree, request.threads) for tree in request.trees]
        for process in both:
            stack.callback(process.close)
        for key in wanted:
            progress(key)
            commands = [
                (target, *key, request.device, file, request.imports)
                for target, file in zip(request.targets, files, strict=True)
            ]
            reasons = build_process.start(both, commands)
            if any(reasons):
                yield Measured(key, None, next(filter(None, reasons)))
                continue
            error = _result_error(files) if compare_results else None
            first, second = map(build_process.lower_quartile, build_process.alternate(both))
            yield Measured(key, (first, second), error=error)


def _result_error(files: Sequence[str]) -> float:
    one, other = (torch.load(file, weights_only=True) for file in files)
    return result_error(one, other)
