"""Run the suite on one implementation: smoke stage, worker processes, records, result.

The code of the implementation runs only in processes of its own, because it may crash, hang, or end the
interpreter. This process starts them and reads their records. It never imports torch.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import time
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyedopt.conformance import spec
from keyedopt.conformance.results.errors import KeyedoptError, did_you_mean
from keyedopt.conformance.results.model import Case, Journal, Result, case_from
from keyedopt.conformance.results.verdict import FAILING
from keyedopt.conformance.run import case_sources
from keyedopt.conformance.run.family import compiles
from keyedopt.conformance.run.processes import CLOSES, ProcessError, Processes
from keyedopt.conformance.run.protocol import CLOSED, FORGED, Channel
from keyedopt.conformance.run.workers import Workers, WorkersError
from keyedopt.conformance.suite.support.clock import BACKSTOP, RAISE, Clock
from keyedopt.conformance.suite.support.scratch import scratch_folder

#: Seconds that the import of a target may take, or the time limit of a case if that is longer.
IMPORT_LIMIT = 30.0
#: Seconds that the smoke stage may take if a target compiles; workers find what it compiled.
COMPILATION_LIMIT = 900.0
#: Seconds that a case of such a target may take at least: new shapes may be compiled anew.
COMPILING_CASE_LIMIT = 300.0
#: The most cases that are run once more because they reached the time limit. If there are more, the target is
#: the cause.
MOST_AGAIN = 10
#: The largest default number of workers. The default is the number of processors plus one, because a case
#: that starts ranks mostly waits.
MOST_WORKERS = 9


class RunError(KeyedoptError):
    """The suite cannot be run on a target; the message says what to do."""


@dataclass(frozen=True)
class Options:
    """Which cases to run, and how the result is judged.

    Args:
        level: the gate covers only ``must`` clauses, or ``should`` clauses too.
        suite: gate on the clauses of this version of the suite; None is the current version.
        areas: only these areas.
        require_areas: areas that the target must claim.
        clauses: only the cases of these clauses.
        imports: modules to import before the target, such as one that registers a device.
        device: the device of the cases; None is the first one that the implementation supports.
        dtypes: only these dtypes.
        limit: seconds that one case may take: CPU time, and time in which all its processes sleep.
        workers: number of processes; None is the number of processors plus one, at most 9.
        nproc: number of ranks of the cases that start ranks.
        exitfirst: stop at the first failing case. The result is then partial: it has no verdict, and its
            option ``stopped_at`` is the name of that case.
    """

    level: str = "should"
    suite: str | None = None
    areas: tuple[str, ...] = ()
    require_areas: tuple[str, ...] = ()
    clauses: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    device: str | None = None
    dtypes: tuple[str, ...] = ()
    limit: float = 30.0
    workers: int | None = None
    nproc: int = 2
    exitfirst: bool = False


def smoke(
    target: str, options: Options = Options(), seconds: float = IMPORT_LIMIT, path: Sequence[str] = ()
) -> dict[str, Any]:
    """Find, import and build a target in a process of its own.

    Raises:
        RunError: the target cannot be found, imported or built; the message is one line.
    """
    with scratch_folder() as folder, Processes(folder, path) as processes:
        return _examine(target, options, seconds, processes)


def declared(
    target: str, options: Options = Options(), path: Sequence[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the report of the smoke stage, and the inputs of each selected case by name.

    Raises:
        RunError: the target failed the smoke stage, or the cases cannot be collected.
    """
    limit = max(IMPORT_LIMIT, options.limit)
    with scratch_folder() as folder, Processes(folder, path, options.limit) as processes:
        examined = _examine(target, options, limit, processes, lambda _: _collect(target, options, processes))
        try:
            return examined, processes.declared()
        except ProcessError as error:
            raise RunError(f"the suite could not be collected: {error}") from error


def _examine(
    target: str,
    options: Options,
    seconds: float,
    processes: Processes,
    collect: Callable[[Sequence[str]], None] = lambda areas: None,
) -> dict[str, Any]:
    """Return the report of the smoke stage; call `collect` with the claimed areas while the stage goes on."""
    channel = Channel()
    request = {
        "target": target,
        "imports": options.imports,
        "device": options.device,
        "dtypes": options.dtypes,
        "seconds": max(COMPILATION_LIMIT, seconds * BACKSTOP) + 5,
    }
    try:
        process = processes.start("keyedopt.conformance.targets.smoke", [json.dumps(request)], channel.theirs)
        try:
            messages: list[dict[str, Any]] = []
            clock, limit = Clock([process.pid]), seconds
            ended = False
            while not ended:
                ended = process.wait(0.2 if messages else 0.02)
                if not messages and (messages := list(channel.messages())):
                    if not {"areas", "problem"} & messages[0].keys():
                        raise ValueError(FORGED)
                    if "areas" in messages[0]:
                        collect(messages[0]["areas"])
                if limit < COMPILATION_LIMIT and compiles(process.pid):
                    limit = COMPILATION_LIMIT
                if not ended and clock.reached(limit):
                    raise RunError(f"{target} was not imported and built within {limit:g} s{RAISE}")
            examined = next((one for one in (*messages, *channel.messages()) if "problem" in one), None)
            if examined is None and process.code == CLOSED:
                raise RunError(f"{target} {CLOSES} when it was imported or built: it may close only its own")
            if examined is None:
                raise RunError(
                    f"{target} ended the interpreter when it was imported or built "
                    f"({process.ending()}): {process.last_words()}"
                )
        finally:
            process.stop()
    except (ProcessError, ValueError) as error:
        raise RunError(f"{target} could not be imported and built: {error}") from error
    finally:
        channel.close()
    if examined["problem"]:
        raise RunError(examined["problem"])
    return examined


def run(
    target: str,
    options: Options = Options(),
    *,
    output: Path | None = None,
    path: Sequence[str] = (),
    progress: Callable[[Case, int], None] = lambda case, total: None,
    expected: Collection[str] = (),
) -> Result:
    """Run the suite on a target and return the result: complete, interrupted or stopped early.

    Args:
        target: as on the command line.
        options: which cases to run.
        output: the file that the caller writes the result to; until then a journal is kept beside it.
        path: folders that are appended to `sys.path`.
        progress: called with each finished case and the number of all cases.
        expected: names of cases whose failure does not stop a run with ``exitfirst``.

    Raises:
        RunError: the target failed the smoke stage, or the workers could not run cases.
    """
    began = time.monotonic()
    version = spec.version_key(options.suite or spec.SUITE_VERSION)
    kept = {clause.id for clause in spec.clauses().values() if spec.version_key(clause.since) <= version}
    ended: dict[str, Case] = {}
    complete = False
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        processes = stack.enter_context(Processes(folder, path, options.limit))
        if not case_sources.modules(options.areas, options.clauses):
            raise RunError("no case of the suite is selected by these options")
        import_limit = max(IMPORT_LIMIT, options.limit)
        areas: list[str] = []  # those whose cases are collected

        def collect(claimed: Sequence[str]) -> None:
            found = tuple(area for area in options.areas or claimed if area in claimed)
            if found and case_sources.modules(found, options.clauses):
                areas.extend(found)
                _collect(target, dataclasses.replace(options, areas=found), processes)

        examined = _examine(target, options, import_limit, processes, collect)
        head = Result(
            implementation=examined["implementation"],
            environment=examined["environment"],
            suite={"version": spec.SUITE_VERSION, "hash": spec.suite_hash()},
            options={**json.loads(json.dumps(dataclasses.asdict(options))), "seed": 0},
            started=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
            seconds=0.0,
            complete=False,
            cases=(),
        )
        journal = stack.enter_context(Journal(output, head)) if output else None
        try:
            limit = max(options.limit, COMPILING_CASE_LIMIT) if examined["compiles"] else options.limit
            number = options.workers or min(len(os.sched_getaffinity(0)) + 1, MOST_WORKERS)
            together = "TORCHELASTIC_RUN_ID" in os.environ
            if together:
                number, limit = 1, limit + _meet(target, limit)  # all processes run the cases in one order
            workers = Workers(target, limit, import_limit, processes, again=0 if together else MOST_AGAIN)
            cases = contextlib.closing(_every_case(workers, number))
            for record in stack.enter_context(cases) if areas else ():
                case = case_from(record)
                case = dataclasses.replace(case, clauses=tuple(i for i in case.clauses if i in kept))
                if case.clauses:
                    ended[case.case] = case
                    if journal:
                        journal.add(case)
                    progress(case, len(workers.collected))
                    if options.exitfirst and case.outcome in FAILING and case.case not in expected:
                        head = dataclasses.replace(head, options={**head.options, "stopped_at": case.case})
                        break
            else:
                complete = True
        except KeyboardInterrupt:
            pass
        except (WorkersError, ProcessError) as error:
            raise RunError(f"the suite could not be run on {target}: {error}") from error
    return dataclasses.replace(
        head,
        seconds=round(time.monotonic() - began, 2),
        complete=complete,
        cases=tuple(case for _, case in sorted(ended.items())),
    )


def _meet(target: str, limit: float) -> float:
    """Wait for the other processes of torchrun; return the seconds that they may wait before a case.

    The time limit of a case raises both.

    Raises:
        RunError: a process has ended, or does not come.
    """
    from keyedopt.conformance.suite.support import torchrun

    if absent := torchrun.meet(f"check {target}", max(torchrun.LONG_PATIENCE, limit)):
        raise RunError(absent)
    return max(torchrun.PATIENCE, limit)


def _collect(target: str, options: Options, processes: Processes) -> None:
    """Begin to collect the cases, in the fork server."""
    processes.collect([*pytest_arguments(target, options, processes.folder), "--keyedopt-defer"])


def _every_case(workers: Workers, number: int) -> Generator[dict[str, Any]]:
    """Yield the record of each case. A collected case without a record is an error."""
    ran = set()
    with contextlib.closing(workers.run(number)) as found:
        for record in found:
            ran.add(record["case"])
            yield record
    if not workers.collected:
        raise WorkersError("no case was collected")
    for name, head in workers.collected.items():
        if name not in ran:
            end = "it was not run to its end"
            yield {**head, "outcome": "error", "expected": "the case to end", "seen": end}


def pytest_arguments(target: str, options: Options, folder: Path) -> list[str]:
    """Return pytest's command line, which ignores settings and plugins of the environment."""
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    arguments = ["-c", str(folder / "pytest.ini"), "--rootdir", str(folder), "--noconftest"]
    arguments += ["-q", "-s", "--tb=native", "--no-summary", "-W", "ignore", "--assert=plain"]
    arguments += ["-p", "keyedopt.conformance.run.plugin"]
    # cases do not need these; `logging` visits every logger of torch six times per case
    unused = ("faulthandler", "cacheprovider", "logging", "unraisableexception", "threadexception")
    for builtin in unused:
        arguments += ["-p", f"no:{builtin}"]
    modules = case_sources.modules(options.areas, options.clauses)
    arguments += ["--implementation", target, "--pyargs", *modules]
    arguments += ["--keyedopt-nproc", str(options.nproc)]
    if options.device:
        arguments += ["--keyedopt-device", options.device]
    for name, values in (
        ("--keyedopt-import", options.imports),
        ("--keyedopt-area", options.areas),
        ("--keyedopt-clause", options.clauses),
        ("--keyedopt-dtype", options.dtypes),
    ):
        arguments += [part for value in values for part in (name, value)]
    return arguments


def known_names(names: Sequence[str], known: Sequence[str], what: str) -> None:
    """Check that each name is known.

    Raises:
        RunError: a name is unknown; the message lists the known names.
    """
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            there_are = (
                f"there are: {', '.join(known)}" if len(known) <= 50 else f"see `keyedopt list {what}s`"
            )
            raise RunError(f"there is no {what} {name!r}; {there_are}{near}")
