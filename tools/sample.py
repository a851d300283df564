"""Write made-up results of any size, to measure how long a large report takes.

``python -m keyedopt.tools.sample FOLDER`` writes results of ten implementations with 500 clauses and 100,000
measurements in all: cases, recorded behaviour, measured errors and speeds. With ``--site SITE`` it also
makes the page in a process of its own, and prints the time and the memory that the page took.
"""

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Outcomes; most cases pass.
OUTCOMES = (*["pass"] * 17, "fail", "known", "unsupported")
#: Areas with the prefix and the number of their clauses: clauses of the suite, so that the page has their
#: texts.
AREAS = {
    "keyed": ("KEYED", 100),
    "clipping": ("CLIP", 75),
    "warmup": ("WARM", 70),
    "fused": ("FUSED", 75),
    "algorithms": ("ALGO", 85),
    "sparse": ("SPARSE", 70),
    "in_backward": ("INBW", 25),
}
NAMES = [f"{prefix}-{number:03}" for prefix, count in AREAS.values() for number in range(1, count + 1)]
ALGORITHMS = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "LAMB", "LarsSGD")
DTYPES, VARIANTS = ("float32", "bfloat16", "float16"), ("plain", "sparse", "betas")
QUANTITIES, STEPS = ("weight", "exp_avg", "exp_avg_sq"), 24


def write(folder: Path, implementations: int = 10, clauses: int = 500, measurements: int = 100_000) -> int:
    """Write a result of check and a report of bench for each implementation; return the number of files."""
    folder.mkdir(parents=True, exist_ok=True)
    each = measurements // implementations
    for number in range(implementations):
        for kind, plain in (("check", check(number, clauses, each)), ("bench", bench(number))):
            path = folder / f"{kind}-{number}.json"
            path.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    return 2 * implementations


def check(number: int, clauses: int, measurements: int) -> dict[str, Any]:
    """Return a result of check with so many measurements."""
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


def name(clause: int) -> str:
    """Return the id of the clause at a place; ids beyond those of the suite have no text."""
    return NAMES[clause] if clause < len(NAMES) else f"SAMPLE-{clause:03}"


def cases(number: int, clauses: int, measurements: int) -> Iterator[dict[str, Any]]:
    """Yield the cases: a record of each clause, errors along trajectories, and plain cases."""
    for clause in range(clauses):
        record = {
            "clauses": [name(clause)],
            "outcome": "observed",
            "observed": {"order": number % 3},
        }
        yield {"case": f"test_sample::test_{clause}[record]", **record}
    every = list(itertools.product(ALGORITHMS, DTYPES, VARIANTS))
    for index, (algorithm, dtype, variant) in enumerate(every):
        yield _case(index, number, clauses) | {
            "case": f"test_sample::test_precision[{dtype}-{algorithm}-{variant}]",
            "dtype": dtype,
            "inputs": {"algorithm": algorithm, "made": {"kind": variant}},
            "observed": {"errors": list(_errors(number + index, dtype))},
        }
    done = clauses + len(every) * STEPS * len(QUANTITIES)
    for index in range(measurements - done):
        yield _case(index, number, clauses)


def _errors(start: int, dtype: str) -> Iterator[dict[str, Any]]:
    for step, quantity in itertools.product(range(1, STEPS + 1), QUANTITIES):
        error = 0.5 + (start + step) % 7 / 4
        head = {"quantity": quantity, "dtype": dtype, "unit": "ULP", "steps": step}
        yield {**head, "error": error, "budget": 2.0 + step / 4}


def _case(index: int, number: int, clauses: int) -> dict[str, Any]:
    clause = index % clauses
    outcome = OUTCOMES[(7 * clause + number * (index % 5)) % len(OUTCOMES)]
    return {
        "case": f"test_sample::test_{clause}[{index // clauses}]",
        "clauses": [name(clause)],
        "outcome": outcome,
        "inputs": {"rows": [index % 7, 3, 1], "rate": 0.1},
        "expected": "the weight within its budget" if outcome == "fail" else "",
        "seen": f"another one in row {index % 7}" if outcome == "fail" else "",
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
        "backend": "native",
        "threads": 2,
        "peer_threads": 1,
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


def report(folder: Path, site: Path) -> tuple[float, float]:
    """Make the page of a folder of results; return the seconds and the MiB of memory that the page took.

    Raises:
        subprocess.CalledProcessError: the report could not be made.
    """
    began = time.perf_counter()
    command = [sys.executable, "-m", "keyedopt.cli.main", "report", str(folder), "--output", str(site)]
    subprocess.run(command, check=True)
    return time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--implementations", type=int, default=10)
    parser.add_argument("--clauses", type=int, default=500)
    parser.add_argument("--measurements", type=int, default=100_000)
    parser.add_argument("--site", type=Path)
    asked = parser.parse_args()
    count = write(asked.folder, asked.implementations, asked.clauses, asked.measurements)
    print(f"written: {count} files in {asked.folder}")
    if asked.site:
        seconds, memory = report(asked.folder, asked.site)
        size = (asked.site / "index.html").stat().st_size / 1e6
        print(f"page: {seconds:.1f} s, {memory:.0f} MiB of memory at the peak, a file of {size:.2f} MB")
