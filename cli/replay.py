"""``keyedopt replay``: write a case of a result as a script that runs without keyedopt.

The result file may be forged. The command line decides which code runs: the case must be one of the suite,
and the names of the implementation are those of a target that is registered or given with ``--target``.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from keyedopt.cli.explain import padded
from keyedopt.cli.last import remembered
from keyedopt.conformance import spec
from keyedopt.conformance.findings import findings
from keyedopt.conformance.results import model
from keyedopt.conformance.results.errors import did_you_mean
from keyedopt.conformance.results.model import Case, Result
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.results.verdict import FAILING, cases_of, shown
from keyedopt.conformance.run import replay, replay_all, runner
from keyedopt.conformance.run.replay import Declared, ReplayError
from keyedopt.conformance.targets.find import registered

#: A failure is the recorded one if it begins with this many characters of what was seen.
ALIKE = 30


@dataclass(frozen=True)
class Asked:
    """The arguments of the command line; `target` and `imports` are trusted, the file `path` is not."""

    path: Path
    case: str | None
    output: Path | None = None
    run: bool = False
    target: str | None = None
    imports: tuple[str, ...] = ()
    limit: float = 30.0


def result_and_case(first: str | None, case: str | None) -> tuple[Path, str | None]:
    """Return the result file and the case of a command line, which may name only a case of the last check.

    Raises:
        ReplayError: the file is missing.
        ResultError: no check is remembered.
    """
    missing = first is None or not Path(first).exists()
    if first is None or (missing and case is None and not first.endswith((".json", ".journal"))):
        return remembered(), first
    if missing:
        raise ReplayError(f"there is no file {first}: name a result that `keyedopt check --output` wrote")
    return Path(first), case


def choose(run: Result, name: str) -> Case | None:
    """Return the case that ``CLAUSE``, ``CLAUSE[n]`` or the name of a case selects.

    ``CLAUSE[n]`` is the n-th case of the clause, from 1; ``CLAUSE`` its first failing one, else its first
    known failure, else its first.
    """
    exact = [case for case in run.cases if case.case == name]
    if exact:
        return exact[0]
    match = re.fullmatch(r"([A-Za-z_]+-\d+)(?:\[(\d{1,9})\])?", name)
    cases = cases_of(run, match[1].upper()) if match else []
    if not match or not cases:
        return None
    if match[2]:
        number = int(match[2])
        return cases[number - 1] if 1 <= number <= len(cases) else None
    order = [*_with(cases, FAILING), *_with(cases, ("known",)), *cases]
    return order[0]


def _with(cases: Sequence[Case], outcomes: Sequence[str]) -> list[Case]:
    return [case for case in cases if case.outcome in outcomes]


def replay_case(asked: Asked, fail: Callable[[str], NoReturn]) -> int:
    """Write the script of a case to a file, or print it, or run it; return 0, or 1 if it ran and fails."""
    if asked.output is not None:
        model.refuse_unwritable(asked.output)
    found = model.read(asked.path, partial=True)
    if asked.case is None:
        return _replay_all(found, asked)
    case = choose(found, asked.case)
    if case is None:
        names = {name for one in found.cases for name in (one.case, *one.clauses)}
        near = padded(asked.case)
        hint = f"; did you mean {near}?" if near in names else did_you_mean(asked.case, names)
        fail(
            f"{asked.path} has no case {asked.case!r}: give a clause as CLAUSE or CLAUSE[n], or the name of "
            f"a case{hint}"
        )
    target, examined, declared = _trusted(found, [case], asked)
    _say_more(found, case, target)
    text = _script(found, case, examined, declared, asked)
    if asked.output is not None:
        model.write_atomically(asked.output, text)
        print(f"written: {asked.output}" if asked.run else f"written: {asked.output}; run it with python")
        sys.stdout.flush()
    elif not asked.run:
        print(text, end="")
    return _run(text) if asked.run else 0


def _clauses_of(case: Case) -> list[str]:
    """Return the clauses of a case: those of its source, and the one that it tests in its situation."""
    tested = [clause for clause in case.clauses if clause in spec.clauses()]
    return list(dict.fromkeys([*tested, *replay.source_of(case.case).clauses]))


def _trusted(
    found: Result, cases: Sequence[Case], asked: Asked
) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the target, the report of its smoke stage, and what the suite declares of the cases.

    Raises:
        ReplayError: the target of the file, or a module that it was run with, is not named by the user.
        RunError: the target cannot be imported and built.
    """
    clauses = {clause for case in cases for clause in _clauses_of(case)}
    target = asked.target or found.implementation["target"]
    if asked.target is None and target not in registered():
        raise ReplayError(
            f"{asked.path} is a result of {one_line(target, 100)}, which is not registered; a result cannot "
            "choose what is imported: name the implementation with --target"
        )
    lacking = [name for name in found.options.get("imports") or () if name not in asked.imports]
    if lacking:
        raise ReplayError(f"the run imported {one_line(str(lacking[0]), 100)} first: name it with --import")
    options = runner.Options(
        clauses=tuple(sorted(clauses)),
        imports=asked.imports,
        device=found.environment["device"],
        limit=asked.limit,
    )
    return (target, *runner.declared(target, options, path=[os.getcwd()]))


def _script(
    found: Result, case: Case, examined: dict[str, Any], declared: dict[str, Any], asked: Asked
) -> str:
    if case.case not in declared:
        raise ReplayError(
            f"the suite has no case {one_line(case.case, 200)}; the result is of another version"
        )
    said = declared[case.case]
    inputs = Declared(said["inputs"], tuple(said["drawn"])).check(case)
    target = examined["implementation"]
    about = target["places"], asked.imports, target["adapter"]
    return replay.script(found, case, inputs, *about, asked.limit)


def _say_more(found: Result, case: Case, target: str) -> None:
    """Print, on stderr, a shorter reproducer if there is one, the outcome, and the other failing cases."""
    clauses = _clauses_of(case)
    lines = [
        f"a shorter reproducer of {', '.join(set(clauses) & set(finding.clauses))}: keyedopt findings "
        f"{finding.path.stem} ({finding.path})"
        for finding in findings()
        if finding.library == target and set(clauses) & set(finding.clauses)
    ]
    alike = [other for clause in clauses for other in cases_of(found, clause)]
    bad = list(dict.fromkeys(other.case for other in _with(alike, (*FAILING, "known"))))
    if case.case not in bad:
        lines.append(f"{case.case} did not fail in this result ({shown(case)})")
    others = [name for name in bad if name != case.case]
    if others:
        lines.append(f"replayed: {case.case}; {len(others)} more failed: {', '.join(others)}")
    for line in lines:
        sys.stderr.write(f"keyedopt: {one_line(line)}\n")


def _replay_all(found: Result, asked: Asked) -> int:
    """Replay every failing and known case; return 1 if one of them does not fail again as recorded."""
    cases = _with(found.cases, (*FAILING, "known"))
    if not cases:
        print("no case of this result failed")
        return 0
    _, examined, declared = _trusted(found, cases, asked)
    bad = 0
    outcomes = {case.case: case.seen for case in cases if case.outcome != "error"}
    scripts = {case.case: _script(found, case, examined, declared, asked) for case in cases}
    modules = {place.partition(":")[0] for place in examined["implementation"]["places"].values()}
    for name, failed, said in replay_all.run(scripts, (*asked.imports, *sorted(modules)), asked.limit):
        if not failed or _plain(outcomes.get(name, ""))[:ALIKE] not in _plain(said):
            bad += 1
            print(one_line(f"not repeated: {name}: {said}"))
    print(f"{len(cases) - bad} of {len(cases)} failing and known cases fail again, with what was seen")
    return 1 if bad else 0


def _plain(text: str) -> str:
    """Return a text without numbers, which may be addresses, and on one line."""
    return re.sub(r"\d+", "0", one_line(text))


def _run(text: str) -> int:
    """Run a script; like ``keyedopt check``, it imports modules from the current folder last."""
    with tempfile.TemporaryDirectory(prefix="keyedopt-") as folder:
        script = Path(folder) / "again.py"
        script.write_text(text, encoding="utf-8")
        places = [*filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(places)}
        return 1 if subprocess.run([sys.executable, script], env=environment, check=False).returncode else 0
