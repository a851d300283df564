"""Find regressions in asv's results: ``python -m keyedopt.benchmarks.asv.history [FOLDER]``.

asv's exit codes do not show regressions (``asv compare`` ends with 0), so its result files are read:
``FOLDER/<machine>/<commit>-<environment>.json``, format version 2, and ``FOLDER/benchmarks.json`` with the
names of parameters and the units. benchmarks/README.md describes both. A step is a permanent change of the
level of a series, found by asv's own method (piecewise constant, absolute deviations). A regression is a step
up, by more than the threshold, of bytes or of the ratio to a pinned peer in the same process. Seconds and
throughput have no regressions: they also change with the machine.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from keyedopt.conformance.results.errors import KeyedoptError, ResultError
from keyedopt.conformance.results.files import parse_json, read_text
from keyedopt.conformance.results.untrusted import error_text, one_line

#: The versions of asv's formats that this module reads.
RESULTS_VERSION, BENCHMARKS_VERSION = 2, 2
#: Files that are not results.
NO_RESULTS = ("machine.json", "benchmarks.json")
#: The unit of the time over that of a peer in the same process.
RATIO = "of peer"
#: Units in which an increase is a regression.
COSTS = (RATIO, "bytes")
#: The default threshold of a regression.
THRESHOLD = 0.1


class HistoryError(KeyedoptError):
    """A result cannot be read; the message says which and why."""


@dataclass(frozen=True)
class Measurement:
    """The value of one benchmark for one commit.

    Args:
        benchmark: asv's name for it: module, class and method.
        params: the parameters by name.
        unit: the unit of the value.
        machine: the name of the machine.
        commit: the full hash.
        date: the date of the commit.
        value: the median.
        low, high: its 99 % confidence interval; None if there were too few samples.
        samples: the number of samples; None for a benchmark that is not timed.
    """

    benchmark: str
    params: tuple[tuple[str, str], ...]
    unit: str
    machine: str
    commit: str
    date: datetime
    value: float
    low: float | None
    high: float | None
    samples: int | None

    @property
    def series(self) -> tuple[str, tuple[tuple[str, str], ...], str]:
        """The series that the measurement belongs to: benchmark, parameters, machine."""
        return self.benchmark, self.params, self.machine


@dataclass(frozen=True)
class Step:
    """A change of the level of a series: the first measurement at the new level, and both levels."""

    at: Measurement
    before: float
    after: float

    @property
    def factor(self) -> float:
        """The new level over the old one."""
        return self.after / self.before if self.before else math.inf

    def __str__(self) -> str:
        """Return benchmark, parameters, machine, commit and change in one line."""
        params = ", ".join(f"{name}={value}" for name, value in self.at.params)
        change = f"{self.before:.3g} to {self.after:.3g} {self.at.unit}, {self.factor:.2f} times"
        return f"{self.at.benchmark}({params}) on {self.at.machine} at {self.at.commit[:10]}: {change}"


def read(folder: Path) -> list[Measurement]:
    """Return the measurements in a folder of asv's results, by date.

    Raises:
        HistoryError: the folder or a file cannot be read, or has another version of the format.
    """
    about = _load(folder / "benchmarks.json", BENCHMARKS_VERSION)
    files = sorted(path for path in folder.glob("*/*.json") if path.name not in NO_RESULTS)
    found = [item for path in files for item in _measurements(path, about)]
    return sorted(found, key=lambda item: (item.date, item.series))


def _load(path: Path, version: int) -> dict[str, Any]:
    try:
        data = parse_json(read_text(path))
        seen = data["version"]
    except ResultError as error:
        raise HistoryError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise HistoryError(f"{path} is not a file of asv") from error
    if seen != version:
        raise HistoryError(
            f"{path} has version {one_line(repr(seen), 80)} of asv's format, not {version}: use asv 0.6"
        )
    return dict(data)


def _measurements(path: Path, about: dict[str, Any]) -> Iterable[Measurement]:
    data = _load(path, RESULTS_VERSION)
    try:
        machine, commit = str(data["params"]["machine"]), str(data["commit_hash"])
        date = datetime.fromtimestamp(data["date"] / 1000, UTC)
        for name, listed in data["results"].items():
            row = dict(zip(data["result_columns"], listed, strict=False))
            if row.get("result") is None:
                continue  # every combination of parameters failed
            known = about.get(name, {})
            names = known.get("param_names") or [f"param{place}" for place in range(len(row["params"]))]
            for index, chosen in enumerate(itertools.product(*row["params"])):
                value = _at(row, "result", index)
                if value is None or value != value:
                    continue  # left out, or failed
                yield Measurement(
                    benchmark=name,
                    params=tuple((key, text.strip("'")) for key, text in zip(names, chosen, strict=True)),
                    unit=str(known.get("unit", "")),
                    machine=machine,
                    commit=commit,
                    date=date,
                    value=float(value),
                    low=_bound(_at(row, "stats_ci_99_a", index)),
                    high=_bound(_at(row, "stats_ci_99_b", index)),
                    samples=_at(row, "stats_repeat", index),
                )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, OSError) as error:
        raise HistoryError(f"{path} is not a result of asv: {one_line(error_text(error), 200)}") from error


def _at(row: dict[str, Any], column: str, index: int) -> Any:
    values = row.get(column)
    return values[index] if values is not None else None


def _bound(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def steps(measurements: Iterable[Measurement]) -> list[Step]:
    """Return the steps of all series, by date.

    Raises:
        HistoryError: asv is not installed.
    """
    try:
        from asv.step_detect import detect_steps
    except ImportError as error:
        raise HistoryError("asv is needed to find steps: pip install 'keyedopt[bench]'") from error
    by_series: dict[Any, list[Measurement]] = {}
    for item in measurements:
        by_series.setdefault(item.series, []).append(item)
    found = []
    for series in by_series.values():
        series.sort(key=lambda item: item.date)
        weights = [_weight(item) for item in series]
        pieces = detect_steps([item.value for item in series], weights)
        for (_, _, before, _, _), (start, _, after, _, _) in itertools.pairwise(pieces):
            found.append(Step(series[start], before, after))
    return sorted(found, key=lambda step: step.at.date)


def _weight(item: Measurement) -> float:
    """Return the weight of a value: the inverse of the relative width of its interval."""
    if item.low is None or item.high is None or item.high <= item.low:
        return 1.0
    return abs(item.value) / (item.high - item.low) or 1.0


def regressions(found: Sequence[Step], threshold: float = THRESHOLD) -> list[Step]:
    """Return the steps up of ratios or bytes by more than a threshold."""
    return [step for step in found if step.at.unit in COSTS and step.factor > 1 + threshold]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print regressions; return 0 if there are none, 1 if there are, 2 on bad input."""
    default = Path("benchmarks/results/asv")
    parser = argparse.ArgumentParser(prog="python -m keyedopt.benchmarks.asv.history", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=default, help=f"default: {default}")
    parser.add_argument("--threshold", type=float, default=THRESHOLD, help="default: %(default)s")
    given = parser.parse_args(arguments)
    try:
        measured = read(given.folder)
        worse = regressions(steps(measured), given.threshold)
    except HistoryError as error:
        sys.stderr.write(f"keyedopt: {error}\n")
        return 2
    series = {item.series for item in measured}
    commits = {item.commit for item in measured}
    for step in worse:
        print(step)
    print(f"{len(worse)} regressions in {len(series)} series of {len(commits)} commits")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
