"""What changed between the verdicts of two runs, and whether it is worse, for command line and page."""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.results.verdict import (
    COULD_NOT_RUN,
    FAILING,
    NOT_CLAIMED,
    RECORDED,
    SHOWN,
    UNSUPPORTED,
)
from keyedopt.reports.tables import Frame, Tables, rows

#: The outcome of a case that only the other run has. (Only `keyedopt check --like` compares such cases.)
NOT_RUN = "not run"
#: The rank of each outcome; an outcome with a higher rank than the one before is worse.
WORSE = {
    "pass": 0,
    RECORDED: 0,
    "unexpected-pass": 0,
    "known": 1,
    COULD_NOT_RUN: 2,
    NOT_CLAIMED: 2,
    NOT_RUN: 2,
    "fail": 3,
    "error": 4,
}
ORDER = (*SHOWN, NOT_RUN)
#: The words for a change, by `Change.worse`.
WORDS: Mapping[bool | None, str] = {True: "worse", False: "better", None: "changed"}
#: Longer texts are cut.
LIMIT = 200

Cases = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Change:
    """One difference.

    Args:
        kind: one of `KINDS`.
        what: the clause, or the workload, task and peer.
        level: the level of the clause, if it is known.
        before, after: the outcome, record, error or ratio in each run.
        worse: True for worse, False for better, None if the change is neither.
        detail: the case, what was expected and what was seen.
    """

    kind: str
    what: str
    level: str
    before: str
    after: str
    worse: bool | None
    detail: str = ""

    def line(self, *, like: bool = False) -> str:
        """Return the change as one line; with ``like`` neither run is the earlier one."""
        word, arrow = ("differs", "|") if like else (WORDS[self.worse], "->")
        level = f" [{self.level}]" if self.level else ""
        head = f"{word} {self.kind} {self.what}{level} {self.before} {arrow} {self.after}"
        return one_line(f"{head}  ({self.detail})" if self.detail else head)


@dataclass(frozen=True)
class Run:
    """The verdicts of one run.

    Args:
        implementation: the name of the implementation.
        cases: the row of each case, with a list of its clauses.
        areas: the area of each clause.
        levels: the level of each clause.
        unclaimed: areas of which no clause was run.
    """

    implementation: str
    cases: dict[str, dict[str, Any]]
    areas: Mapping[str, str]
    levels: Mapping[str, str]
    unclaimed: frozenset[str]

    @classmethod
    def of(cls, tables: Tables) -> "Run":
        """Return the verdicts of tables of one run."""
        clauses = rows(tables.clauses)
        claimed = {row["area"] for row in clauses if row["outcome"] not in UNSUPPORTED}
        return cls(
            str(rows(tables.runs)[0]["implementation"]),
            by_case(tables.cases),
            {row["clause"]: row["area"] or "" for row in clauses},
            {row["clause"]: row["level"] or "" for row in clauses},
            frozenset(row["area"] for row in clauses if row["area"]) - claimed,
        )


def by_case(frame: Frame) -> dict[str, dict[str, Any]]:
    """Return the row of each case, with a list of its clauses."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows(frame):
        found.setdefault(row["case"], {**row, "clauses": []})["clauses"].append(row["clause"])
    return found


def _alike(before: str, after: str) -> bool:
    """Whether two outcomes say the same of an implementation; a list of known failures changes nothing."""
    failed = (*FAILING, "known")
    expected = before in failed and after in failed and "known" in (before, after)
    return WORSE[before] == WORSE[after] or expected


def verdict_changes(before: Run, after: Run, both: Collection[str], strict: bool = False) -> list[Change]:
    """Return a change for each clause of which a case has another outcome, worse ones first.

    An area that one run does not claim is one change, worse if the same implementation claimed it before. A
    clause that one of two implementations does not claim is neither worse nor better.

    Args:
        before: one run.
        after: the other.
        both: the cases to compare.
        strict: whether every difference counts, and is worse.
    """
    same = before.implementation == after.implementation
    areas = {**before.areas, **after.areas}
    apart = frozenset() if strict else before.unclaimed ^ after.unclaimed
    found = [_area(area, area in after.unclaimed, same, areas) for area in sorted(apart)]
    moved: dict[str, list[str]] = defaultdict(list)
    outcomes: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name in both:
        pair = before.cases[name]["outcome"], after.cases[name]["outcome"]
        for clause in after.cases[name]["clauses"]:
            if areas.get(clause) not in apart:
                outcomes[clause].append(pair)
                if pair[0] != pair[1] if strict else not _alike(*pair):
                    moved[clause].append(name)
    for clause, names in moved.items():
        found.append(_clause(clause, names, outcomes[clause], (before, after), strict, same))
    order: list[bool | None] = [True, None, False]
    return sorted(found, key=lambda change: order.index(change.worse))


def _area(area: str, lost: bool, same: bool, areas: Mapping[str, str]) -> Change:
    words = ("claimed", "not claimed") if lost else ("not claimed", "claimed")
    count = sum(each == area for each in areas.values())
    worse = True if lost and same else None
    return Change("verdict", f"area {area}", "", *words, worse, f"{count} clauses, which are not compared")


def _clause(
    clause: str,
    names: list[str],
    outcomes: list[tuple[str, str]],
    runs: tuple[Run, Run],
    strict: bool,
    same: bool,
) -> Change:
    """Return the change of a clause, of which the named cases have other outcomes."""
    before, after = (run.cases for run in runs)
    was, now = (min((pair[side] for pair in outcomes), key=ORDER.index) for side in (0, 1))
    bad = [name for name in names if WORSE[after[name]["outcome"]] > WORSE[before[name]["outcome"]]]
    shown = after[bad[0]] if bad else before[names[0]]
    counts = {"worse": len(bad), "better": len(names) - len(bad)}
    said = [f"{count} cases {word}" for word, count in counts.items() if count]
    if strict:
        said = [f"{len(names)} cases differ"]
    detail = f"{', '.join(said)} of {len(outcomes)}; "
    sides = ("like", "target") if strict else ("before", "after")
    detail += f"{sides[bool(bad)]}: {shown['outcome']} {shown['case']}"
    told = [f"{what} {short(shown[what])}" for what in ("expected", "seen") if shown[what]]
    detail += f": {'; '.join(told)}" if told else ""
    worse: bool | None = strict or bool(bad)
    pairs = [(before[name]["outcome"], after[name]["outcome"]) for name in names]
    if not (strict or same) and all(set(pair) & {*UNSUPPORTED} for pair in pairs):
        worse = None
    level = runs[1].levels.get(clause) or runs[0].levels.get(clause, "")
    return Change("verdict", clause, level, was, now, worse, detail)


def short(text: Any) -> str:
    """Return a text on one line, cut."""
    return one_line(str(text), LIMIT)
