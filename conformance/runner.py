"""Runs the suite on one implementation: smoke stage, worker processes, records, result.

The cases run in processes started by pytest-xdist, so that an implementation that crashes, hangs or
ends the interpreter costs one case. This process only starts them and reads their records.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from keyedopt.conformance import spec
from keyedopt.conformance.result import Case, Journal, Result, case_from

#: Seconds within which the smoke stage, an import included, has to end.
SMOKE_LIMIT = 180.0


class RunError(Exception):
    """The suite could not be run on a target; the message says what to do."""


@dataclass(frozen=True)
class Options:
    """What to run, and how it is judged.

    Args:
        level: the gate covers ``must`` clauses alone, or ``should`` clauses too.
        suite: gate on the clauses of this version of the suite; None is the present one.
        areas: only these areas.
        require_areas: areas that have to be claimed.
        clauses: only the cases of these clauses.
        device: None is the first that the implementation supports.
        dtypes: only these dtypes.
        limit: seconds that one case may take.
        workers: processes; None is one a processor, at most 8.
    """

    level: str = "should"
    suite: str | None = None
    areas: tuple[str, ...] = ()
    require_areas: tuple[str, ...] = ()
    clauses: tuple[str, ...] = ()
    device: str | None = None
    dtypes: tuple[str, ...] = ()
    limit: float = 30.0
    workers: int | None = None


def _environment() -> dict[str, str]:
    """Return an environment in which only our plugins load, and modules of the present folder too."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([*filter(None, [environment.get("PYTHONPATH")]), os.getcwd()])
    environment.setdefault("OMP_NUM_THREADS", "1")  # a worker a processor; more threads only wait
    return environment


def smoke(target: str, device: str | None = None) -> dict[str, Any]:
    """Find, import and build a target in a process of its own.

    Raises:
        RunError: it cannot be found, imported or built; the message is one line.
    """
    with tempfile.TemporaryDirectory(prefix="keyedopt-") as folder:
        report = Path(folder) / "smoke.json"
        command = [sys.executable, "-m", "keyedopt.conformance.smoke", target, str(report)]
        try:
            process = subprocess.run(
                [*command, *([device] if device else [])],
                env=_environment(),
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SMOKE_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RunError(f"{target} was not imported and built within {SMOKE_LIMIT:g} s") from error
        if not report.exists():
            said = (process.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise RunError(
                f"{target} ended the interpreter when it was imported or built "
                f"({_ending(process.returncode)}): {said}"
            )
        examined: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    if examined["problem"]:
        raise RunError(examined["problem"])
    return examined


def _ending(code: int) -> str:
    """Say how a process ended."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"


def run(
    target: str,
    options: Options = Options(),
    *,
    output: Path | None = None,
    progress: Callable[[Case, int | None], None] = lambda case, total: None,
) -> Result:
    """Run the suite on a target and return the result, complete or interrupted.

    Args:
        target: as on the command line.
        options: what to run.
        output: the file that the result will be written to; a journal stands beside it meanwhile.
        progress: called with each case that ended, and how many there are, once that is known.

    Raises:
        RunError: the target failed the smoke stage, or the run broke down.
    """
    examined = smoke(target, options.device)
    began = time.monotonic()
    head = Result(
        implementation=examined["implementation"],
        environment=examined["environment"],
        suite={"version": spec.SUITE_VERSION, "hash": spec.suite_hash()},
        options={**dataclasses.asdict(options), "seed": 0},
        started=datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        seconds=0.0,
        complete=False,
        cases=(),
    )
    head = dataclasses.replace(head, **json.loads(json.dumps({"options": head.options})))
    journal = Journal(output, head) if output else None
    cases: dict[str, Case] = {}
    complete = True
    with tempfile.TemporaryDirectory(prefix="keyedopt-") as name:
        folder = Path(name)
        try:
            for case, total in _cases(target, options, folder):
                cases[case.case] = case
                if journal:
                    journal.add([case])
                progress(case, total)
        except KeyboardInterrupt:
            complete = False
        if complete:
            for case in _never_ran(folder, cases):
                cases[case.case] = case
    version = spec.version_key(options.suite or spec.SUITE_VERSION)
    kept = {clause.id for clause in spec.clauses().values() if spec.version_key(clause.since) <= version}
    selected = [
        dataclasses.replace(case, clauses=tuple(clause for clause in case.clauses if clause in kept))
        for _, case in sorted(cases.items())
    ]
    result = dataclasses.replace(
        head,
        seconds=round(time.monotonic() - began, 2),
        complete=complete,
        cases=tuple(case for case in selected if case.clauses),
    )
    if journal and complete:
        journal.remove()
    return result


def _command(target: str, options: Options, folder: Path) -> list[str]:
    workers = options.workers or min(os.cpu_count() or 1, 8)
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-c", str(folder / "pytest.ini")]
    command += ["--rootdir", str(folder), "--noconftest", "-q", "--tb=no", "-W", "ignore"]
    command += ["-p", "xdist.plugin", "-p", "keyedopt.conformance.plugin"]
    command += ["-p", "no:faulthandler", "-p", "no:cacheprovider"]
    command += ["-n", str(workers), "--max-worker-restart", "1000000"]
    command += ["--pyargs", "keyedopt.conformance.suite", "--implementation", target]
    command += ["--keyedopt-records", str(folder), "--keyedopt-limit", str(options.limit)]
    if options.device:
        command += ["--keyedopt-device", options.device]
    for name, values in (
        ("--keyedopt-area", options.areas),
        ("--keyedopt-clause", options.clauses),
        ("--keyedopt-dtype", options.dtypes),
    ):
        command += [part for value in values for part in (name, value)]
    return command


def _cases(target: str, options: Options, folder: Path) -> Iterator[tuple[Case, int | None]]:
    """Start the workers and yield each case as it ends; stop them whatever happens."""
    log = folder / "pytest.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            _command(target, options, folder),
            cwd=folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches this process alone, which stops the others
        )
    records = _follow(folder / "records.jsonl", process)
    quiet = options.limit * 2 + SMOKE_LIMIT
    last = time.monotonic()
    try:
        for record in records:
            if record is None:
                if time.monotonic() - last > quiet:
                    raise RunError(f"no case ended for {quiet:g} s; the run was given up")
                continue
            last = time.monotonic()
            collected = _collected(folder)
            yield _finished(record, folder, collected), len(collected) if collected else None
    finally:
        _stop(process)
    if process.returncode not in (0, 1):
        tail = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        reason = next((line for line in reversed(tail) if line.strip()), "it printed nothing")
        raise RunError(f"the suite could not be run on {target}: {reason}")


def _follow(path: Path, process: "subprocess.Popen[bytes]") -> Iterator[dict[str, Any] | None]:
    """Yield each record that is appended to a file until the process ends; None while waiting."""
    position, rest = 0, ""
    while True:
        ended = process.poll() is not None
        if path.exists():
            with path.open(encoding="utf-8") as file:
                file.seek(position)
                rest += file.read()
                position = file.tell()
        *lines, rest = rest.split("\n")
        for line in lines:
            yield json.loads(line)
        if ended:
            return
        yield None
        time.sleep(0.05)


def _collected(folder: Path) -> dict[str, Any]:
    """Return what a worker collected: the head of each case's record, by name."""
    path = folder / "collected.json"
    with contextlib.suppress(OSError, json.JSONDecodeError):
        collected: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return collected
    return {}


def _finished(record: Mapping[str, Any], folder: Path, collected: Mapping[str, Any]) -> Case:
    """Make a case of a record; one whose process died is completed from what it left behind."""
    if "clauses" in record:
        return case_from(dict(record))
    for path in folder.glob("running-*"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        head = json.loads(lines[0]) if lines else {}
        if head.get("case") != record["case"]:
            continue
        path.unlink()
        draws = [line for line in lines[1:] if line.startswith('{"inputs"')]
        inputs = json.loads(draws[-1])["inputs"] if draws else {}
        trace = "\n".join(line for line in lines[1:] if not line.startswith('{"inputs"'))
        timed_out = "Timeout (" in trace
        return case_from(
            {
                **head,
                "outcome": "error",
                "inputs": inputs,
                "expected": "the case to end",
                "seen": "timeout: it did not end in time" if timed_out else _crash(trace),
                "trace": trace,
            }
        )
    head = collected.get(record["case"], {"case": record["case"], "clauses": ()})
    return case_from({**head, "outcome": "error", "seen": "the process died"})


def _crash(trace: str) -> str:
    fatal = next((line for line in trace.splitlines() if line.startswith("Fatal")), "")
    return f"crash: {fatal}" if fatal else "crash: the process ended (os._exit, or killed)"


def _never_ran(folder: Path, cases: Mapping[str, Case]) -> Iterator[Case]:
    """Yield a failure for each case that was collected and gave no record: silence is no pass."""
    for name, head in _collected(folder).items():
        if name not in cases:
            yield case_from({**head, "outcome": "error", "seen": "it was not run to its end"})


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=3)
            if number == signal.SIGKILL:
                return


def known_names(names: Sequence[str], known: Sequence[str], what: str) -> None:
    """Refuse a name that does not exist.

    Raises:
        RunError: names the wrong one, and the right ones.
    """
    for name in names:
        if name not in known:
            raise RunError(f"there is no {what} {name!r}; there are: {', '.join(known)}")
