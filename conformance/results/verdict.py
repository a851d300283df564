"""From the cases of a run to what is said of an implementation: clause by clause, and in sum."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keyedopt.conformance import spec
from keyedopt.conformance.results.model import Case, Result

#: Outcomes from the most to the least serious. A clause has the most serious one of its cases; it is
#: unsupported when all of them are, since each needs an area or a name that the implementation does
#: not claim.
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
        unchecked: clauses of claimed areas whose cases all need an area, or a name, that is not claimed.
        conformant: no ``must`` clause failed, known failures included, and in every claimed area
            some were looked at.
        green: the gate: nothing but known failures failed at its level, the list of known failures
            is true, every claimed area has musts that were looked at, and every required area is there
            with all of its musts.
        reasons: why it is not green, one line each.
    """

    clauses: Mapping[str, str]
    counts: Mapping[str, Mapping[str, Count]]
    unsupported: tuple[str, ...]
    unchecked: tuple[str, ...]
    conformant: bool
    green: bool
    reasons: tuple[str, ...]


def clause_outcomes(result: Result) -> dict[str, str]:
    """Return the most serious outcome of each clause's cases."""
    outcomes: dict[str, str] = {}
    for case in result.cases:
        for clause in case.clauses:
            outcomes[clause] = min(outcomes.get(clause, SEVERITY[-1]), case.outcome, key=SEVERITY.index)
    return outcomes


def cases_of(result: Result, clause: str) -> list[Case]:
    """Return the cases of a clause, in the order of the suite."""
    return [case for case in result.cases if clause in case.clauses]


def worst_of(result: Result, clause: str) -> Case:
    """Return the first of the most serious cases of a clause."""
    return min(cases_of(result, clause), key=lambda case: SEVERITY.index(case.outcome))


def level_of(clause: str) -> str:
    """Return the level of a clause; one of another version of the suite has none here."""
    return spec.clauses()[clause].level if clause in spec.clauses() else "unknown"


def judge(result: Result) -> Verdict:
    """Judge a result by its own options: level, suite version, areas, clauses, required areas."""
    outcomes = clause_outcomes(result)
    options = result.options
    level = options.get("level") or "should"
    gated = spec.LEVELS[: spec.LEVELS.index(level) + 1]
    claimed = result.implementation["areas"]
    counts: dict[str, dict[str, Count]] = {}
    reasons = [] if result.complete else ["the run was interrupted"]
    unchecked: list[str] = []
    bad_musts = 0
    for clause in selected(options):
        outcome = outcomes.get(clause.id)
        if clause.area not in claimed:
            continue
        if outcome == "unsupported":
            unchecked.append(clause.id)
            continue
        row = counts.setdefault(clause.area, {})
        count = row.get(clause.level, Count())
        row[clause.level] = Count(count.passed + (outcome in GREEN), count.total + 1)
        bad_musts += clause.level == "must" and outcome not in (*GREEN, "unexpected-pass")
        if outcome is None:
            reasons += [f"{clause.id}: it was not run"] if result.complete else []
        elif outcome == "error" or (outcome in ("fail", "unexpected-pass") and clause.level in gated):
            reasons.append(f"{clause.id}: {outcome}")
    if not counts:
        reasons.append("no clause was looked at")
    lost = [clause for clause in unchecked if level_of(clause) == "must"]
    blank = {spec.clauses()[clause].area for clause in lost}
    blank = {area for area in blank if "must" not in counts.get(area, ())}
    reasons += [
        f"{area}: none of its musts could be checked, as their cases need what is not claimed"
        for area in spec.areas()
        if area in blank
    ]
    missing = [area for area in options.get("require_areas") or () if area not in claimed]
    reasons += [f"the area {area} is required, and not claimed" for area in missing]
    reasons += [
        f"{clause}: its area is required, and it needs what is not claimed"
        for clause in lost
        if spec.clauses()[clause].area in (options.get("require_areas") or ())
    ]
    reasons += result.expectations.get("problems", ())
    return Verdict(
        clauses=outcomes,
        counts=counts,
        unsupported=tuple(area for area in options.get("areas") or spec.areas() if area not in claimed),
        unchecked=tuple(unchecked),
        conformant=bad_musts == 0 and result.complete and bool(counts) and not blank,
        green=not reasons,
        reasons=tuple(reasons),
    )


def selected(options: Mapping[str, Any]) -> list[spec.Clause]:
    """Return the clauses that a run with these options looks at."""
    version = spec.version_key(options.get("suite") or spec.SUITE_VERSION)
    areas, ids = options.get("areas") or spec.areas(), options.get("clauses") or spec.clauses()
    return [
        clause
        for clause in spec.clauses().values()
        if clause.area in areas and clause.id in ids and spec.version_key(clause.since) <= version
    ]


def failing(verdict: Verdict) -> list[str]:
    """Return the clauses that did not hold, the most serious first: news, musts, errors."""
    areas = list(spec.areas())
    levels = (*spec.LEVELS, "unknown")

    def order(clause: str) -> tuple[object, ...]:
        outcome = verdict.clauses[clause]
        area = spec.clauses()[clause].area if clause in spec.clauses() else areas[-1]
        expected = outcome in ("known", "unexpected-pass")
        return expected, levels.index(level_of(clause)), SEVERITY.index(outcome), areas.index(area), clause

    bad = [clause for clause, outcome in verdict.clauses.items() if outcome not in (*GREEN, "unsupported")]
    return sorted(bad, key=order)


def other_reasons(verdict: Verdict) -> list[str]:
    """Return why a gate is red, besides the clauses that `failing` lists."""
    listed = failing(verdict)
    return [reason for reason in verdict.reasons if reason.partition(":")[0] not in listed]


def headline(result: Result, verdict: Verdict) -> str:
    """Say in a few words what came out."""
    if not result.complete:
        return "PARTIAL: the run was interrupted, there is no verdict"
    word = "conformant" if verdict.conformant else "not conformant"
    parts = [f"{name} {', '.join(result.options[name])}" for name in ("areas", "clauses", "dtypes")
             if result.options.get(name)]  # fmt: skip
    return f"{word} ({'; '.join(parts)} only)" if parts else word
