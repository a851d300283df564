"""``keyedopt check``: run the suite, apply expectations, show and write the result."""

import contextlib
import functools
import math
import os
import re
import socket
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from keyedopt.cli import machine
from keyedopt.cli.interrupts import interruptible
from keyedopt.cli.last import remember
from keyedopt.cli.progress import progress
from keyedopt.cli.summary import failure_lines, next_steps, replay_command, show, show_all, show_gate
from keyedopt.cli.verify import sign as sign_file
from keyedopt.conformance import expectations, spec
from keyedopt.conformance.results import model
from keyedopt.conformance.results.errors import KeyedoptError
from keyedopt.conformance.results.output import FORMATS, write
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.results.verdict import FAILING, Verdict, judge
from keyedopt.conformance.run import runner
from keyedopt.conformance.suite.support.clock import RAISE
from keyedopt.conformance.targets.implementation import DTYPES


@dataclass(frozen=True)
class Request:
    """The arguments of the command line."""

    targets: tuple[str, ...]
    outputs: tuple[Path, ...]
    expectations: str | None
    update: bool
    options: runner.Options
    like: str | None = None
    verbose: bool = False
    sign: Path | None = None
    remember: bool = True

    def files(self, target: str) -> list[Path]:
        """Return the files to write for a target; with several targets, outputs are folders."""
        if len(self.targets) == 1:
            return list(self.outputs)
        return [folder / f"{target.replace(':', '.')}.json" for folder in self.outputs]


class InputError(KeyedoptError):
    """An argument is wrong; the message says what to do."""


#: What torchrun sets for each of its processes.
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
#: Seconds that the agent of torchrun may take to answer.
PATIENCE = 60.0
#: Errors that give exit code 2, and one line that says what to do.
PROBLEMS = (KeyedoptError, OSError)


def check_targets(
    targets: list[str],
    outputs: list[str],
    known: str | None,
    update: bool,
    options: dict[str, Any],
    like: str | None = None,
    verbose: bool = False,
    sign: Path | None = None,
    as_json: bool = False,
) -> int:
    """Check each target in turn; return 0 if every gate is green, 1 if one is not, 2 on bad input.

    With `as_json` stdout gets the verdicts as JSON, and stderr what is printed otherwise.

    Under torchrun the first rank writes files and shows the verdict, and all ranks return the same number.
    """
    request = Request(
        tuple(targets),
        tuple(map(Path, outputs)),
        known,
        update,
        runner.Options(**options),
        like,
        verbose,
        sign,
    )
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return _check_all(request, as_json)
    _find_torchrun(max(PATIENCE, request.options.limit))
    from keyedopt.conformance.suite.support.torchrun import largest_code, this_process

    silent = this_process() > 0
    if silent:
        request = replace(request, outputs=(), update=False, sign=None, remember=False)
    try:
        with contextlib.redirect_stdout(None) if silent else contextlib.nullcontext():
            code = _check_all(request, as_json)
    except PROBLEMS as error:
        _say(str(error))
        code = 2
    return largest_code(code, request.options.limit)


def _find_torchrun(seconds: float) -> None:
    """Raise InputError unless torchrun has started this process, and its agent answers in time."""
    start = "start it with torchrun, or unset TORCHELASTIC_RUN_ID"
    missing = [name for name in OF_TORCHRUN if name not in os.environ]
    if missing:
        raise InputError(
            f"TORCHELASTIC_RUN_ID is set, as torchrun does, but {', '.join(missing)} not: {start}"
        )
    for name in OF_TORCHRUN:
        if name != "MASTER_ADDR" and not re.fullmatch(r"\d{1,9}", os.environ[name]):
            raise InputError(f"{name} must be a number, not {os.environ[name]!r}: {start}")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    try:
        socket.create_connection((address, port), timeout=seconds).close()
    except (OSError, OverflowError) as error:
        more = RAISE if isinstance(error, TimeoutError) else ""
        raise InputError(
            f"no agent of torchrun answers at {address}:{port} ({error}): {start}{more}"
        ) from error


def _check_all(request: Request, as_json: bool) -> int:
    try:
        _validate(request)
    except PROBLEMS as error:
        if as_json:
            machine.print_json(exit=2, problem=one_line(str(error)), targets=[])
        raise
    worst = 0
    judged: dict[str, tuple[model.Result, Verdict] | str] = {}
    with interruptible(), contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        for target in request.targets:
            try:
                worst = max(worst, _check(target, request, judged))
            except PROBLEMS as error:
                _say(str(error))
                judged[target] = str(error)
                worst = 2
            except KeyboardInterrupt:
                judged[target] = why = "interrupted; nothing more was written"
                _say(why)
                worst = 2
                break
        if len(judged) > 1:
            show_all(judged, worst)
    if as_json:
        machine.print_json(exit=worst, targets=[machine.checked(*each) for each in judged.items()])
    return worst


def _say(message: str) -> None:
    sys.stderr.write(f"keyedopt: {one_line(message)}\n")


def _validate(request: Request) -> None:
    options = request.options
    runner.known_names((*options.areas, *options.require_areas), list(spec.areas()), "area")
    for target in request.targets:
        if target in spec.clauses():
            raise InputError(f"{target} is a clause, not a target: give a target, and --clause {target}")
    runner.known_names(options.clauses, list(spec.clauses()), "clause")
    for clause in options.clauses:
        if options.areas and (area := spec.clauses()[clause].area) not in options.areas:
            raise InputError(f"{clause} is a clause of the area {area}, which --area leaves out")
    runner.known_names(options.dtypes, DTYPES, "dtype")
    versions = sorted({clause.since for clause in spec.clauses().values()}, key=spec.version_key)
    runner.known_names([options.suite] if options.suite is not None else [], versions, "version of the suite")
    if not math.isfinite(options.limit):
        raise InputError("--time-limit is a number of seconds")
    several = len(request.targets) > 1
    for output in request.outputs:
        if several and output.suffix in FORMATS:
            raise InputError(f"--output {output} is one file for several targets: give a folder")
        if not several and output.suffix not in FORMATS:
            raise InputError(f"--output {output}: the name has to end in {', '.join(FORMATS)}")
    for path in (path for target in request.targets for path in request.files(target)):
        model.refuse_unwritable(path)
    if request.sign is not None and (
        request.like is not None or not (several or any(each.suffix == ".json" for each in request.outputs))
    ):
        raise InputError("--sign signs the result of a check: give --output FILE.json, and no --like")
    if options.exitfirst and (request.like is not None or request.update):
        raise InputError("-x stops early: it goes neither with --like nor with --update-expectations")
    if request.like is not None and (several or request.expectations is not None):
        raise InputError("--like compares one target with another one, and takes no --expectations")
    if request.expectations is None:
        if request.update:
            raise InputError("--update-expectations rewrites a file: name it with --expectations FILE")
        return
    if several:
        raise InputError("--expectations is a list for one target: check the targets one by one")
    path = expectations.find(request.expectations, new=request.update)
    if path.exists():
        expectations.read(path)
    if request.update:
        model.refuse_unwritable(path)


def run(
    target: str, options: runner.Options, outputs: Sequence[Path] = (), expected: Collection[str] = ()
) -> model.Result:
    """Run the suite on a target, with a progress bar on a terminal."""
    text, done = f"checking {target}", 0
    with progress(text) as step:

        def ended(_: model.Case, total: int) -> None:
            nonlocal done
            done += 1
            step(text, done, total)

        return runner.run(
            target,
            options,
            output=next((path for path in outputs if path.suffix == ".json"), None),
            progress=ended,
            expected=expected,
        )


def _check(target: str, request: Request, judged: dict[str, tuple[model.Result, Verdict] | str]) -> int:
    """Check a target, and add its result and verdict to `judged`; return the exit code."""
    if request.like is not None:
        return check_like(target, request, judged)
    outputs = request.files(target)
    again = functools.partial(replay_command, target=target, imports=request.options.imports)
    expected = _expected(request)
    found = run(target, request.options, outputs, expected)
    if request.options.exitfirst and not found.complete:
        failed = [case for case in found.cases if case.outcome in FAILING and case.case not in expected]
        if failed:  # or else it was interrupted
            remember(found)
            judged[target] = "stopped at the first failing case"
            return _show_first(found, failed, request, outputs, again)
    if request.expectations is not None and found.complete:
        path = expectations.find(request.expectations, new=request.update)
        if request.update:
            count = expectations.update(path, found)
            _say(f"rewrote {path}; new entries: {count}")
        known = expectations.read(path)
        unexplained = sum(entry.reason.startswith(expectations.UNEXPLAINED) for entry in known)
        if unexplained:
            _say(f"{path}: entries to be explained: {unexplained}")
        found = expectations.apply(found, known, path)
    verdict = judge(found)
    judged[target] = (found, verdict)
    if request.remember and found.complete:
        remember(found)
    written = next((str(output) for output in outputs if output.suffix == ".json"), None)
    of_file = functools.partial(again, written=written)
    alone = len(request.targets) == 1  # or else a later target is the last check
    of_last = again if alone and request.remember and found.complete else of_file
    show(found, verdict, request.verbose, of_last)
    return _end(found, verdict, request, outputs, next_steps(verdict, of_file))


def _end(
    found: model.Result,
    verdict: Verdict,
    request: Request,
    outputs: Sequence[Path],
    lines: Sequence[str] = (),
) -> int:
    """Write and sign the result, and print lines; print the gate last, with the exit code; return that."""
    code = 2  # if the files cannot be written, or the run was interrupted
    try:
        _write(found, outputs)
        if request.sign is not None and found.complete:
            for output in (each for each in outputs if each.suffix == ".json"):
                print(f"signed: {sign_file(output, request.sign)}")
        for line in lines:
            print(line)
        code = 0 if verdict.green else 1
    finally:
        show_gate(found, verdict, code if len(request.targets) == 1 else None)
    return code


def _expected(request: Request) -> set[str]:
    """Return the cases whose failure is known, and so does not stop a run with -x."""
    if request.expectations is None or not request.options.exitfirst:
        return set()
    known = expectations.read(expectations.find(request.expectations))
    return {name for entry in known for name in entry.cases}


def _show_first(
    found: model.Result,
    failed: Sequence[model.Case],
    request: Request,
    outputs: Sequence[Path],
    again: Callable[[str], str],
) -> int:
    """Show the failing clauses of a run that was stopped, write its partial result, and return 1."""
    for clause in dict.fromkeys(each for case in failed for each in case.clauses):
        print("\n".join(failure_lines(found, clause, again(clause))))
    return _end(found, judge(found), request, outputs)


def _write(found: model.Result, outputs: Sequence[Path]) -> None:
    """Write the result, also of an interrupted run, and then raise KeyboardInterrupt for that."""
    for output in outputs:
        print(f"written: {write(found, output)}")
    if not found.complete and "stopped_at" not in found.options:
        raise KeyboardInterrupt


def check_like(target: str, request: Request, judged: dict[str, tuple[model.Result, Verdict] | str]) -> int:
    """Check a target and the one that it is compared with; return 0 if they behave alike, else 1."""
    from keyedopt.cli.like import likeness

    outputs = request.files(target)
    model = run(str(request.like), request.options)
    if not model.complete:
        raise KeyboardInterrupt
    found = run(target, request.options, outputs)
    _write(found, outputs)
    text, same = likeness(model, found)
    print(text, end="")
    judged[target] = f"it {'behaves' if same else 'does not behave'} like {request.like}"
    return 0 if same else 1
