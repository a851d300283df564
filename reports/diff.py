"""Differences between two runs (verdicts, behaviour, errors, speeds), as text, Markdown or data."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from keyedopt.conformance.results.errors import KeyedoptError
from keyedopt.conformance.results.markdown import code, table
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.results.verdict import RECORDED
from keyedopt.reports.changes import NOT_RUN, WORDS, Cases, Change, Run, short, verdict_changes
from keyedopt.reports.tables import Tables, rows

#: An error has grown if it is larger by more than this many ULP, or this many times as large if it is
#: relative.
GROWN_ULP, GROWN_TIMES = 1.0, 2.0
#: The kinds of changes, and their titles.
KINDS = {
    "verdict": "verdicts that changed",
    "behaviour": "recorded behaviour that changed",
    "error": "measured errors that changed",
    "speed": "speeds that changed",
}
#: The largest number of rows of a table in Markdown; the length of a comment on a pull request is limited.
ROWS = 100


class CompareError(KeyedoptError):
    """Two runs cannot be compared; the message says why."""


@dataclass(frozen=True)
class Difference:
    """All differences between two runs, and notes on what was compared."""

    before: str
    after: str
    notes: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    compared: Mapping[str, int] = field(default_factory=dict)

    @property
    def worse(self) -> list[Change]:
        """The changes that are worse."""
        return [change for change in self.changes if change.worse]

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as JSON data."""
        return {"kind": "keyedopt-diff", "schema": 1, **asdict(self)}

    def text(self) -> str:
        """Return the difference as lines for a terminal."""
        lines = [f"before: {self.before}", f"after: {self.after}", *self.summary()]
        lines += [f"note: {note}" for note in self.notes]
        lines = [*map(one_line, lines), *(change.line() for change in self.changes)]
        return "\n".join(lines) + "\n"

    def markdown(self) -> str:
        """Return the difference as Markdown: the two runs, then a table for each kind of change."""
        lines = [f"## {code(self.before)} to {code(self.after)}", ""]
        lines += [f"- {said}" for said in self.summary()]
        lines += [f"- note: {code(note, 1000)}" for note in self.notes]
        for kind, title in KINDS.items():
            some = [change for change in self.changes if change.kind == kind]
            cells = [
                [
                    WORDS[one.worse],
                    code(one.what),
                    one.level,
                    code(one.before),
                    code(one.after),
                    code(one.detail),
                ]
                for one in some[:ROWS]
            ]
            lines += ["", f"### {title.capitalize()}"] if some else []
            lines += table(["", "what", "level", "before", "after", "where"], cells)
            lines += ["", f"and {len(some) - ROWS} more"] if len(some) > ROWS else []
        return "\n".join(lines) + "\n"

    def summary(self) -> list[str]:
        """Return how many changes of each kind there are, and how much was compared."""
        lines = []
        for kind, title in KINDS.items():
            some = [change.worse for change in self.changes if change.kind == kind]
            counts = [f"{some.count(worse)} {word}" for worse, word in WORDS.items() if worse in some]
            lines += [f"{title}: {len(some)} ({', '.join(counts)})"] if some else []
        return [*lines, f"compared: {self.counted()}; {len(self.worse) or 'nothing'} worse"]

    def counted(self) -> str:
        """Return how many cases, records and errors, or speeds, were compared."""
        return ", ".join(f"{count} {what}" for what, count in self.compared.items())


def only(tables: Tables, run: str) -> Tables:
    """Return the tables with the rows of one run only."""
    frames = {
        name: frame[frame["run"] == run].reset_index(drop=True) if "run" in frame else frame
        for name, frame in tables.by_name().items()
    }
    return Tables(**frames)


def difference(before: Tables, after: Tables, strict: bool = False) -> Difference:
    """Compare two runs.

    Args:
        before: tables of one run; see `only`.
        after: tables of the other.
        strict: whether the second run must equal the first: every outcome and record that differs is worse,
            also another kind of failure, and a case that only one of the runs has.

    Raises:
        CompareError: the runs are of different kinds, or of a kind that cannot be compared.
    """
    one, other = (rows(tables.runs)[0] for tables in (before, after))
    if one["kind"] != other["kind"] or one["kind"] not in ("conformance", "bench"):
        raise CompareError(
            f"{one['file']} is of {one['kind']} and {other['file']} of {other['kind']}: "
            "two results of `keyedopt check`, or two of `keyedopt bench`, can be compared"
        )
    sides = (Side(before, one), Side(after, other))
    compare = _conformance(sides, strict) if one["kind"] == "conformance" else _bench(sides)
    order = {True: 0, None: 1, False: 2}
    compare.changes.sort(key=lambda change: (list(KINDS).index(change.kind), order[change.worse]))
    titles = (_title(one), _title(other))
    return Difference(*titles, tuple(compare.notes), tuple(compare.changes), compare.counts)


@dataclass(frozen=True)
class Side:
    """The tables of one run, and its row of `runs`."""

    tables: Tables
    run: Mapping[str, Any]


@dataclass
class _Found:
    """Changes, notes and counts of a comparison that goes on."""

    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)


def _title(run: Mapping[str, Any]) -> str:
    parts = [f"torch {run['torch']}", run["gpu"], run["device"], run["processor"]]
    if isinstance(run["suite_version"], str):
        parts.append(f"suite {run['suite_version']} ({run['suite_hash']})")
    said = ", ".join(part for part in parts if isinstance(part, str))
    return one_line(f"{run['implementation']} {run['version']} ({said})")


# --- conformance ----------------------------------------------------------------------------------

Sides = tuple[Side, Side]


def _conformance(sides: Sides, strict: bool) -> _Found:
    found = _Found()
    suites = [(side.run["suite_version"], side.run["suite_hash"]) for side in sides]
    if suites[0] != suites[1]:
        said = " and ".join(f"{version} ({digest})" for version, digest in suites)
        found.notes.append(
            f"the suites differ, {said}: cases that only one of them has are not compared, "
            "and a change may come from a case that changed"
        )
    devices = [side.run["device"] for side in sides]
    if devices[0] != devices[1]:
        found.notes.append(f"the devices differ: {devices[0]} and {devices[1]}")
    runs = [Run.of(side.tables) for side in sides]
    cases = [run.cases for run in runs]
    both = [name for name in cases[1] if name in cases[0]]
    if not both and runs[0].unclaimed == runs[1].unclaimed:
        names = (side.run["file"] or side.run["implementation"] for side in sides)
        raise CompareError(f"{' and '.join(names)} have no case in common")
    for word, mine, theirs in (("before", cases[0], cases[1]), ("after", cases[1], cases[0])):
        lost = sorted(set(mine) - set(theirs))
        if lost and strict:
            both += lost
            for name in lost:
                theirs[name] = {**mine[name], "outcome": NOT_RUN, "expected": "", "seen": ""}
        elif lost:
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            found.notes.append(f"only {word}: {len(lost)} cases ({', '.join(lost[:3])}{more})")
    levels = {**runs[0].levels, **runs[1].levels}
    found.counts["cases"] = len(both)
    found.changes += verdict_changes(runs[0], runs[1], both, strict)
    found.changes += _behaviour(sides, cases, levels, strict, found.counts)
    if not strict:
        found.changes += _errors(sides, set(both), levels, found.counts)
    return found


def _behaviour(
    sides: Sides,
    cases: list[dict[str, dict[str, Any]]],
    levels: Mapping[str, str],
    strict: bool,
    counts: dict[str, int],
) -> Iterator[Change]:
    """Yield a change for each case whose records differ."""
    one, other = (_records(side.tables, known, strict) for side, known in zip(sides, cases, strict=True))
    pairs = [key for key in other if key in one]
    counts["records"] = len(pairs)
    for case, clause in pairs:
        was, now = one[case, clause], other[case, clause]
        names = [name for name in dict.fromkeys([*was, *now]) if was.get(name) != now.get(name)]
        if names:
            texts = [_record({name: each[name] for name in names if name in each}) for each in (was, now)]
            worse = True if strict else None
            yield Change("behaviour", clause, levels.get(clause, ""), texts[0], texts[1], worse, case)


def _records(tables: Tables, cases: Cases, strict: bool) -> dict[tuple[str, str], dict[str, str]]:
    """Return the records of each case, by name, and the measurements of cases that have no verdict."""
    found: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for row in rows(tables.records):
        found[row["case"], row["clause"]][row["name"]] = row["text"]
    for row in rows(tables.schedules):
        if cases[row["case"]]["outcome"] == RECORDED:
            found[row["case"], row["clause"]][f"rate at {row['iteration']}"] = repr(row["measured"])
    for row in rows(tables.errors) if strict else ():
        if cases[row["case"]]["outcome"] == RECORDED:
            name = f"error of {row['quantity']} ({row['steps']} steps, {row['rows']} rows)"
            found[row["case"], row["clause"]][name] = repr(row["error"])
    return found


def _record(leaves: Mapping[str, str]) -> str:
    return short("; ".join(f"{name}: {text}" if name else text for name, text in leaves.items())) or "nothing"


def _errors(
    sides: Sides, both: set[str], levels: Mapping[str, str], counts: dict[str, int]
) -> Iterator[Change]:
    """Yield a change for each tensor of a case whose worst error has grown or fallen."""
    found: list[dict[tuple[str, ...], float]] = []
    for side in sides:
        worst: dict[tuple[str, ...], float] = {}
        for row in rows(side.tables.errors):
            if row["case"] in both:
                place = (row["case"], row["clause"], row["quantity"], row["dtype"] or "", row["unit"])
                error = math.inf if row["error"] is None else row["error"]
                worst[place] = max(worst.get(place, 0.0), error)
        found.append(worst)
    pairs = [key for key in found[1] if key in found[0]]
    counts["errors"] = len(pairs)
    for key in pairs:
        case, clause, quantity, dtype, unit = key
        was, now = found[0][key], found[1][key]
        grown, fallen = _grown(was, now, unit), _grown(now, was, unit)
        if grown or fallen:
            where = f"{quantity} {dtype} in {case}"
            texts = [f"{error:.3g} {unit}" for error in (was, now)]
            yield Change("error", clause, levels.get(clause, ""), texts[0], texts[1], grown, where)


def _grown(was: float, now: float, unit: str) -> bool:
    return now > was + GROWN_ULP if unit == "ULP" else now > was * GROWN_TIMES


# --- speeds ---------------------------------------------------------------------------------------

#: Speeds are compared where these are equal.
_SAME_WORK = ("workload", "task", "peer", "threads", "peer_threads")


def _bench(sides: Sides) -> _Found:
    """Return the comparisons whose intervals, widened by the noise, no longer overlap."""
    found = _Found()
    one, other = (side.run for side in sides)
    for what in ("implementation", "machine", "processor", "gpu", "device"):
        if one[what] != other[what]:
            found.notes.append(f"{what}: {one[what]} before, {other[what]} after")
    tables = [
        {tuple(row[what] for what in _SAME_WORK): row for row in rows(side.tables.speeds)} for side in sides
    ]
    for word, mine, theirs in (("before", *tables), ("after", *reversed(tables))):
        lost = [_work(key) for key in mine if key not in theirs]
        if lost:
            found.notes.append(f"only {word}: {', '.join(lost)}")
    pairs = [key for key in tables[1] if key in tables[0]]
    if not pairs:
        raise CompareError(f"{one['file']} and {other['file']} have no comparison in common")
    found.counts["speeds"] = len(pairs)
    for key in pairs:
        was, now = (table[key] for table in tables)
        slower, faster = _apart(now, was), _apart(was, now)
        detail = ""
        if was["matches"] != now["matches"]:
            detail = f"results {'match' if now['matches'] else 'do not match'} now"
        if slower or faster or detail:
            worse = slower or bool(detail and not now["matches"])
            texts = [f"{row['ratio']:.2f} x ({row['low']:.2f}-{row['high']:.2f})" for row in (was, now)]
            found.changes.append(Change("speed", _work(key), "", texts[0], texts[1], worse, detail))
    return found


def _work(key: Sequence[Any]) -> str:
    workload, task, peer, *threads = key
    counted = "" if None in threads else f", threads {threads[0]} / {threads[1]}"
    return f"{workload} {task}, {peer}{counted}"


def _apart(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> bool:
    """Whether one interval of ratios, widened by its noise, is below another."""
    return bool(lower["high"] * (1 + lower["noise"]) < upper["low"] * (1 - upper["noise"]))
