"""What ``--json`` prints: an object with a list of targets, clauses, areas or devices."""

import json
from typing import Any

from keyedopt.cli.summary import failure_lines
from keyedopt.conformance import spec
from keyedopt.conformance.results.model import Result
from keyedopt.conformance.results.verdict import Verdict, failing, shown_outcomes, worst_of


def print_json(**lists: Any) -> None:
    """Print an object with these members."""
    print(json.dumps(lists, indent=1))


def clause(one: spec.Clause) -> dict[str, Any]:
    """Return what a list says of a clause."""
    return {"id": one.id, "level": one.level, "area": one.area, "statement": one.statement}


def area(one: spec.Area) -> dict[str, Any]:
    """Return what a list says of an area."""
    clauses = [each.id for each in one.clauses]
    return {"name": one.name, "title": one.title, "names": list(one.names), "clauses": clauses}


def checked(target: str, found: tuple[Result, Verdict] | str) -> dict[str, Any]:
    """Return what a check says of a target: its verdict, or why there is none."""
    if isinstance(found, str):
        return {"name": target, "problem": found}
    result, verdict = found
    words = shown_outcomes(result)
    bad = {*verdict.behind_causes, *failing(verdict)}
    return {
        "name": target,
        "version": result.implementation["version"],
        "device": result.environment["device"],
        "verdict": verdict.headline,
        "gate": verdict.gate,
        "reasons": list(verdict.reasons),
        "clauses": [
            {**clause(spec.clauses()[i]), "outcome": outcome, "shown": words[i]}
            | (
                {"failure": failure_lines(result, i)[1:], "case": worst_of(result, i).case}
                if i in bad
                else {}
            )
            for i, outcome in verdict.clauses.items()
        ],
    }
