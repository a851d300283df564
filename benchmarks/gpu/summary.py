"""A short table of the results of `first_light`: ``python -m keyedopt.benchmarks.gpu.summary FOLDER``."""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from keyedopt.benchmarks.gpu.stage import STAGES
from keyedopt.conformance.results.errors import ResultError
from keyedopt.conformance.results.files import parse_json, read_text


def lines(folder: Path) -> list[str]:
    """Return the lines of the table."""
    said = []
    for stage in STAGES:
        if not (folder / stage.file).exists():
            continue
        try:
            found = parse_json(read_text(folder / stage.file))
        except (ResultError, ValueError):
            said.append(f"{stage.number} {stage.name}: cannot be read")
            continue
        try:
            said += [f"{stage.number} {stage.name}: {line}" for line in of_stage(stage.name, found)]
        except (KeyError, TypeError, AttributeError, ValueError):
            said.append(f"{stage.number} {stage.name}: of another format")
    return said


def of_stage(name: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one stage."""
    if not found["complete"]:
        yield "cut short" + (f" by {found['error']}" if "error" in found else "")
    yield from {
        "environment": _environment,
        "kernels": _kernels,
        "conformance": _conformance,
        "checks": _checks,
        "speed": _speed,
        "counters": _counters,
        "asv": _asv,
    }[name](found)


def _environment(found: Mapping[str, Any]) -> Iterator[str]:
    for name, version in found.get("imports", {}).items():
        if "Error" in version:
            yield f"{name} cannot be imported: {version}"
    if "doctor_code" in found:
        yield f"doctor: exit code {found['doctor_code']}"


def _kernels(found: Mapping[str, Any]) -> Iterator[str]:
    cases = found.get("cases", [])
    yield f"{sum(not one['wrong'] for one in cases)} of {found.get('of', 0)} cases right"
    if cases and found.get("first_wrong"):
        yield f"first wrong: {found['first_wrong']}"


def _conformance(found: Mapping[str, Any]) -> Iterator[str]:
    for name, one in found.get("checks", {}).items():
        cases = (one.get("result") or {}).get("cases", [])
        counts = Counter(case["outcome"] for case in cases)
        yield f"{name}: {one['outcome']}; " + ", ".join(f"{counts[key]} {key}" for key in sorted(counts))


def _checks(found: Mapping[str, Any]) -> Iterator[str]:
    checks = found.get("checks", [])
    yield f"{sum(one['outcome'] == 'held' for one in checks)} of {len(checks)} held"
    for one in checks:
        if one["outcome"] != "held":
            yield f"{one['check']} {one.get('algorithm', '')} {one['outcome']}: {one.get('message', '')}"
    for tool, one in found.get("sanitizer", {}).items():
        yield f"{tool}: {one['outcome']}"
    yield from found.get("times", [])


def _speed(found: Mapping[str, Any]) -> Iterator[str]:
    ratios: dict[tuple[str, str], list[float]] = {}
    for report in found.get("reports", []):
        for row in report["rows"]:
            matches = "" if row["matches"] else ", but results differ"
            yield f"{row['workload']:18} {row['task']:26} {row['peer']:8} {row['ratio']:6.2f} x{matches}"
            if row["matches"]:
                ratios.setdefault((row["task"], row["peer"]), []).append(row["ratio"])
        for one in report["skipped"]:
            yield f"{one['workload']:18} {one['task']:26} {one['who']:8} left out: {one['why']}"
    for (task, peer), each in sorted(ratios.items()):
        mean = math.exp(sum(map(math.log, each)) / len(each))
        yield f"geometric mean of {len(each)}: {task} {peer} {mean:.2f} x"
    for one in found.get("host", []):
        if "seconds" in one:
            text = f"{1e6 * one['seconds']:.0f} µs on the host, {one['launches']} launches"
            yield f"{one['tables']} tables, {one['implementation']}: {text}"


def _counters(found: Mapping[str, Any]) -> Iterator[str]:
    for name, one in found.get("workloads", {}).items():
        yield f"{name}: {one['outcome']}, {len(one['kernels'])} kernels"


def _asv(found: Mapping[str, Any]) -> Iterator[str]:
    if "outcome" in found:
        yield found["outcome"]
    for commit, one in found.get("runs", {}).items():
        yield f"{commit[:10]}: {one if isinstance(one, str) else one['outcome']}"
    yield f"{len(found.get('files', {}))} files"


def main() -> int:
    """Print the table; return 0."""
    print("\n".join(lines(Path(sys.argv[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
