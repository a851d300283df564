"""From the cases of a run to what is said of an implementation: clause by clause, and in sum."""

from collections.abc import Mapping
from dataclasses import dataclass

from keyedopt.conformance import spec
from keyedopt.conformance.result import Case, Result

#: Outcomes from the most to the least serious; a clause has the most serious one of its cases.
#: A case that is unsupported says nothing of its clause where another one ran.
SEVERITY = ("error", "fail", "unexpected-pass", "known", "pass", "observed", "unsupported")
GREEN = ("pass", "observed")
FAILING = ("fail", "error")


@dataclass(frozen=True)
class Count:
    """Clauses that held over those that were looked at; unsupported ones are not among these."""

    passed: int = 0
    total: int = 0


@dataclass(frozen=True)
class Verdict:
    """What a run says.

    Args:
        clauses: the outcome of every clause that was in the run.
        counts: passed over total, by area and level.
        unsupported: areas that the implementation does not claim.
        conformant: no ``must`` clause failed, known failures included, and every claimed ``must``
            was looked at.
        green: the gate: nothing but known failures failed at its level, the list of known failures
            is true, and every required area is there.
        reasons: why it is not green, one line each.
    """

    clauses: Mapping[str, str]
    counts: Mapping[str, Mapping[str, Count]]
    unsupported: tuple[str, ...]
    conformant: bool
    green: bool
    reasons: tuple[str, ...]


def clause_outcomes(result: Result) -> dict[str, str]:
    """Return the most serious outcome of each clause's cases."""
    outcomes: dict[str, str] = {}
    for case in result.cases:
        for clause in case.clauses:
            before = outcomes.get(clause, "unsupported")
            outcomes[clause] = min(before, case.outcome, key=SEVERITY.index)
    return outcomes


def cases_of(result: Result, clause: str) -> list[Case]:
    """Return the cases of a clause, in the order of the suite."""
    return [case for case in result.cases if clause in case.clauses]


def judge(result: Result) -> Verdict:
    """Judge a result by its own options: level, suite version, required areas."""
    outcomes = clause_outcomes(result)
    known = spec.clauses()
    version = spec.version_key(result.options.get("suite") or spec.SUITE_VERSION)
    level = result.options.get("level") or "should"
    gated = spec.LEVELS[: spec.LEVELS.index(level) + 1]
    selected = result.options.get("areas") or list(spec.areas())
    claimed = result.implementation["areas"]
    counts: dict[str, dict[str, Count]] = {}
    reasons: list[str] = []
    bad_musts = 0
    for clause in known.values():
        if clause.area not in selected or spec.version_key(clause.since) > version:
            continue
        outcome = outcomes.get(clause.id)
        if clause.area not in claimed or outcome == "unsupported":
            continue
        row = counts.setdefault(clause.area, {})
        count = row.get(clause.level, Count())
        row[clause.level] = Count(count.passed + (outcome in GREEN), count.total + 1)
        bad_musts += clause.level == "must" and outcome not in (*GREEN, "unexpected-pass")
        if outcome is None:
            reasons.append(f"{clause.id} was not run")
        elif outcome not in (*GREEN, "known") and (
            clause.level in gated or outcome in ("error", "unexpected-pass")
        ):
            reasons.append(f"{clause.id}: {outcome}")
    unsupported = tuple(area for area in selected if area not in claimed)
    required = result.options.get("require_areas") or ()
    reasons += [f"the area {area} is required and not supported" for area in required if area not in claimed]
    reasons += result.expectations.get("problems", ())
    if not result.complete:
        reasons.append("the run was interrupted")
    if not counts:
        reasons.append("no clause was looked at")
    return Verdict(
        clauses=outcomes,
        counts=counts,
        unsupported=unsupported,
        conformant=bad_musts == 0 and result.complete and bool(counts),
        green=not reasons,
        reasons=tuple(reasons),
    )
