"""``keyedopt explain``: show a clause, its sources, and the cases that test it."""

import difflib
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from keyedopt.cli import machine
from keyedopt.cli.last import remembered
from keyedopt.cli.summary import failure_lines, replay_command
from keyedopt.conformance import spec
from keyedopt.conformance.findings import findings
from keyedopt.conformance.results import model
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.results.verdict import FAILING, failing, judge
from keyedopt.conformance.run.case_sources import cases_by_clause


def explain(name: str, fail: Callable[[str], NoReturn], as_json: bool = False) -> None:
    """Print a clause, its sources and rationale, and its cases; or the clauses of an area, or of a prefix."""
    area = spec.areas().get(name.lower())
    if area is not None:
        if as_json:
            clauses = [machine.clause(one) for one in area.clauses]
            machine.print_json(areas=[machine.area(area)], clauses=clauses)
        else:
            _print_area(area)
        return
    clause = spec.clauses().get(name.upper())
    if clause is None:
        near = [one for one in [padded(name)] if one in spec.clauses()]
        fitting = [one for one in spec.clauses().values() if name and one.id.startswith(name.upper())]
        if fitting and not near:
            _print_fitting(fitting, as_json)
            return
        if not re.search(r"\d", name):  # a clause has a number
            near = near or difflib.get_close_matches(name.lower(), spec.areas(), n=1)
        near = near or difflib.get_close_matches(name.upper(), spec.clauses(), n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "see `keyedopt list clauses` and `list areas`"
        fail(f"there is no clause {name!r}; {hint}")
    if as_json:
        machine.print_json(clauses=[_data(clause)])
    else:
        _print_clause(clause)


def padded(name: str) -> str:
    """Return the id of a clause whose number may lack zeros.

    >>> padded("clip-81")
    'CLIP-081'
    """
    prefix, _, number = name.upper().partition("-")
    return f"{prefix}-{number:0>3}"


def explain_failed(as_json: bool = False) -> None:
    """Print the clauses that failed in the last check, each with its failure."""
    path = remembered()
    found = model.read(path, partial=True)
    verdict = judge(found)
    new = [clause for clause in failing(verdict) if verdict.clauses[clause] in FAILING]
    bad = [clause for clause in (*verdict.behind_causes, *new) if clause in spec.clauses()]
    if as_json:
        clauses = [{**_data(spec.clauses()[i]), "failure": failure_lines(found, i)[1:]} for i in bad]
        machine.print_json(clauses=clauses)
        return
    about = found.implementation
    print(one_line(f"{about['name']} {about['version']}, checked {found.started}: {len(bad)} clauses failed"))
    for clause in bad:
        print("\n" + "\n".join(failure_lines(found, clause, replay_command(clause))) + "\n")
        _print_clause(spec.clauses()[clause])


def _data(clause: spec.Clause) -> dict[str, Any]:
    """Return all that is known of a clause."""
    cases = [
        {"case": f"{case.file}::{case.name}", "expectation": case.expectation}
        for case in cases_by_clause().get(clause.id, ())
    ]
    known = [
        {"name": one.path.stem, "summary": one.summary} for one in findings() if clause.id in one.clauses
    ]
    more = {"since": clause.since, "sources": clause.grounds, "why": clause.rationale, "cases": cases}
    more |= {"matrix": list(clause.covers), "varies": list(clause.varies), "plain_only": clause.plain_only}
    more["findings"] = known
    return {**machine.clause(clause), **more}


def _print_area(area: spec.Area) -> None:
    print(f"{area.name}  {area.title}: {', '.join(area.names)}\n")
    _print_fitting(area.clauses)
    print(f"\ncheck it: keyedopt check TARGET --area {area.name}")


def _print_fitting(clauses: Sequence[spec.Clause], as_json: bool = False) -> None:
    """List clauses, such as those whose ids begin alike."""
    if as_json:
        machine.print_json(clauses=[machine.clause(one) for one in clauses])
        return
    for one in clauses:
        print(textwrap.fill(f"{one.id}  {one.level}  {one.statement}", 90, subsequent_indent="  "))


def _print_clause(clause: spec.Clause) -> None:
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
    if clause.varies:
        print("\nholds also:")
    for dimension in clause.varies:
        print(f"  {dimension:10} {spec.dimensions()[dimension]}")
    if clause.plain_only:
        print("\nruns in no situation:")
        print(textwrap.indent(textwrap.fill(spec.reasons_plain_only()[clause.plain_only], 86), "  "))
    print("\ncases:" if not clause.situations else "\ncases: those of the area, in situations")
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
