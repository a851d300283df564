"""Made-up results of any size, to see how a report of many behaves.

``python -m keyedopt.reports.sample FOLDER`` writes ten implementations with 500 clauses and 100,000
measurements in all: cases, recorded behaviour, measured errors, rates and speeds.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Outcomes, the usual one most often.
OUTCOMES = (*["pass"] * 17, "fail", "known", "unsupported")
AREAS = ("keyed", "combined", "clipping", "warmup", "algorithms")
DTYPES = ("float32", "bfloat16", "float16")


def write(folder: Path, implementations: int = 10, clauses: int = 500, measurements: int = 100_000) -> int:
    """Write a result of check and one of bench for each implementation; return how many files."""
    folder.mkdir(parents=True, exist_ok=True)
    each = measurements // implementations
    for number in range(implementations):
        for kind, plain in (("check", check(number, clauses, each)), ("bench", bench(number))):
            path = folder / f"{kind}-{number}.json"
            path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    return 2 * implementations


def check(number: int, clauses: int, measurements: int) -> dict[str, Any]:
    """Return a result of check with so many measurements, most of them errors of a case each a few."""
    return {
        "schema": 1,
        "implementation": {
            "name": f"sample{number}",
            "target": f"sample{number}",
            "version": "1.0",
            "versions": {},
            "areas": list(AREAS),
        },
        "environment": {"python": "3.11.7", "torch": "2.13.0", "keyedopt": "0.1.0", "device": "cpu"},
        "suite": {"version": "0.1", "hash": "0123456789abcdef"},
        "options": {"level": "should"},
        "started": f"2026-11-21T08:{number % 60:02}:00+00:00",
        "seconds": 60.0,
        "complete": True,
        "cases": list(cases(number, clauses, measurements)),
    }


def cases(number: int, clauses: int, measurements: int) -> Iterator[dict[str, Any]]:
    """Yield the cases: one of each clause records a text, the others ten errors each, after more steps."""
    for clause in range(clauses):
        record = {
            "clauses": [f"SAMPLE-{clause:03}"],
            "outcome": "observed",
            "observed": {"order": number % 3},
        }
        yield {"case": f"test_sample::test_{clause}[record]", **record}
    for index in range((measurements - clauses) // 11):
        clause = index % clauses
        outcome = OUTCOMES[(7 * clause + number * (index % 5)) % len(OUTCOMES)]
        dtype = DTYPES[index % len(DTYPES)]
        errors = [
            {
                "quantity": "weight",
                "dtype": dtype,
                "unit": "ULP",
                "budget": 2.0 + step / 4,
                "error": round(0.5 + (number + index + step) % 7 / 4, 3),
                "steps": step,
            }
            for step in range(1, 11)
        ]
        yield {
            "case": f"test_sample::test_{clause}[{index}]",
            "clauses": [f"SAMPLE-{clause:03}"],
            "outcome": outcome,
            "dtype": dtype,
            "inputs": {"algorithm": "Adam", "rows": [index % 7, 3, 1], "rate": 0.1},
            "expected": "the weight within its budget" if outcome == "fail" else "",
            "seen": "another one" if outcome == "fail" else "",
            "observed": {"errors": errors},
            "seconds": 0.01,
        }


def bench(number: int) -> dict[str, Any]:
    """Return a report of the benchmarks."""
    row = {
        "workload": "sample",
        "task": "train",
        "implementation": f"sample{number}",
        "peer": "torch",
        "ratio": 1.0 + number / 4,
        "low": 0.9 + number / 4,
        "high": 1.1 + number / 4,
        "noise": 0.02,
        "seconds": {"median": 0.01},
        "peer_seconds": {"median": 0.02},
        "bound": 0.005,
        "first": 0.1,
        "bytes": 10**8,
        "matches": True,
    }
    where = {
        "cpu": "a CPU",
        "cores": 2,
        "load": [0.1],
        "device": "cpu",
        "gpu": None,
        "python": "3.11.7",
        "system": "Linux x86_64",
        "versions": {"torch": "2.13.0"},
        "commit": None,
    }
    return {
        "kind": "keyedopt-bench",
        "schema": 1,
        "implementation": f"sample{number}",
        "environment": where,
        "bandwidth": 2e10,
        "started": f"2026-11-21T09:{number % 60:02}:00+00:00",
        "seconds": 1.0,
        "rows": [{**row, "workload": f"sample-{index}"} for index in range(10)],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--implementations", type=int, default=10)
    parser.add_argument("--clauses", type=int, default=500)
    parser.add_argument("--measurements", type=int, default=100_000)
    asked = parser.parse_args()
    count = write(asked.folder, asked.implementations, asked.clauses, asked.measurements)
    print(f"written: {count} files in {asked.folder}")
