"""``keyedopt check``: run, apply expectations, write, show, and choose the exit code."""

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from keyedopt.cli.summary import show
from keyedopt.conformance import expectations, formats, result, runner, spec
from keyedopt.conformance.verdict import judge
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    targets: tuple[str, ...]
    level: str
    suite: str | None
    areas: tuple[str, ...]
    require_areas: tuple[str, ...]
    device: str | None
    dtypes: tuple[str, ...]
    outputs: tuple[str, ...]
    expectations: str | None
    update: bool
    limit: float
    workers: int | None


class InputError(Exception):
    """Something on the command line is wrong; the message says what and what to do."""


def check_targets(request: Request, fail: Callable[[str], NoReturn]) -> int:
    """Check each target in turn; return 0 if every gate is green, 1 if one is not, 2 on bad input."""
    try:
        _validate(request)
    except (InputError, runner.RunError, expectations.ExpectationsError) as error:
        fail(str(error))
    signal.signal(signal.SIGTERM, _interrupt)
    worst = 0
    for target in request.targets:
        try:
            code = _check(target, request)
        except (
            InputError,
            runner.RunError,
            result.ResultError,
            expectations.ExpectationsError,
            OSError,
        ) as error:
            sys.stderr.write(f"keyedopt: {' '.join(str(error).split())}\n")
            code = 2
        except KeyboardInterrupt:
            fail("interrupted before a case had run; nothing was written")
        worst = max(worst, code)
        if code == 2 and not sys.stderr.isatty():
            continue
    return worst


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _validate(request: Request) -> None:
    runner.known_names(request.areas, list(spec.areas()), "area")
    runner.known_names(request.require_areas, list(spec.areas()), "area")
    names = ("float64", "float32", "bfloat16", "float16")
    runner.known_names(request.dtypes, names, "dtype")
    if request.suite is not None:
        versions = sorted({clause.since for clause in spec.clauses().values()}, key=spec.version_key)
        runner.known_names([request.suite], versions, "version of the suite")
    for output in request.outputs:
        if len(request.targets) > 1 and Path(output).suffix:
            raise InputError(
                f"--output {output} is one file for {len(request.targets)} targets: give a folder"
            )
        if len(request.targets) == 1 and Path(output).suffix not in formats.FORMATS:
            raise InputError(f"--output {output}: the name has to end in {', '.join(formats.FORMATS)}")
    if request.update and request.expectations is None:
        raise InputError("--update-expectations rewrites a file: name it with --expectations FILE")
    if request.expectations is not None:
        if len(request.targets) > 1:
            raise InputError("--expectations is a list for one target: check the targets one by one")
        if not (request.update and not Path(request.expectations).exists()):
            expectations.read(expectations.find(request.expectations))


def _outputs(request: Request, target: str) -> list[Path]:
    if len(request.targets) == 1:
        return [Path(output) for output in request.outputs]
    return [Path(output) / f"{target.replace(':', '.')}.json" for output in request.outputs]


def _check(target: str, request: Request) -> int:
    outputs = _outputs(request, target)
    options = runner.Options(
        level=request.level,
        suite=request.suite,
        areas=request.areas,
        require_areas=request.require_areas,
        device=request.device,
        dtypes=request.dtypes,
        limit=request.limit,
        workers=request.workers,
    )
    journal = next((path for path in outputs if path.suffix == ".json"), None)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as bar:
        task = bar.add_task(f"checking {target}", total=None)
        run = runner.run(
            target,
            options,
            output=journal,
            progress=lambda _, total: bar.update(task, advance=1, total=total),
        )
    if request.expectations is not None and run.complete:
        path = (
            Path(request.expectations)
            if request.update and not Path(request.expectations).exists()
            else expectations.find(request.expectations)
        )
        if request.update:
            expectations.update(path, run)
            sys.stderr.write(f"keyedopt: rewrote {path}; fill in what is to be explained\n")
        run = expectations.apply(run, expectations.read(path), path)
    written = [formats.write(run, path) for path in outputs]
    verdict = judge(run)
    show(run, verdict)
    for path in written:
        print(f"written: {path}")
    if not run.complete:
        sys.stderr.write("keyedopt: interrupted; what is shown and written is partial\n")
        return 2
    return 0 if verdict.green else 1
