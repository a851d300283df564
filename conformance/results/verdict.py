"""The verdict on an implementation, computed from the cases of a run. Nothing else in keyedopt judges."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keyedopt.conformance import spec
from keyedopt.conformance.results.model import Case, Result
from keyedopt.conformance.results.untrusted import one_line

#: Outcomes from the most to the least serious. A clause has the most serious outcome of its cases. A case is
#: unsupported if it needs an area or a name that the implementation does not claim, or shows nothing of the
#: device.
SEVERITY = ("error", "fail", "unexpected-pass", "known", "pass", "observed", "unsupported")
#: What readers are shown instead of the last two, which are words of result files. A case that is not claimed
#: begins its text with that; another unsupported case needs what is missing here: a device, a library, …
RECORDED, COULD_NOT_RUN, NOT_CLAIMED = "recorded", "could not run", "not claimed"
SHOWN = (*SEVERITY[:-2], RECORDED, COULD_NOT_RUN, NOT_CLAIMED)
UNSUPPORTED = (COULD_NOT_RUN, NOT_CLAIMED)
GREEN = ("pass", "observed")
FAILING = ("fail", "error")

#: The words of a verdict; `keyedopt.conformance.results.RULE` says what they mean. An interrupted
#: run, and a run in which no clause was checked, have no verdict.
CONFORMANT, PARTLY, NOT_CONFORMANT, NO_VERDICT, UNJUDGED = WORDS = (
    *("conformant", "partly checked", "not conformant", "no verdict", "could not be judged"),
)


@dataclass(frozen=True)
class Count:
    """Clauses that held, of those that were checked."""

    passed: int = 0
    total: int = 0


@dataclass(frozen=True)
class Checked:
    """Clauses and musts that were checked on a device, of those of the claimed areas."""

    clauses: int = 0
    of_clauses: int = 0
    musts: int = 0
    of_musts: int = 0
    device: str = "cpu"

    def __str__(self) -> str:
        musts = f"{self.musts} of {self.of_musts} musts"
        return f"checked {self.clauses} of {self.of_clauses} clauses, {musts} on {self.device}"


@dataclass(frozen=True)
class Cause:
    """The error of each first step with a class, and the clauses that fail for no other reason."""

    name: str
    error: str
    clauses: tuple[str, ...]

    def __str__(self) -> str:
        musts = sum(level_of(clause) == "must" for clause in self.clauses)
        behind = f"failing for it: {len(self.clauses)}, of them musts: {musts}"
        return f"{self.name} {UNJUDGED}: its first step raises {self.error}; {behind}"


@dataclass(frozen=True)
class Verdict:
    """The verdict on a run.

    Args:
        word: one of `WORDS`.
        scope: the part of the suite that was run, ``areas keyed``; empty if it was the whole suite.
        incomplete: why the run ended before its last case; empty if the run is complete.
        checked: how many clauses and musts of the claimed areas were checked.
        clauses: the outcome of every clause that was in the run.
        counts: clauses that held of those that were checked, by area and level.
        unsupported: areas that the implementation does not claim.
        unchecked: clauses of claimed areas of which every case is unsupported: it needs an area or a name
            that is not claimed, or ran on the CPU only.
        green: the gate: all clauses of its level held except for known failures, the list of known failures
            is true, musts of every claimed area were checked, and every required area is claimed and all of
            its musts were checked.
        reasons: why the gate is red, one line each.
        causes: the errors behind clauses that fail for no other reason.
    """

    word: str
    scope: str
    incomplete: str
    checked: Checked
    clauses: Mapping[str, str]
    counts: Mapping[str, Mapping[str, Count]]
    unsupported: tuple[str, ...]
    unchecked: tuple[str, ...]
    green: bool
    reasons: tuple[str, ...]
    causes: tuple[Cause, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every case of the run was run."""
        return not self.incomplete

    @property
    def behind_causes(self) -> tuple[str, ...]:
        """The clauses that fail because of one of the causes."""
        return tuple(clause for cause in self.causes for clause in cause.clauses)

    @property
    def conformant(self) -> bool:
        """Whether the word is ``conformant``."""
        return self.word == CONFORMANT

    @property
    def headline(self) -> str:
        """The word, and in parentheses the part of the suite that it is about."""
        if self.incomplete:
            return f"PARTIAL: {self.incomplete}, there is no verdict"
        return headline(self.word, self.scope)

    @property
    def gate(self) -> str:
        """``green`` or ``red``."""
        return "green" if self.green else "red"


def headline(word: str, scope: str) -> str:
    """Return the words of a verdict.

    >>> headline("conformant", "areas keyed")
    'conformant (areas keyed only)'
    """
    return f"{word} ({scope} only)" if scope else word


def clause_outcomes(result: Result) -> dict[str, str]:
    """Return the most serious outcome of each clause's cases; a clause of an unclaimed area has no cases."""
    claimed = result.implementation["areas"]
    outcomes = {clause.id: "unsupported" for clause in selected(result) if clause.area not in claimed}
    for case in result.cases:
        for clause in case.clauses:
            outcomes[clause] = min(outcomes.get(clause, SEVERITY[-1]), case.outcome, key=SEVERITY.index)
    return outcomes


def shown(case: Case) -> str:
    """Return the outcome of a case in the words of `SHOWN`."""
    if case.outcome == "unsupported":
        return NOT_CLAIMED if case.seen.startswith(NOT_CLAIMED) else COULD_NOT_RUN
    return RECORDED if case.outcome == "observed" else case.outcome


def shown_outcomes(result: Result) -> dict[str, str]:
    """Return what `clause_outcomes` returns in the words of `SHOWN`."""
    outcomes = dict.fromkeys(clause_outcomes(result), NOT_CLAIMED)
    for case in result.cases:
        for clause in case.clauses:
            outcomes[clause] = min(outcomes[clause], shown(case), key=SHOWN.index)
    return outcomes


def _causes(result: Result) -> tuple[Cause, ...]:
    """Return the causes of clauses that fail for no other reason, each with all of its clauses."""
    failed: dict[str, list[Case]] = {}
    for case in result.cases:
        for clause in case.clauses if case.outcome not in (*GREEN, "unsupported") else ():
            failed.setdefault(clause, []).append(case)
    found: dict[str, tuple[str, dict[str, None]]] = {}
    for clause, cases in failed.items():
        if all(case.cause and case.outcome in FAILING for case in cases):
            for about in (case.cause for case in cases):
                found.setdefault(about.get("class", ""), (about.get("error", ""), {}))[1][clause] = None
    return tuple(
        Cause(one_line(name, 60), one_line(error, 300), tuple(clauses))
        for name, (error, clauses) in found.items()
    )


def cases_of(result: Result, clause: str) -> list[Case]:
    """Return the cases of a clause, in the order of the suite."""
    return [case for case in result.cases if clause in case.clauses]


def worst_of(result: Result, clause: str) -> Case:
    """Return the first of the most serious cases of a clause."""
    return min(cases_of(result, clause), key=lambda case: SEVERITY.index(case.outcome))


def restrictions(result: Result) -> list[str]:
    """Return what the description says that optimizers do not take, a line each."""
    stated = result.implementation.get("restrictions", {})
    return [one_line(f"{text} ({', '.join(names)})", 300) for text, names in stated.items()]


def followed(result: Result, clause: str) -> list[str]:
    """Return the failing clauses on which the cases of a failing clause rely, where its worst case failed.

    The class that fails one of them may fail this clause for no reason of its own.
    """
    relied_on = spec.clauses()[clause].follows if clause in spec.clauses() else ()
    algorithm = worst_of(result, clause).inputs.get("algorithm") if relied_on else None
    return [
        one
        for one in relied_on
        if any(
            case.outcome not in (*GREEN, "unsupported", "unexpected-pass")
            and case.inputs.get("algorithm") == algorithm
            for case in cases_of(result, one)
        )
    ]


def level_of(clause: str) -> str:
    """Return the level of a clause, or ``unknown`` if the clause is of another version of the suite."""
    return spec.clauses()[clause].level if clause in spec.clauses() else "unknown"


def _incomplete(result: Result) -> str:
    """Return why a run ended before its last case, or an empty string."""
    if result.complete:
        return ""
    stopped = "stopped_at" in result.options
    return "the run stopped at the first failing case" if stopped else "the run was interrupted"


def judge(result: Result) -> Verdict:
    """Judge a result by the options of its run: level, suite version, areas, clauses, required areas."""
    outcomes = clause_outcomes(result)
    options = result.options
    gated = spec.LEVELS[: spec.LEVELS.index(options.get("level") or "should") + 1]
    required = options.get("require_areas") or ()
    claimed = result.implementation["areas"]
    asked = [clause for clause in selected(result) if clause.area in claimed]
    counts: dict[str, dict[str, Count]] = {}
    incomplete = _incomplete(result)
    reasons = [incomplete] if incomplete else []
    unchecked: list[str] = []
    bad_musts = 0
    causes = _causes(result)
    followed = {clause for cause in causes for clause in cause.clauses}
    reasons += map(str, causes)
    for clause in asked:
        outcome = outcomes.get(clause.id)
        if outcome == "unsupported":
            unchecked.append(clause.id)
            continue
        row = counts.setdefault(clause.area, {})
        count = row.get(clause.level, Count())
        row[clause.level] = Count(count.passed + (outcome in GREEN), count.total + 1)
        if clause.id in followed:
            continue
        bad_musts += clause.level == "must" and outcome not in (*GREEN, "unexpected-pass")
        if outcome is None:
            reasons += [f"{clause.id}: it was not run"] if result.complete else []
        elif outcome == "error" or (outcome in ("fail", "unexpected-pass") and clause.level in gated):
            reasons.append(f"{clause.id}: {outcome}")
    if not counts:
        reasons.append("no clause was checked")
    lost = {clause: spec.clauses()[clause].area for clause in unchecked if level_of(clause) == "must"}
    blank = [area for area in dict.fromkeys(lost.values()) if "must" not in counts.get(area, ())]
    reasons += [
        f"{area}: none of its musts was checked: their cases are not claimed, or could not run"
        for area in blank
    ]
    reasons += [f"the area {area} is required, and not claimed" for area in required if area not in claimed]
    reasons += [
        f"{clause}: its area is required, and its cases are not claimed, or could not run"
        for clause, area in lost.items()
        if area in required
    ]
    reasons += result.expectations.get("problems", ())
    ran = [clause for clause in asked if outcomes.get(clause.id, "unsupported") != "unsupported"]
    musts, of_musts = (sum(clause.level == "must" for clause in some) for some in (ran, asked))
    if not result.complete or not counts:
        word = NO_VERDICT
    elif bad_musts or blank:
        word = NOT_CONFORMANT
    elif causes:
        word = UNJUDGED
    else:
        word = PARTLY if lost else CONFORMANT
    return Verdict(
        word=word,
        scope=_scope(result.options),
        incomplete=incomplete,
        checked=Checked(len(ran), len(asked), musts, of_musts, _device(result)),
        clauses=outcomes,
        counts=counts,
        unsupported=tuple(
            area
            for area in spec.areas()
            if area in (options.get("areas") or spec.areas()) and area not in claimed
        ),
        unchecked=tuple(unchecked),
        green=not reasons,
        reasons=tuple(reasons),
        causes=causes,
    )


def _scope(options: Mapping[str, Any]) -> str:
    parts = []
    for name in ("areas", "clauses", "dtypes"):
        listed = options.get(name) or ()
        if listed:
            parts.append(f"{name} {', '.join(listed)}" if len(listed) <= 3 else f"{len(listed)} {name}")
    text = one_line("; ".join(parts), 120)
    return re.sub(r"[^A-Za-z0-9_.,; -]", "?", text)  # a file may hold any text, and headlines are not escaped


def selected(result: Result) -> list[spec.Clause]:
    """Return the clauses that a run was to check: those of its suite's version, areas, clauses and device."""
    options = result.options
    areas, ids = options.get("areas") or spec.areas(), options.get("clauses") or spec.clauses()
    try:
        version = spec.version_key(options.get("suite") or result.suite["version"])
    except ValueError:  # a file may hold any text as the version of its suite
        version = spec.version_key(spec.SUITE_VERSION)
    on_cpu = _device(result).partition(":")[0] == "cpu"
    return [
        clause
        for clause in spec.clauses().values()
        if clause.area in areas and clause.id in ids and spec.version_key(clause.since) <= version
        if not (clause.accelerator and on_cpu)
    ]


def _device(result: Result) -> str:
    return one_line(str(result.environment["device"]), 40)


def failing(verdict: Verdict) -> list[str]:
    """Return the clauses that did not hold: new failures first, then by level and severity.

    Those that fail because of one of the causes of the verdict are not among them.
    """
    areas = list(spec.areas())
    levels = (*spec.LEVELS, "unknown")

    def order(clause: str) -> tuple[object, ...]:
        outcome = verdict.clauses[clause]
        area = spec.clauses()[clause].area if clause in spec.clauses() else areas[-1]
        expected = outcome in ("known", "unexpected-pass")
        return expected, levels.index(level_of(clause)), SEVERITY.index(outcome), areas.index(area), clause

    bad = [
        clause
        for clause, outcome in verdict.clauses.items()
        if outcome not in (*GREEN, "unsupported") and clause not in verdict.behind_causes
    ]
    return sorted(bad, key=order)


def gating(verdict: Verdict) -> list[str]:
    """Return the clauses that `failing` lists and that make the gate red."""
    reasons = {reason.partition(":")[0] for reason in verdict.reasons}
    return [clause for clause in failing(verdict) if clause in reasons]


def other_reasons(verdict: Verdict) -> list[str]:
    """Return why a gate is red, without the clauses that `failing` lists."""
    listed = failing(verdict)
    return [reason for reason in verdict.reasons if reason.partition(":")[0] not in listed]
