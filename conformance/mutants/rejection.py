"""``keyedopt mutants [AREA | NAME]... [--base BASE]``: does the suite reject every mutant?

All mutants are planted first. Then a process collects the cases once, and forks a process for each mutant.
The cases that failed on mutants run on each base without a fault, too: a clause that fails on the base itself
does not reject its mutants.
"""

import contextlib
import dataclasses
import gc
import importlib
import io
import multiprocessing
import multiprocessing.connection
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from keyedopt.conformance import spec
from keyedopt.conformance.mutants import PACKAGES, SOUND, Mutant, MutantError, mutants, planting
from keyedopt.conformance.results.errors import did_you_mean
from keyedopt.conformance.results.verdict import FAILING
from keyedopt.conformance.run import protocol
from keyedopt.conformance.run.engine import case_name, turn
from keyedopt.conformance.run.outcomes import HEAD
from keyedopt.conformance.run.protocol import Writer
from keyedopt.conformance.run.runner import Options, pytest_arguments
from keyedopt.conformance.suite.support.scratch import scratch_folder
from keyedopt.conformance.targets.find import find
from keyedopt.conformance.targets.implementation import Implementation

#: Receives a mutant and the clauses that rejected it.
Report = Callable[[Mutant, set[str]], None]
#: Seconds that a case may take on a mutant; a fault that hangs is rejected.
LIMIT = 20.0
#: What a process of a mutant of the reference imports.
MUTANT = Implementation(name=planting.PACKAGE, root=planting.PACKAGE)


class _Forks:
    """The pytest plugin that forks a process for each mutant when the cases are collected.

    A clause that rejects a mutant needs no further case. So fast cases run first, as far as their times are
    known from other mutants.
    """

    def __init__(
        self,
        planted: Sequence[tuple[Mutant, Mapping[str, CodeType]]],
        everything: bool,
        report: Report,
        scratch: Path,
    ) -> None:
        faults = [one for one in planted if one[0].changes]
        bases = [one for one in planted if not one[0].changes]  # run last, on the cases that failed on faults
        self._waiting = [*bases, *reversed(faults)]
        self._everything = everything
        self._report = report
        self._scratch = scratch
        self._seconds: dict[str, float] = {}
        self._failed: dict[str, set[str]] = {}  # the cases that failed on the mutants of a base

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        context = multiprocessing.get_context("fork")  # of a process that has started no threads
        gc.freeze()  # objects made so far stay in memory pages that all processes share
        running: dict[int, tuple[Mutant, Path, ForkProcess]] = {}
        cases = _by_clause(session.items)
        while self._waiting or running:
            while self._waiting and len(running) < len(os.sched_getaffinity(0)):
                mutant, code = self._waiting[-1]
                if not mutant.changes and any(other.changes for other, *_ in running.values()):
                    break  # a base waits for its mutants
                self._waiting.pop()
                folder = self._scratch / mutant.name
                folder.mkdir()
                session.items[:] = self._needed(mutant, cases)
                process = context.Process(
                    target=self._run_suite, args=(mutant, code, folder, session), daemon=True
                )
                process.start()
                running[process.sentinel] = mutant, folder, process
            for sentinel in multiprocessing.connection.wait(list(running)):
                assert isinstance(sentinel, int)
                mutant, folder, process = running.pop(sentinel)
                process.join()
                failed = self._failing(folder, process)
                self._failed.setdefault(_base_name(mutant), set()).update(case["case"] for case in failed)
                self._report(mutant, {clause for case in failed for clause in case["clauses"]})
        return True

    def _needed(self, mutant: Mutant, cases: Mapping[str, Sequence[pytest.Item]]) -> list[pytest.Item]:
        """Return the cases for a mutant, fast ones first.

        They are chosen before the fork: a process that looks at all cases copies their memory pages.
        """
        clauses = cases if self._everything else judges(mutant)
        chosen = {case_name(item): item for clause in clauses for item in cases.get(clause, ())}
        if not mutant.changes:
            failed = self._failed.get(_base_name(mutant), ())
            chosen = {name: item for name, item in chosen.items() if name in failed}
        fast_first = sorted(chosen, key=lambda name: self._seconds.get(name, 0.0))
        return sorted((chosen[name] for name in fast_first), key=lambda item: turn(item) > 0)

    def _run_suite(
        self, mutant: Mutant, code: Mapping[str, CodeType], folder: Path, session: pytest.Session
    ) -> None:
        """Run cases on a mutant, in a process of its own."""
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(null, number)
        os.chdir(folder)
        if mutant.base == SOUND:
            sys.meta_path.insert(0, planting.Importer(code))
        else:
            planting.graft(mutant, code)
        engine: Any = session.config.pluginmanager.get_plugin("keyedopt-engine")
        clauses = () if self._everything else judges(mutant)
        if all(spec.clauses()[clause].accelerator for clause in judges(mutant)):
            importlib.import_module("keyedopt.conformance.pretend")
            engine.use_device("npu")
        target = MUTANT if mutant.base == SOUND else find(mutant.base)
        engine.turn_to(target, Writer(folder, LIMIT), session, clauses, mutant.dtypes)
        engine.pytest_runtestloop(session)
        os._exit(0)

    def _failing(self, folder: Path, process: ForkProcess) -> list[dict[str, Any]]:
        """Return the cases that failed in a process that has ended, and note the times of its cases."""
        pid = process.pid or 0
        reader = protocol.Reader(protocol.file_messages(folder, pid), folder / f"stack-{pid}")
        records = reader.new(last=True)
        crash = reader.crash(f"crash: exit status {process.exitcode}")
        self._seconds |= {record["case"]: record["seconds"] for record in records}
        return [case for case in (*records, *filter(None, [crash])) if case["outcome"] in FAILING]


def judges(mutant: Mutant) -> tuple[str, ...]:
    """Return the clauses that should reject a mutant; of a sound variant, all clauses of its area."""
    return mutant.rejected_by or tuple(
        clause.id
        for clause in spec.clauses().values()
        if clause.area == mutant.area and clause.level != "recorded" and not clause.accelerator
    )


def _by_clause(items: Sequence[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """Return the cases of each clause."""
    found: dict[str, list[pytest.Item]] = {}
    for item in items:
        for clause in item.stash[HEAD]["clauses"]:
            found.setdefault(clause, []).append(item)
    return found


def run(chosen: Sequence[Mutant], report: Report, everything: bool = False) -> None:
    """Check mutants, one on each processor at a time, and report the clauses that reject each.

    Raises:
        MutantError: mutants cannot be planted (the message names all of them), or cases not be collected.
    """
    planted = plant_all(chosen)
    planting.sound_code()  # compiled once, for all processes
    importlib.import_module(
        "torch._dynamo"
    )  # the first optimizer of a process imports it, which takes a second
    for base in {mutant.base for mutant in chosen} - {SOUND}:
        importlib.import_module(find(base).root)
    for name in [name for name in os.environ if name.startswith("PYTEST_")]:
        del os.environ[name]
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    clauses = () if everything else {clause for mutant in chosen for clause in judges(mutant)}
    dtypes = {dtype for mutant in chosen for dtype in mutant.dtypes}
    options = Options(clauses=tuple(sorted(clauses)), dtypes=tuple(sorted(dtypes)))
    with scratch_folder() as scratch:
        arguments = pytest_arguments(SOUND, options, scratch)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            code = pytest.main(arguments, [_Forks(planted, everything, report, scratch)])
    if code != pytest.ExitCode.OK:
        raise MutantError(f"the cases could not be collected:\n{output.getvalue()}")


def plant_all(chosen: Sequence[Mutant]) -> list[tuple[Mutant, Mapping[str, CodeType]]]:
    """Return mutants, each with the code of the modules that it changes.

    Raises:
        MutantError: mutants do not fit their bases; the message names all of them.
    """
    planted: list[tuple[Mutant, Mapping[str, CodeType]]] = []
    problems: list[str] = []
    for mutant in chosen:
        try:
            planted.append((mutant, planting.plant(mutant)))
        except MutantError as error:
            problems.append(str(error))
    if problems:
        raise MutantError("\n".join(problems))
    return planted


def survivors(chosen: Sequence[Mutant]) -> dict[str, tuple[str, ...]]:
    """Return the mutants that a clause in ``rejected_by`` did not reject, each with these clauses.

    A base that fails some of these clauses without a fault is returned too.
    """
    seen: dict[str, set[str]] = {}
    every = [*sound(chosen), *chosen]
    run(every, lambda mutant, found: seen.update({mutant.name: found}))
    silent = {mutant.name: _silent(mutant, seen) for mutant in every}
    return {name: clauses for name, clauses in silent.items() if clauses}


def sound(chosen: Sequence[Mutant]) -> list[Mutant]:
    """Return each base of mutants, other than the reference, as a mutant without a fault.

    For sound variants there is one for each area, which all clauses of the area judge.
    """
    found: dict[str, Mutant] = {}
    for mutant in (mutant for mutant in chosen if mutant.base != SOUND):
        name = _base_name(mutant)
        known = found.get(name, dataclasses.replace(mutant, name=name, changes=(), rejected_by=(), dtypes=()))
        clauses, dtypes = {*known.rejected_by, *mutant.rejected_by}, {*known.dtypes, *mutant.dtypes}
        found[name] = dataclasses.replace(known, rejected_by=tuple(clauses), dtypes=tuple(dtypes))
    return list(found.values())


def _base_name(mutant: Mutant) -> str:
    """Return the name of the base of a mutant, as a mutant without a fault."""
    return f"{mutant.base} without a fault" if mutant.rejected_by else f"{mutant.base} in {mutant.area}"


def _silent(mutant: Mutant, seen: Mapping[str, set[str]]) -> tuple[str, ...]:
    """Return the clauses that should have rejected a mutant; those that rejected a sound base or variant.

    Args:
        mutant: a mutant, a sound variant, or a base without a fault.
        seen: the clauses that failed, by the name of the mutant or base.
    """
    if not mutant.changes:
        return tuple(sorted(seen[mutant.name] & set(mutant.rejected_by)))
    found = _own(mutant, seen)
    if not mutant.rejected_by:
        return tuple(sorted(found))
    return tuple(clause for clause in mutant.rejected_by if clause not in found)


def _own(mutant: Mutant, seen: Mapping[str, set[str]]) -> set[str]:
    """Return the clauses that failed on a mutant, and not on its base."""
    return seen[mutant.name] - seen.get(_base_name(mutant), set())


def main(names: Sequence[str] = (), base: str = "", everything: bool = False) -> int:
    """Check mutants, and print a line for each, the scores, and the clauses that rejected no mutant.

    Args:
        names: areas or names of mutants; none are all.
        base: only mutants of this base.
        everything: run the whole suite on each mutant, so that every clause that rejects it counts, instead
            of only the clauses in ``rejected_by``.

    Returns:
        1 if a mutant survives, or a base fails without a fault, else 0.

    Raises:
        MutantError: a name or the base is unknown, or mutants cannot be planted.
    """
    if base not in ("", SOUND, *PACKAGES):
        near = did_you_mean(base, (SOUND, *PACKAGES))
        raise MutantError(f"there is no base {base!r}: give one of {', '.join((SOUND, *PACKAGES))}{near}")
    every = mutants().values()
    known = {name for mutant in every for name in (mutant.area, mutant.name)}
    if unknown := set(names) - known:
        near = did_you_mean(min(unknown), known)
        raise MutantError(f"there is no area or mutant {min(unknown)!r}: see {Path(__file__).parent}{near}")
    chosen = [
        mutant
        for mutant in every
        if base in ("", mutant.base) and (not names or {mutant.area, mutant.name} & set(names))
    ]
    proven: set[str] = set()
    failed: list[Mutant] = []
    output = sys.stdout

    seen: dict[str, set[str]] = {}
    waiting: list[Mutant] = []  # for their base, with which they are compared

    def report(mutant: Mutant, found: set[str]) -> None:
        seen[mutant.name] = found
        waiting.append(mutant)
        for each in list(waiting):
            if not each.changes or each.base == SOUND or _base_name(each) in seen:
                waiting.remove(each)
                say(each)

    def say(mutant: Mutant) -> None:
        silent = _silent(mutant, seen)
        failed.extend([mutant] if silent else [])
        proven.update(_own(mutant, seen) if mutant.changes and mutant.rejected_by else ())
        if mutant.changes or silent:
            wrong, right = (
                ("NOT rejected by", "rejected") if mutant.rejected_by else ("REJECTED by", "accepted")
            )
            wrong = wrong if mutant.changes else "FAILS"
            said = f"{wrong} {', '.join(silent)}" if silent else right
            print(f"{mutant.name:45} {said}", flush=True, file=output)

    run([*sound(chosen), *chosen], report, everything)
    _print_scores(chosen, failed)
    whole = {
        area
        for area in spec.areas()
        if {mutant for mutant in mutants().values() if mutant.area == area} <= set(chosen)
    }
    unproven = [
        clause.id
        for clause in spec.clauses().values()
        if clause.area in whole and clause.level != "recorded" and clause.id not in proven
    ]
    if whole:
        print(f"clauses that rejected none of these mutants: {', '.join(unproven) or 'none'}")
    return 1 if failed else 0


def _print_scores(chosen: Sequence[Mutant], failed: Sequence[Mutant]) -> None:
    """Print how many mutants were rejected and how many sound variants accepted: by base and area, in all."""
    for faulty, said, kind in ((True, "rejected", "mutants"), (False, "accepted", "sound variants")):
        these = [mutant for mutant in chosen if bool(mutant.rejected_by) == faulty]
        right = set(these) - set(failed)
        for base in dict.fromkeys(mutant.base for mutant in these):
            total = Counter(mutant.area for mutant in these if mutant.base == base)
            good = Counter(mutant.area for mutant in right if mutant.base == base)
            scores = ", ".join(f"{area} {good[area]}/{count}" for area, count in total.items())
            print(f"{base}, {kind} {said}: {scores}")
        if these:
            print(f"{said} {len(right)} of {len(these)} {kind}")
