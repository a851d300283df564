"""``keyedopt bench run``: measure an implementation beside its peers, show ratios, write JSON."""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from keyedopt.benchmarks import traces
from keyedopt.benchmarks.compare import Report, RequestError, chosen, compare, implementations
from keyedopt.benchmarks.tasks import Task
from keyedopt.benchmarks.timing import Budget, clock_of
from keyedopt.benchmarks.workloads import WORKLOADS, Workload
from keyedopt.cli import bench_proof
from keyedopt.cli.bench_table import show
from keyedopt.cli.progress import progress
from keyedopt.conformance.results import model as results
from keyedopt.conformance.results.errors import KeyedoptError
from keyedopt.conformance.results.untrusted import error_text, one_line
from keyedopt.conformance.targets.find import find

#: The default row width of the tables of a trace.
DIM = 64
#: More threads per core measure nothing; many more cannot be created and end the process.
THREADS_PER_CORE = 8


class InterruptedRunError(KeyedoptError):
    """A run was interrupted; the message says where its results are."""


@dataclass(frozen=True)
class Asked:
    """What the command line asks for; the options of `keyedopt.cli.bench` say what each means."""

    workloads: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    implementation: str = "fused"
    against: tuple[str, ...] | None = None
    device: str = "cpu"
    output: Path | None = None
    conformance: Path | None = None
    check: bool = False
    seconds: float = 1.0
    threads: int | None = None
    cold: bool = False
    trace: Path | None = None
    dim: int | None = None
    imports: tuple[str, ...] = ()


def measure(
    asked: Asked,
    given: Sequence[tuple[Workload, Task]] | None = None,
    shown: Callable[[Report], object] = show,
) -> int:
    """Measure, print the table, and return 0.

    Args:
        asked: the options.
        given: workloads and tasks instead of those that the options name.
        shown: prints the report.

    Raises:
        KeyedoptError: an option is wrong, nothing could be compared, or the run was interrupted.
    """
    _check_options(asked)
    pairs = _pairs(asked) if given is None else given
    find(asked.implementation, asked.imports)
    check_device(asked.device)
    if asked.output is not None:
        results.refuse_unwritable(asked.output)
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    left_out: dict[str, str] = {}
    found = list(implementations(asked.implementation, asked.against, left_out.__setitem__))
    proof: dict[str, Any] | None = None
    load = list(os.getloadavg())  # read before the check, which makes the machine busy
    if asked.conformance is not None:
        proof = bench_proof.from_file(asked.conformance, asked.implementation, asked.device)
    with progress("starting") as step:
        if asked.check:
            step("conformance", 0, 1)
            proof = bench_proof.on_the_spot(asked.implementation, asked.device)
        budget = Budget(seconds=asked.seconds, warmup=min(0.3, asked.seconds))
        partial = _PartialReport(asked.output, proof, load)
        clock = clock_of(asked.device)
        try:
            report = compare(found, pairs, asked.device, budget, clock, step, asked.cold, partial.add)
            report = partial.described(report)
            if not report.rows:
                raise RequestError(f"nothing was compared: {_why_nothing(report)}")
            partial.finish(report)
        except KeyboardInterrupt as error:
            raise InterruptedRunError(f"interrupted; {partial.place}") from error
    shown(report)
    for name, why in left_out.items():
        print(one_line(f"left out: {name}: {why}"))
    return 0


def _check_options(asked: Asked) -> None:
    """Raise RequestError if an option would be ignored or a number makes no sense."""
    if asked.conformance is not None and asked.check:
        raise RequestError("give --conformance or --check, not both")
    if asked.dim is not None and asked.trace is None:
        raise RequestError("--dim needs --trace")
    for name, path in {"--conformance": asked.conformance, "--trace": asked.trace}.items():
        if path is not None and asked.output is not None and path.resolve() == asked.output.resolve():
            raise RequestError(f"--output would replace the file of {name}: name another file")
    if math.isnan(asked.seconds):
        raise RequestError("--seconds must be a number of seconds, not nan")
    check_threads(asked.threads)


def check_threads(threads: int | None) -> None:
    """Raise RequestError if there are far more threads than cores."""
    most = THREADS_PER_CORE * (os.cpu_count() or 1)
    if threads is not None and threads > most:
        raise RequestError(f"--threads {threads} is too many: give at most {most} on this machine")


def check_device(device: str) -> None:
    """Raise RequestError if a device cannot be used."""
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise RequestError(f"{device!r} is not a device: see `keyedopt list devices`") from error
    if kind == "meta":
        raise RequestError("'meta' cannot be timed: its tensors have no data")
    if kind != "cpu":
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise RequestError(f"{device!r} cannot be used: {error_text(error)}") from error


def _pairs(asked: Asked) -> list[tuple[Workload, Task]]:
    if asked.trace is None:
        return chosen(asked.workloads, asked.tasks)
    trace = traces.read(asked.trace, asked.dim or DIM)
    return chosen((trace.name, *asked.workloads), asked.tasks, {**WORKLOADS, trace.name: trace})


class _PartialReport:
    """The report so far, in ``x.partial.json`` beside the output until the run is complete.

    Args:
        output: the file of the report; None if it is not written.
        proof: the conformance of the implementation.
        load: the load of the machine before the run.
    """

    def __init__(self, output: Path | None, proof: dict[str, Any] | None, load: list[float]) -> None:
        self._output, self._proof, self._load = output, proof, load
        self._partial = output and output.with_name(f"{output.stem}.partial{output.suffix}")
        #: Where the results are, for the message of an interrupted run.
        self.place = "nothing was written"

    def add(self, report: Report) -> None:
        """Write the report so far; it stays if the process is killed."""
        if self._partial is not None:
            self._write(self._partial, self.described(report))
            self.place = f"{len(report.rows)} comparisons are in {self._partial}"

    def described(self, report: Report) -> Report:
        """Return the report with the conformance, and with the load before the run."""
        environment = {**report.environment, "load": self._load}
        return replace(report, conformance=self._proof, environment=environment)

    def finish(self, report: Report) -> None:
        """Write the complete report, and remove the partial one."""
        if self._output is not None and self._partial is not None:
            self._write(self._output, report)
            self.place = f"the report is in {self._output}"
            self._partial.unlink(missing_ok=True)

    def _write(self, path: Path, report: Report) -> None:
        results.write_report(path, report.to_dict())


def _why_nothing(report: Report) -> str:
    """Return why nothing was compared; first what the implementation itself lacks."""
    reasons = sorted(report.skipped, key=lambda item: item["who"] != report.implementation)
    if not reasons:
        return "there is no peer; name one with --against"
    first = reasons[0]
    return f"{first['workload']} {first['task']} by {first['who']}: {first['why']}"
