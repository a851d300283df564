"""Known failures of an implementation: a TOML file that a gate applies to a result.

Each entry names a clause and its failing cases, gives the reason, and links to a reproducer::

    [[known]]
    clause = "CLIP-007"
    cases = ["test_clipping_layouts::test_dtensor"]
    reason = "the norm is taken of local tensors, which have no gradient"
    link = "conformance/findings/torchrec_dtensor_not_clipped.py"
    expires = 2027-05-31                      # optional
    when = { torchrec = ">=1.8,<1.9", device = "cpu" }   # optional: versions, dtype, device (or "!=cpu"),
                                              # build = "cpu" of torch (or "!=cpu": for an accelerator)

A list may inherit the defects of a base class, which another list marks with ``inherited = true``: a failing
case of the same function is known, whatever its inputs, and is charged to the library of the base class::

    inherits = ["torch"]

A class that changes nothing of a class of that library, under the same name, inherits all of its entries.

A failing case that is listed becomes ``known``. An entry whose case passes, that names a case or a
clause that does not exist, or that has expired, fails the gate, so that the list stays true.
"""

import dataclasses
import datetime
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from tomlkit.items import AoT, Array, Table

from keyedopt.conformance import spec
from keyedopt.conformance.results.errors import KeyedoptError, ResultError, did_you_mean
from keyedopt.conformance.results.files import read_text
from keyedopt.conformance.results.model import Case, Result, write_atomically
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.results.verdict import FAILING, GREEN

#: How the reason of a new entry begins until somebody explains it.
UNEXPLAINED = "to be explained: "
#: The most dots of a line before or after a ``=``: dotted keys are read in quadratic time.
DOTS = 500


class ExpectationsError(KeyedoptError):
    """An expectations file cannot be used; the message says why."""


@dataclass(frozen=True)
class Known:
    """One expected failure: a clause, its failing cases, why, and under which conditions."""

    clause: str
    cases: tuple[str, ...]
    reason: str
    link: str
    expires: datetime.date | None = None
    when: Mapping[str, str] = field(default_factory=dict)
    inherited: bool = False

    def covers(self, case: Case, versions: Mapping[str, str], unchanged: bool = False) -> bool:
        """Whether a case of a library that inherits the entry fails like the cases of the entry.

        Args:
            case: a failing case.
            versions: the versions of the run.
            unchanged: whether the classes of the case are those of the base library: every entry holds.
        """
        functions = {name.partition("[")[0] for name in self.cases}
        alike = self.inherited and case.case.partition("[")[0] in functions
        return (
            self.clause in case.clauses
            and (alike or (unchanged and case.case in self.cases))
            and self.holds(case, versions)
        )

    def holds(self, case: Case, versions: Mapping[str, str]) -> bool:
        """Whether a case of a run with these versions meets the conditions of the entry."""
        for name, wanted in self.when.items():
            if name == "dtype":
                met = case.dtype in (None, wanted)
            elif name == "device":
                met = _is_device(case.device, wanted)
            elif name == "build":
                met = _is_device(build(versions.get("torch", "")), wanted)
            else:
                have = versions.get(canonicalize_name(name), "")
                met = is_version(have) and SpecifierSet(wanted).contains(have, prereleases=True)
            if not met:
                return False
        return True


def _is_device(device: str | None, wanted: str) -> bool:
    """Whether a case ran on a device, or with ``!=`` before it, on another one; None ran no operator."""
    if device is None:
        return not wanted.startswith("!=")
    same = wanted.removeprefix("!=") in (device, device.partition(":")[0])
    return same != wanted.startswith("!=")


def build(torch_version: str) -> str:
    """Return what a build of torch is for: "cpu", or the label of an accelerator.

    >>> build("2.13.0+cpu"), build("2.14.1+cu130"), build("2.13.0")
    ('cpu', 'cu130', 'cpu')
    """
    local = Version(torch_version).local if is_version(torch_version) else None
    return local or "cpu"


def is_version(text: str) -> bool:
    """Whether a text is a version as PEP 440 defines it."""
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def find(name: str, *, new: bool = False) -> Path:
    """Return the path of a file, or of the list that keyedopt ships for an implementation of that name.

    Args:
        name: the path or the name.
        new: whether the file may be missing.

    Raises:
        ExpectationsError: neither exists, and the file may not be missing.
    """
    path = Path(name)
    if path.exists():
        return path
    shipped = Path(__file__).parent / f"{name}.toml"
    if shipped.exists():
        return shipped
    if new:
        return path
    have = sorted(item.stem for item in shipped.parent.glob("*.toml"))
    raise ExpectationsError(
        f"there is no expectations file {name!r}; keyedopt ships one for: {', '.join(have)}"
        f"{did_you_mean(name, have)}"
    )


def read(path: Path) -> tuple[Known, ...]:
    """Read an expectations file.

    Raises:
        ExpectationsError: the file is not TOML, or an entry is not as documented.
    """
    plain = _parsed(path)
    if set(plain) - {"known", "inherits"} or not isinstance(plain.get("known", []), list):
        raise ExpectationsError(f"{path} may hold [[known]] entries only, not {', '.join(plain)}")
    entries = tuple(_entry(path, number, item) for number, item in enumerate(plain.get("known", ()), 1))
    listed = Counter((e.clause, case, *sorted(e.when.items())) for e in entries for case in e.cases)
    twice = [f"{clause} by {case}" for (clause, case, *_), count in listed.items() if count > 1]
    if twice:
        raise ExpectationsError(f"{path} lists {twice[0]} twice")
    return entries


def _parsed(path: Path) -> dict[str, Any]:
    """Return the contents of an expectations file.

    Raises:
        ExpectationsError: it is missing, not UTF-8, or not TOML.
    """
    try:
        text = read_text(path)
        if max(part.count(".") for line in text.splitlines() or [""] for part in line.split("=")) > DOTS:
            raise ValueError(f"a key, or a text, of one line has more than {DOTS} dots")
        return tomllib.loads(text)
    except (ResultError, ValueError, RecursionError) as error:
        raise ExpectationsError(f"{path} cannot be read: {error}") from error


def inherited(path: Path) -> tuple[tuple[str, Known], ...]:
    """Return the entries of the lists of base classes, each with the library that an expectations file names.

    Raises:
        ExpectationsError: a list does not exist, or cannot be read.
    """
    names = _parsed(path).get("inherits", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ExpectationsError(f"{path}: 'inherits' must list names of libraries, such as [\"torch\"]")
    return tuple(
        (name, dataclasses.replace(entry, reason=f"inherited from {name}: {entry.reason}"))
        for name in names
        for entry in read(find(name))
    )


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
    if not isinstance(item.get("inherited", False), bool):
        raise ExpectationsError(f"{where}: 'inherited' must be true or false")
    expires = item.get("expires")
    if expires is not None and (
        not isinstance(expires, datetime.date) or isinstance(expires, datetime.datetime)
    ):
        raise ExpectationsError(f"{where}: 'expires' must be a date such as 2027-05-31")
    when = item.get("when", {})
    if not isinstance(when, dict) or not all(isinstance(value, str) for value in when.values()):
        raise ExpectationsError(f"{where}: 'when' must map device, dtype, build or a distribution to a text")
    for name, value in when.items():
        if name not in ("device", "dtype", "build"):
            try:
                SpecifierSet(value)
            except InvalidSpecifier as error:
                raise ExpectationsError(f"{where}: {name} = {value!r} is not a version range") from error
    return Known(**{**item, "cases": tuple(cases)})


class _Run:
    """The cases of a result, and which entries the run can judge."""

    def __init__(self, result: Result) -> None:
        self.cases = {case.case: case for case in result.cases}
        versions = {**result.implementation["versions"], "torch": result.environment["torch"]}
        self.versions = {str(canonicalize_name(name)): text for name, text in versions.items()}
        options = result.options
        parts = any(options.get(name) for name in ("areas", "clauses", "dtypes"))
        self._whole = result.complete and not parts
        self._device = result.environment["device"]
        self._areas = result.implementation["areas"]
        self._suite = spec.version_key(options.get("suite") or spec.SUITE_VERSION)
        self._places = result.implementation.get("places", {})
        self._unchanged = result.implementation.get("unchanged", {})

    def inherits(self, case: Case, base: Sequence[tuple[str, Known]]) -> Known | None:
        """Return the entry of a base library that a failing case is charged to, or None."""
        names = {case.inputs.get("algorithm")} - {None}
        if not names:
            areas = {spec.clauses()[clause].area for clause in case.clauses if clause in spec.clauses()}
            names = {name for area in areas for name in spec.areas()[area].names if name in self._places}
        owners = {self._unchanged.get(name) for name in names}
        return next(
            (entry for owner, entry in base if entry.covers(case, self.versions, owners == {owner})), None
        )

    def judges(self, entry: Known, name: str) -> bool:
        """Whether the run can judge a case of an entry; some are outside a part of the suite."""
        if name in self.cases:
            return entry.holds(self.cases[name], self.versions)
        if not _is_device(self._device, entry.when.get("device", self._device)):
            return False
        clause = spec.clauses().get(entry.clause)
        if clause is None:
            return self._whole
        return self._whole and clause.area in self._areas and spec.version_key(clause.since) <= self._suite


def apply(result: Result, known: Sequence[Known], path: Path, today: datetime.date | None = None) -> Result:
    """Return the result with its expected failures marked as known, and with the problems of the list.

    A run of a part of the suite (some areas, some dtypes) judges only entries whose cases it ran.
    """
    today = today or datetime.datetime.now(tz=datetime.UTC).date()
    run = _Run(result)
    problems: list[str] = []
    marked: dict[str, Case] = dict(run.cases)
    for entry in known:
        if entry.clause not in spec.clauses():
            problems.append(f"stale: there is no clause {entry.clause}")
            continue
        expired = entry.expires is not None and entry.expires < today
        if expired:
            problems.append(f"expired on {entry.expires}: {entry.clause} ({entry.reason})")
        for name in entry.cases:
            case = run.cases.get(name)
            if not run.judges(entry, name):
                continue
            if case is None:
                problems.append(f"stale: {entry.clause} names the case {name}, which does not exist")
            elif entry.clause not in case.clauses:
                problems.append(f"stale: the case {name} does not test {entry.clause}")
            elif case.outcome in FAILING and not expired:
                about = {"reason": entry.reason, "link": entry.link}
                marked[name] = dataclasses.replace(case, outcome="known", known=about)
            elif case.outcome in GREEN:
                problems.append(f"unexpected pass: {entry.clause} by {name}; delete it from the list")
                marked[name] = dataclasses.replace(case, outcome="unexpected-pass")
    base = inherited(path) if path.exists() else ()
    for name, case in marked.items():
        if case.outcome in FAILING and (own := run.inherits(case, base)):
            about = {"reason": own.reason, "link": own.link}
            marked[name] = dataclasses.replace(case, outcome="known", known=about)
    return dataclasses.replace(
        result,
        cases=tuple(marked[case.case] for case in result.cases),
        expectations={"file": path.name, "problems": problems},
    )


def update(path: Path, result: Result) -> int:
    """Rewrite an expectations file so that it lists exactly the failures of a result.

    Entries that still fail keep their reasons, links, dates, conditions and comments. Entries that the run
    cannot judge (other areas, dtypes, conditions) stay too. A new failure gets an entry with placeholders for
    the reason and the link.

    Returns:
        The number of new entries.
    """
    old = read(path) if path.exists() else ()
    run = _Run(result)
    base = inherited(path) if path.exists() else ()
    failing = {
        (clause, case.case): case
        for case in result.cases
        if case.outcome in FAILING and not run.inherits(case, base)
        for clause in case.clauses
    }
    kept = [
        tuple(name for name in entry.cases if (entry.clause, name) in failing or not run.judges(entry, name))
        for entry in old
    ]
    listed = {
        (entry.clause, name)
        for entry, names in zip(old, kept, strict=True)
        for name in names
        if run.judges(entry, name)
    }
    fresh: dict[str, list[str]] = {}
    for clause, name in failing:
        if (clause, name) not in listed:
            fresh.setdefault(clause, []).append(name)
    document = tomlkit.parse(path.read_text(encoding="utf-8").rstrip("\n") + "\n" if path.exists() else "")
    tables = document.get("known")
    if not isinstance(tables, AoT):
        document["known"] = tables = tomlkit.aot()
        for entry in old:
            tables.append(_table(entry))
    for index in reversed(range(len(old))):
        if not kept[index]:
            del tables[index]
        elif kept[index] != old[index].cases:
            tables[index]["cases"] = _array(kept[index])
    for clause, names in sorted(fresh.items()):
        reason = f"{UNEXPLAINED}{one_line(failing[clause, names[0]].seen, 300)}"
        tables.append(_table(Known(clause, tuple(names), reason, "to be given: a reproducer")))
    write_atomically(path, tomlkit.dumps(document))
    return len(fresh)


def _array(names: Sequence[str]) -> Array:
    array = tomlkit.array()
    array.extend(names)
    return array.multiline(len(names) > 1)


def _table(entry: Known) -> Table:
    table = tomlkit.table()
    table["clause"] = entry.clause
    table["cases"] = _array(entry.cases)
    table["reason"] = entry.reason
    table["link"] = entry.link
    if entry.expires is not None:
        table["expires"] = entry.expires
    if entry.inherited:
        table["inherited"] = True
    if entry.when:
        when = tomlkit.inline_table()
        when.update(dict(entry.when))
        table["when"] = when
    return table
