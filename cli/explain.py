"""``keyedopt explain``: show a clause, its sources, and the cases that test it."""

import difflib
import textwrap
from collections.abc import Callable
from typing import NoReturn

from keyedopt.conformance import spec
from keyedopt.conformance.findings import findings
from keyedopt.conformance.run.case_sources import cases_by_clause


def explain_clause(name: str, fail: Callable[[str], NoReturn]) -> None:
    """Print a clause, its sources and rationale, and its cases; or an area and its clauses."""
    area = spec.areas().get(name.lower())
    if area is not None:
        print(f"{area.name}  {area.title}: {', '.join(area.names)}\n")
        for one in area.clauses:
            print(textwrap.fill(f"{one.id}  {one.level}  {one.statement}", 90, subsequent_indent="  "))
        print(f"\ncheck it: keyedopt check TARGET --area {area.name}")
        return
    clause = spec.clauses().get(name.upper())
    if clause is None:
        prefix, _, number = name.upper().partition("-")
        padded = f"{prefix}-{number:0>3}"
        near = [padded] if padded in spec.clauses() else []
        near = near or difflib.get_close_matches(name.upper(), spec.clauses(), n=3)
        near = near or difflib.get_close_matches(name.lower(), spec.areas(), n=1)
        hint = f"did you mean {', '.join(near)}?" if near else "see `keyedopt list clauses` and `list areas`"
        fail(f"there is no clause {name!r}; {hint}")
    print(f"{clause.id}  {clause.level}, area {clause.area}, since suite {clause.since}\n")
    print(textwrap.fill(clause.statement, 90))
    if clause.grounds:
        print("\nsources:")
        for ground in clause.grounds:
            print(textwrap.indent(textwrap.fill(ground, 86, break_on_hyphens=False), "  "))
    if clause.rationale:
        print("\nwhy:")
        print(textwrap.indent(textwrap.fill(clause.rationale, 86), "  "))
    print(f"\nmatrix: {', '.join(clause.covers)}")
    print("\ncases:")
    for case in cases_by_clause().get(clause.id, ()):
        print(f"  {case.file}::{case.name}")
        print(textwrap.indent(textwrap.fill(case.expectation, 84), "    "))
    known = [finding for finding in findings() if clause.id in finding.clauses]
    if known:
        print("\ndefects found, each with a script that needs only torch and the library:")
    for finding in known:
        print(f"  keyedopt findings {finding.path.stem}  ({finding.path})")
        print(textwrap.indent(textwrap.fill(finding.summary, 84), "    "))
    print(f"\ncheck it: keyedopt check TARGET --area {clause.area}")
