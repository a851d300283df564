"""Read the cases of the suite from their source, without importing them."""

import ast
import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from keyedopt.conformance import spec

SUITE = Path(__file__).parents[1] / "suite"


@dataclass(frozen=True)
class CaseSource:
    """A case in the source: its folder, file and name, the clauses it tests, and what it expects.

    If it is decorated with `on_each_rank`, each rank calls it.
    """

    area: str
    file: str
    name: str
    clauses: tuple[str, ...]
    expectation: str
    on_each_rank: bool


def _marked(function: ast.FunctionDef) -> tuple[str, ...]:
    return tuple(
        argument.value
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.clause"
        for argument in decorator.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    )


@functools.cache
def cases() -> tuple[CaseSource, ...]:
    """Return every case of the suite, in the order of its files."""
    return tuple(
        CaseSource(
            area=path.parent.name,
            file=path.stem,
            name=node.name,
            clauses=_marked(node),
            expectation=" ".join((ast.get_docstring(node) or "").split()),
            on_each_rank="on_each_rank" in map(ast.unparse, node.decorator_list),
        )
        for path in sorted(SUITE.glob("*/test_*.py"), key=lambda path: path.stem)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    )


@functools.cache
def cases_by_clause() -> Mapping[str, tuple[CaseSource, ...]]:
    """Return the cases that test each clause."""
    found: dict[str, tuple[CaseSource, ...]] = {}
    for case in cases():
        for clause in case.clauses:
            found[clause] = (*found.get(clause, ()), case)
    return found


def modules(areas: Collection[str] = (), clauses: Collection[str] = ()) -> list[str]:
    """Return the modules of the suite with cases of these clauses and areas; none are all."""
    known = spec.clauses()
    ids = {i for i in known if (not clauses or i in clauses) and (not areas or known[i].area in areas)}
    wide = {known[i].area for i in ids if known[i].situations}
    files = dict.fromkeys(
        f"{case.area}.{case.file}"
        for case in cases()
        if ids & {*case.clauses} or any(i in known and known[i].area in wide for i in case.clauses)
    )
    return [f"keyedopt.conformance.suite.{file}" for file in files]
