"""Mutate the Python of `fused/` or `reference/`; print which mutants the suite accepts.

Run ``python -m keyedopt.tools.mutate [FOLDER_OR_FILE]... [--sample N] [--seed S]`` after ``pip
install -e .[mutate]``; paths are relative to the folder that ``--of`` names. `KEYEDOPT_BACKEND` chooses the
backend. The operators are those of cosmic-ray and two more, which run a loop for its first or for its last
element only: ``--operators second`` has only these. With ``--faults FOLDER`` the mutants are faults that
somebody wrote, such as an author who has not read the suite: JSON files with ``file`` (below the folder that
is mutated), ``old`` (a text that the file has once) and ``new``.

One process collects the cases and forks for everything else. The first fork runs all cases under coverage, to
know which cases reach which line and how long each takes. Each mutant is grafted in a fork of its own, which
runs the cases that reach the mutated statement, fast ones first, until one fails or the seconds are used up.
Left out: code outside functions, and operators that need arguments or change no body (decorators).
"""

import argparse
import ast
import collections
import contextlib
import difflib
import functools
import gc
import importlib
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

from keyedopt.conformance.mutants import planting
from keyedopt.conformance.mutants.rejection import LIMIT
from keyedopt.conformance.results.verdict import FAILING
from keyedopt.conformance.run.engine import case_name
from keyedopt.conformance.run.protocol import Reader, Writer, file_messages
from keyedopt.conformance.run.runner import Options, pytest_arguments
from keyedopt.conformance.suite.support.ranks import end_kept_ranks, inspect_ranks

#: The folders whose Python is mutated, beside that of this file.
FOLDERS = ("fused", "reference")
#: The folder whose Python is mutated.
_CHOSEN = [Path(__file__).parents[1] / FOLDERS[0]]
#: Operators of ours: what a loop runs for instead of all elements.
SECOND = {"second/FirstOnly": ":1", "second/LastOnly": "-1:"}
#: Operators of cosmic-ray that need arguments, or change no body of a function.
LEFT_OUT = ("core/RemoveDecorator", "core/VariableReplacer", "core/VariableInserter")
#: The status of a process whose seconds are used up.
TIME_IS_UP = 2
#: The number of the first and the last line of a mutated piece of code, with columns.
Position = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Mutation:
    """One mutant: which operator changed which of the places where it applies."""

    file: str
    operator: str
    occurrence: int
    position: Position

    @property
    def text(self) -> str:
        """The changed text of the file."""
        if self.operator in SECOND:
            return _shortened(_text(self.file), self.position, SECOND[self.operator])
        from cosmic_ray.mutating import mutate_code
        from cosmic_ray.plugins import get_operator

        return str(mutate_code(_text(self.file), get_operator(self.operator)(), self.occurrence))

    @property
    def lines(self) -> range:
        """The lines of the changed statement, without those of the statements in it."""
        return _statement(self.file, self.position[0][0])

    def __str__(self) -> str:
        lines = _text(self.file).splitlines(), self.text.splitlines()
        changed = [line for line in difflib.ndiff(*lines) if line[0] in "+-"]
        return f"{self.file}:{self.position[0][0]} {self.operator} {self.occurrence}\n" + "\n".join(changed)


@dataclass(frozen=True)
class Fault:
    """A fault that somebody wrote: one text of a file in place of another."""

    name: str
    file: str
    old: str
    new: str

    @classmethod
    def read(cls, path: Path) -> "Fault":
        """Read a fault; raise SystemExit if it is none."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            fault = cls(path.stem, *(str(found[name]) for name in ("file", "old", "new")))
            count = _text(fault.file).count(fault.old)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise SystemExit(f"{path}: expected JSON with file, old and new: {error!r}") from error
        if count != 1:
            raise SystemExit(f"{path}: expected `old` once in {fault.file}, which has it {count} times")
        return fault

    @property
    def text(self) -> str:
        """The changed text of the file."""
        return _text(self.file).replace(self.old, self.new)

    @property
    def lines(self) -> range:
        """The lines of the changed statements."""
        first = _text(self.file).partition(self.old)[0].count("\n") + 1
        last = first + self.old.rstrip("\n").count("\n")
        return range(_statement(self.file, first).start, _statement(self.file, last).stop)

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


@functools.cache
def _text(file: str) -> str:
    return (_CHOSEN[0] / file).read_text(encoding="utf-8")


@functools.cache
def _statements(file: str) -> list[range]:
    """Return the lines of each statement of a file, without those of the statements in it; fewest first."""
    found = []
    for node in (node for node in ast.walk(ast.parse(_text(file))) if isinstance(node, ast.stmt)):
        inner = [part.lineno for part in ast.walk(node) if isinstance(part, ast.stmt) and part is not node]
        found.append(range(node.lineno, min([*inner, (node.end_lineno or node.lineno) + 1])))
    return sorted(found, key=len)


def _statement(file: str, line: int) -> range:
    """Return the lines of the smallest statement with this line."""
    found = (lines for lines in _statements(file) if line in lines)
    return next(found, range(line, line + 1))  # an `except` line is in no statement


def _loops(file: str) -> list[Position]:
    """Return where the elements of each loop and comprehension are written."""
    loops = (ast.For, ast.comprehension)
    found = (node.iter for node in ast.walk(ast.parse(_text(file))) if isinstance(node, loops))
    return [((one.lineno, one.col_offset), (one.end_lineno or 0, one.end_col_offset or 0)) for one in found]


def _shortened(text: str, position: Position, part: str) -> str:
    """Return a text in which a loop runs for a part of its elements."""
    lines = text.encode().splitlines(keepends=True)
    start, end = (sum(map(len, lines[: line - 1])) + column for line, column in position)
    code = text.encode()
    return b"".join(
        [code[:start], b"[*(", code[start:end], b")][" + part.encode() + b"]", code[end:]]
    ).decode()


def mutations(file: str, operators: str = "all") -> Iterator[Mutation]:
    """Yield every mutant of a file, or only those of the operators ``second``."""
    for name in SECOND:
        yield from (Mutation(file, name, number, place) for number, place in enumerate(_loops(file)))
    if operators == "second":
        return
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    nodes = list(ast_nodes(get_ast(_text(file))))
    for name in sorted(set(operator_names()) - set(LEFT_OUT)):
        operator = get_operator(name)()
        places = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, place in enumerate(places):
            yield Mutation(file, name, occurrence, place)


def sampled(
    files: Sequence[str], number: int, seed: int, operators: str = "all"
) -> list[tuple[Mutation, "Graft"]]:
    """Return mutants that can be grafted, one of each place, drawn at random."""
    draw = random.Random(seed)
    places: dict[tuple[str, Position], list[Mutation]] = {}
    for mutation in (mutation for file in files for mutation in mutations(file, operators)):
        places.setdefault((mutation.file, mutation.position), []).append(mutation)
    found: list[tuple[Mutation, Graft]] = []
    for place in draw.sample(sorted(places), len(places)):
        mutation = draw.choice(places[place])
        if len(found) < number and (graft := grafted(mutation)):
            found.append((mutation, graft))
    return found


#: Gives functions the code of a mutant.
Graft = Callable[[], None]


def grafted(mutation: Mutation | Fault) -> Graft | None:
    """Return a function that plants a mutant in this process; None if not just bodies of functions change."""
    package = f"keyedopt.{_CHOSEN[0].name}"
    name = ".".join((package, *Path(mutation.file).with_suffix("").parts)).removesuffix(".__init__")
    try:
        codes = [compile(text, mutation.file, "exec") for text in (_text(mutation.file), mutation.text)]
    except SyntaxError:
        return None
    pairs = [
        (one, other)
        for one, other in zip(*map(_functions, codes), strict=False)
        if _bare(one) != _bare(other)
    ]
    if _outside(codes[0]) != _outside(codes[1]) or any(
        old.co_freevars != new.co_freevars for old, new in pairs
    ):
        return None
    live = []
    for old, new in pairs:
        try:
            named = planting.functions(importlib.import_module(name), old.co_qualname)
        except AttributeError:  # made by a function that is called at the import
            return None
        live += [(each, new) for each in named if each.__code__.co_firstlineno == old.co_firstlineno]

    def graft() -> None:
        for each, new in live:
            each.__code__ = new

    return graft if live else None


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the functions of a module that are in no other function."""
    for part in (part for part in code.co_consts if isinstance(part, CodeType)):
        yield from [part] if part.co_flags & 1 else _functions(part)  # CO_OPTIMIZED: no body of a class


def _outside(code: CodeType) -> CodeType:
    """Return the code of a module or class without its functions and the positions in lines."""
    constants = (
        part if not isinstance(part, CodeType) else None if part.co_flags & 1 else _outside(part)
        for part in code.co_consts
    )
    return code.replace(co_linetable=b"", co_consts=tuple(constants))


def _bare(code: CodeType) -> CodeType:
    """Return code without the positions in lines, which an unused annotation changes too."""
    constants = (_bare(part) if isinstance(part, CodeType) else part for part in code.co_consts)
    return code.replace(co_linetable=b"", co_consts=tuple(constants))


class _Contexts(Writer):
    """Tells coverage which case runs; its ranks are forks of this process, and write lines of their own."""

    coverage: Any = None

    @contextlib.contextmanager
    def running(self, head: dict[str, Any]) -> Iterator[None]:
        end_kept_ranks()
        self.coverage.switch_context(head["case"])
        with super().running(head):
            yield

    def write_lines(self) -> str:
        """Write which cases have reached each line in this process, into the folder of the process."""
        data = self.coverage.get_data()
        lines = {
            f"{Path(file).relative_to(_CHOSEN[0])}:{line}": cases
            for file in data.measured_files()
            for line, cases in data.contexts_by_lineno(file).items()
        }
        Path(f"lines-{os.getpid()}-{time.monotonic_ns()}").write_text(json.dumps(lines), encoding="utf-8")
        return ""  # the function is also one that ranks call to find functions that were replaced


class _Stopping(Writer):
    """Ends the process with status 1 when a case fails, and with status 2 when time is up."""

    until = 0.0

    def add(self, record: Mapping[str, Any]) -> None:
        super().add(record)
        if record["outcome"] in FAILING:
            os._exit(1)
        if time.process_time() > self.until:
            os._exit(TIME_IS_UP)


class _Forks:
    """The pytest plugin that forks when the cases are collected."""

    def __init__(self, chosen: Sequence[tuple[Mutation | Fault, Graft]], seconds: float, scratch: Path):
        self._chosen, self._seconds, self._scratch = chosen, seconds, scratch
        self.counts: dict[str, collections.Counter[str]] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.freeze()  # objects made so far stay in memory pages that all processes share
        items = {case_name(item): item for item in session.items}
        records, status = self._fork("all", session, self._trace)
        if status != 0:
            pytest.exit(f"the run without a fault ended with status {status}, after {len(records)} cases", 1)
        took = {record["case"]: record["seconds"] for record in records if record["outcome"] == "pass"}
        lines: dict[str, set[str]] = {}
        for path in (self._scratch / "all").glob("lines-*"):
            for line, reaching in json.loads(path.read_text(encoding="utf-8")).items():
                lines.setdefault(line, set()).update(reaching)
        print(f"{len(took)} of {len(items)} cases pass without a fault", flush=True)
        for number, (mutation, graft) in enumerate(self._chosen):
            reached = [lines.get(f"{mutation.file}:{line}", ()) for line in mutation.lines]
            cases = sorted(took.keys() & set().union(*reached), key=took.__getitem__)
            session.items[:] = [items[case] for case in cases]
            run = functools.partial(self._until_rejected, graft)
            records, status = self._fork(str(number), session, run) if cases else ([], 0)
            outcome = ("accepted" if cases else "not reached") if status in (0, TIME_IS_UP) else "rejected"
            folder = mutation.file.rpartition("/")[0] or mutation.file
            self.counts.setdefault(folder, collections.Counter()).update([outcome])
            by = f"by {records[-1]['case']}" if outcome == "rejected" and records else ""
            ran = f"in {len(records)} of {len(cases)} cases that reach it"
            print(f"{outcome} {by or ran}: {mutation}", flush=True)
        return True

    def _fork(
        self, name: str, session: pytest.Session, run: Callable[[Any, pytest.Session, Path], None]
    ) -> tuple[list[dict[str, Any]], int | None]:
        """Run cases in a fork; return their records, also of one that ended the process, and its status."""
        folder = self._scratch / name
        folder.mkdir()

        def work() -> None:
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(null, number)
            os.chdir(folder)
            run(session.config.pluginmanager.get_plugin("keyedopt-engine"), session, folder)
            os._exit(0)

        process = multiprocessing.get_context("fork").Process(target=work, daemon=True)
        process.start()
        process.join()
        reader = Reader(file_messages(folder, process.pid or 0), folder / f"stack-{process.pid}")
        records = reader.new(last=True)
        crash = reader.crash("crash")
        return [*records, *filter(None, [crash])], process.exitcode

    def _trace(self, engine: Any, session: pytest.Session, folder: Path) -> None:
        """Run all cases, and write which of them reach each line."""
        from coverage import Coverage

        writer = _Contexts(folder, LIMIT)
        writer.coverage = Coverage(data_file=None, include=[f"{_CHOSEN[0]}/*"])
        writer.coverage.start()
        inspect_ranks(writer.write_lines)
        engine.turn_to(engine.implementation, writer, session, (), engine.dtypes)
        engine.pytest_runtestloop(session)
        writer.coverage.stop()
        writer.write_lines()

    def _until_rejected(self, graft: Graft, engine: Any, session: pytest.Session, folder: Path) -> None:
        """Run cases on a mutant until one fails."""
        graft()
        writer = _Stopping(folder, LIMIT)
        writer.until = time.process_time() + self._seconds
        engine.turn_to(engine.implementation, writer, session, (), engine.dtypes)
        engine.pytest_runtestloop(session)


def main() -> None:
    """Run the suite on mutants, and print each and the counts by folder."""
    parser = argparse.ArgumentParser(prog="python -m keyedopt.tools.mutate")
    parser.add_argument("paths", nargs="*", default=["."], help="folders or files; default: all")
    parser.add_argument("--of", choices=FOLDERS, default=FOLDERS[0], help="the folder that is mutated")
    parser.add_argument("--operators", choices=("all", "second"), default="all")
    parser.add_argument("--faults", type=Path, help="a folder of faults in JSON, in place of operators")
    parser.add_argument("--sample", type=int, default=10**6, help="how many mutants of each path")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU time for the cases of a mutant")
    given = parser.parse_args()
    _CHOSEN[0] = folder = (
        Path(importlib.import_module(f"keyedopt.{given.of}").__file__ or "").resolve().parent
    )
    chosen: list[tuple[Mutation | Fault, Graft]] = []
    for path in () if given.faults else given.paths:
        found = sorted((folder / path).rglob("*.py")) or [folder / path]
        files = [name for file in found if "triton" not in (name := file.relative_to(folder).as_posix())]
        chosen += sampled(files, given.sample, given.seed, given.operators)
    random.Random(given.seed).shuffle(chosen)  # so that a run which is stopped has seen every folder
    for fault in map(Fault.read, sorted(given.faults.glob("*.json")) if given.faults else ()):
        if graft := grafted(fault):
            chosen.append((fault, graft))
        else:
            print(f"left out, as more than bodies of functions change: {fault}", flush=True)
    print(f"{len(chosen)} mutants", flush=True)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    importlib.import_module("torch._dynamo")  # the first optimizer of a process imports it
    with tempfile.TemporaryDirectory(prefix="keyedopt-", ignore_cleanup_errors=True) as scratch:
        forks = _Forks(chosen, given.seconds, Path(scratch))
        status = pytest.main([*pytest_arguments(given.of, Options(), Path(scratch)), "-qq"], [forks])
    for name, counts in sorted(forks.counts.items()):
        print(f"{name}: {', '.join(f'{outcome} {count}' for outcome, count in counts.most_common())}")
    raise SystemExit(status)


if __name__ == "__main__":
    main()
