"""Known failures of an implementation: a TOML file that a gate applies to a result.

Each entry names a clause and the cases of it that fail, says why, and links to a reproducer::

    [[known]]
    clause = "CLIP-007"
    cases = ["test_clipping_layouts::test_dtensor"]
    reason = "the norm is taken of local tensors, which have no gradient"
    link = "conformance/findings/torchrec_dtensor_not_clipped.py"
    expires = 2027-05-31                      # optional
    when = { torchrec = ">=1.8,<1.9", device = "cpu" }   # optional: versions, device, dtype

A failing case that is listed becomes ``known``. An entry whose case passes, that names a case or a
clause that does not exist, or that has expired, fails the gate: a list of excuses must stay true.
"""

import dataclasses
import datetime
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from keyedopt.conformance import spec
from keyedopt.conformance.result import Case, Result, write_atomically
from keyedopt.conformance.verdict import FAILING
from packaging.specifiers import InvalidSpecifier, SpecifierSet


class ExpectationsError(Exception):
    """An expectations file that cannot be used; the message says why."""


@dataclass(frozen=True)
class Known:
    """One expected failure: a clause, its failing cases, why, and under which conditions."""

    clause: str
    cases: tuple[str, ...]
    reason: str
    link: str
    expires: datetime.date | None = None
    when: Mapping[str, str] = field(default_factory=dict)

    def applies(self, case: Case, versions: Mapping[str, str]) -> bool:
        """Whether the entry speaks of this case under the conditions of the run."""
        if self.clause not in case.clauses or case.case not in self.cases:
            return False
        return self.holds(case, versions)

    def holds(self, case: Case, versions: Mapping[str, str]) -> bool:
        """Whether the conditions of the entry are met."""
        for name, wanted in self.when.items():
            if name in ("device", "dtype"):
                if (getattr(case, name) or wanted) != wanted:
                    return False
            elif name not in versions or not SpecifierSet(wanted).contains(versions[name], prereleases=True):
                return False
        return True


def find(name: str) -> Path:
    """Return a file, or the one that keyedopt ships for an implementation of that name."""
    path = Path(name)
    if path.exists():
        return path
    shipped = Path(__file__).parent / f"{name}.toml"
    if shipped.exists():
        return shipped
    have = ", ".join(sorted(item.stem for item in shipped.parent.glob("*.toml")))
    raise ExpectationsError(f"there is no expectations file {name!r}; keyedopt ships one for: {have}")


def read(path: Path) -> tuple[Known, ...]:
    """Read an expectations file.

    Raises:
        ExpectationsError: not TOML, or an entry is not as documented.
    """
    try:
        plain = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ExpectationsError(f"{path} cannot be read: {error}") from error
    if set(plain) - {"known"} or not isinstance(plain.get("known", []), list):
        raise ExpectationsError(f"{path} may hold [[known]] entries only, not {sorted(plain)}")
    return tuple(_entry(path, number, item) for number, item in enumerate(plain.get("known", ()), 1))


def _entry(path: Path, number: int, item: Any) -> Known:
    where = f"{path}, entry {number}"
    names = {part.name for part in dataclasses.fields(Known)}
    if not isinstance(item, dict) or set(item) - names:
        raise ExpectationsError(f"{where}: allowed are {', '.join(sorted(names))}")
    for name in ("clause", "reason", "link"):
        if not isinstance(item.get(name), str) or not item[name].strip():
            raise ExpectationsError(f"{where}: {name!r} must be a text that is not empty")
    cases = item.get("cases")
    if not isinstance(cases, list) or not cases or not all(isinstance(case, str) for case in cases):
        raise ExpectationsError(f"{where}: 'cases' must list the names of the failing cases")
    expires = item.get("expires")
    if expires is not None and (
        not isinstance(expires, datetime.date) or isinstance(expires, datetime.datetime)
    ):
        raise ExpectationsError(f"{where}: 'expires' must be a date such as 2027-05-31")
    when = item.get("when", {})
    if not isinstance(when, dict) or not all(isinstance(value, str) for value in when.values()):
        raise ExpectationsError(f"{where}: 'when' must map device, dtype or a distribution to a text")
    for name, value in when.items():
        if name not in ("device", "dtype"):
            try:
                SpecifierSet(value)
            except InvalidSpecifier as error:
                raise ExpectationsError(f"{where}: {name} = {value!r} is no version range") from error
    return Known(**{**item, "cases": tuple(cases)})


def apply(result: Result, known: Sequence[Known], path: Path, today: datetime.date | None = None) -> Result:
    """Mark the expected failures of a result, and note what is wrong with the list.

    A part of the suite (some areas, some dtypes) can only judge the entries that it ran.
    """
    today = today or datetime.datetime.now(tz=datetime.UTC).date()
    versions = {**result.implementation["versions"], "torch": result.environment["torch"]}
    ran = {case.case: case for case in result.cases}
    whole = result.complete and not result.options.get("areas") and not result.options.get("dtypes")
    problems: list[str] = []
    marked: dict[str, Case] = dict(ran)
    for entry in known:
        if entry.clause not in spec.clauses():
            problems.append(f"stale: there is no clause {entry.clause}")
            continue
        expired = entry.expires is not None and entry.expires < today
        if expired:
            problems.append(f"expired on {entry.expires}: {entry.clause} ({entry.reason})")
        for name in entry.cases:
            case = ran.get(name)
            if case is None:
                if whole:
                    problems.append(f"stale: {entry.clause} names the case {name}, which does not exist")
                continue
            if entry.clause not in case.clauses:
                problems.append(f"stale: the case {name} does not test {entry.clause}")
            elif not entry.holds(case, versions) or expired:
                continue
            elif case.outcome in FAILING:
                about = {"reason": entry.reason, "link": entry.link}
                marked[name] = dataclasses.replace(case, outcome="known", known=about)
            elif case.outcome == "pass":
                problems.append(f"unexpected pass: {entry.clause} by {name}; delete it from the list")
                marked[name] = dataclasses.replace(case, outcome="unexpected-pass")
    return dataclasses.replace(
        result,
        cases=tuple(marked[case.case] for case in result.cases),
        expectations={"file": path.name, "problems": problems},
    )


def update(path: Path, result: Result) -> None:
    """Rewrite an expectations file so that it names just the failures of a result.

    Reasons, links, dates and conditions of entries that still fail are kept, and so are the entries
    that the run could not judge (other areas, dtypes, conditions). A new failure gets an entry whose
    reason and link are to be filled in: until then they say so.
    """
    old = read(path) if path.exists() else ()
    versions = {**result.implementation["versions"], "torch": result.environment["torch"]}
    ran = {case.case: case for case in result.cases}
    failing = {
        (clause, case.case): case
        for case in result.cases
        if case.outcome in (*FAILING, "known")
        for clause in case.clauses
    }
    entries: list[Known] = []
    for entry in old:
        kept = tuple(
            name
            for name in entry.cases
            if (entry.clause, name) in failing
            or (name in ran and not entry.holds(ran[name], versions))
            or (name not in ran and not result.complete)
            or (name not in ran and bool(result.options.get("areas") or result.options.get("dtypes")))
        )
        if kept:
            entries.append(dataclasses.replace(entry, cases=kept))
    listed = {(entry.clause, name) for entry in entries for name in entry.cases}
    fresh: dict[str, list[str]] = {}
    for clause, name in failing:
        if (clause, name) not in listed:
            fresh.setdefault(clause, []).append(name)
    for clause, names in fresh.items():
        reason = f"to be explained: {failing[clause, names[0]].seen}"
        entries.append(Known(clause, tuple(names), reason, "to be given: a reproducer"))
    write_atomically(path, dump(sorted(entries, key=lambda entry: entry.clause)))


def dump(entries: Iterable[Known]) -> str:
    """Write entries as TOML."""
    document = tomlkit.document()
    tables = tomlkit.aot()
    for entry in entries:
        table = tomlkit.table()
        table["clause"] = entry.clause
        table["cases"] = tomlkit.array([*entry.cases]).multiline(len(entry.cases) > 1)  # type: ignore[arg-type]
        table["reason"] = entry.reason
        table["link"] = entry.link
        if entry.expires is not None:
            table["expires"] = entry.expires
        if entry.when:
            when = tomlkit.inline_table()
            when.update(dict(entry.when))
            table["when"] = when
        tables.append(table)
    document["known"] = tables
    return tomlkit.dumps(document)
