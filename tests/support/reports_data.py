"""Results made up for the tests of reports: many implementations, many measurements, hostile text.

``python tests/support/reports_data.py FOLDER`` makes the large report and says how long it took and
how large it is.
"""

import random
import resource
import sys
import time
from pathlib import Path

import pandas as pd

from keyedopt.conformance.results.verdict import SHOWN, UNSUPPORTED, WORDS
from keyedopt.reports import page
from keyedopt.reports.tables import COLUMNS, Clause, tables_of

AREAS = ("keyed", "combined", "wrapper", "clipping", "warmup", "fused", "algorithms", "sparse")
LEVELS = ("must", "should", "should", "should", "recorded")
ALGORITHMS = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "LAMB")
MACHINE = "8 cores"

#: Whatever a name or a message of a stranger may hold.
HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'>",
    "--><svg onload=window.hacked=3>",
    "javascript:window.hacked=4",
    "\u2028 \u2029 \u0085 \x00\x1b[31m\x07 \ufffe",
    "{{ 7 * 7 }} {% raw %} $\\frac{a}{b}$ _under",
    "' \" ` & &lt; \\ \\u003c",
    "日本語 עברית 🚀 e\u0301",
    "<!--<script>",
    "\u202egnp.exe \u2066<b>\u2069 \u200b\ufeff",
    "x" * 5000,
)


def clauses(count=500):
    """Make clauses, of texts as long as the real ones."""
    made = {}
    for number in range(count):
        name = f"{AREAS[number % len(AREAS)].upper()}-{number:03}"
        made[name] = Clause(
            name,
            AREAS[number % len(AREAS)],
            LEVELS[number % len(LEVELS)],
            f"Statement {number} says of a step what holds, in one or two sentences that are long enough.",
            "torchrec.optim: KeyedOptimizer",
            "It follows from what a production user relies on." if number % 2 else "",
            "0.1",
        )
    return made


def run(name, version, number, kind="conformance"):
    """Make a row of the table of runs."""
    values = {
        "run": f"{name} {version}{' bench' if kind == 'bench' else ''}",
        "kind": kind,
        "file": f"results/{name}-{version}.json",
        "implementation": name,
        "version": version,
        "suite_version": "0.1",
        "suite_hash": "abc",
        "started": f"2026-11-{number + 1:02}T10:00:00+00:00",
        "seconds": 21.5,
        "machine": "Linux x86_64",
        "processor": MACHINE,
        "device": "cpu",
        "python": "3.11.7",
        "torch": "2.13.0",
        "complete": True,
        "verdict": WORDS[number % 4] if kind == "conformance" else None,
        "scope": "",
        "gate": ("green", "red")[number % 2],
        **dict.fromkeys(("clauses_checked", "clauses_claimed", "musts_checked", "musts_claimed"), 40),
        "expectations": "expired on 2026-01-01: KEYED-001 (a defect)" if number == 1 else "",
        "restrictions": "step takes no closure (Adam)\none group of parameters (SGD)"
        if number == 1
        else None,
    }
    return [values.get(column) for column in COLUMNS["runs"]]


def results(implementations=10, count=500, cases=4, measurements=100_000, commits=120, text=None, seed=0):
    """Make tables of so many implementations, clauses and measurements; ``text`` replaces messages."""
    dice = random.Random(seed)
    say = dice.choice if text else (lambda _: "a tensor of shape (3, 4), and not (3,), after step 12 " * 3)
    known = clauses(count)
    names = [f"library{number // 2}" if not text else f"{text[number % len(text)]}{number}"
             for number in range(implementations)]  # fmt: skip
    rows = {name: [] for name in COLUMNS}
    labels = []
    for number, name in enumerate(names):
        row = run(name, f"1.{number}", number)
        labels.append(row[0])
        rows["runs"].append(row)
        for index, clause in enumerate(known.values()):
            luck = dice.random()
            outcome = (
                "pass" if luck < 0.7 else dice.choice(SHOWN[:4]) if luck < 0.9 else UNSUPPORTED[index % 2]
            )
            outcome = "recorded" if clause.level == "recorded" else outcome
            bad = 0 if outcome in ("pass", "recorded", *UNSUPPORTED) else dice.randint(1, cases)
            counts = (cases, cases - bad, bad * (outcome != "known"), bad * (outcome == "known"))
            rows["clauses"].append((row[0], clause.id, clause.area, clause.level, outcome, *counts))
            for case in range(cases):
                what = outcome if case < bad or not bad else "pass"
                title = f"test_{clause.area}::test_{index}[{case}]"
                failed = what in SHOWN[:4]
                words = [say(text) if failed else "" for _ in range(4)]
                rows["cases"].append(
                    (
                        row[0],
                        title,
                        clause.id,
                        what,
                        "cpu",
                        "float32",
                        None,
                        *words[:2],
                        "",
                        *words[2:],
                        0.01,
                        "x",
                    )
                )
                if what == "recorded":
                    record = say(text) if text else f"behaviour {dice.randint(0, 2)}"
                    rows["records"].append((row[0], title, clause.id, "with", None, record, None))
    _errors(rows["errors"], dice, labels, list(known), measurements)
    _traffic(rows["records"], labels)
    _schedules(rows["schedules"], labels, list(known), 4 if count >= 500 else 2)
    rows["runs"].append(run(names[0], "1.0", 0, "bench"))
    _speeds(rows["speeds"], dice, names[0], (text or ["torch"])[0])
    _history(rows["history"], dice, (text or ["benchmarks.Train"])[0], commits, 30 if count >= 500 else 5)
    rows["problems"].append(("results/cut.json", say(text) if text else "it is truncated"))
    return tables_of(rows), known


def _traffic(rows, labels):
    for number, label in enumerate(labels):
        for ranks in (10, 1000):
            for quantity, value in (("messages", 2), ("bytes", ranks * (number + 1))):
                name = f"clip/{ranks} ranks, 1 parameters/{quantity}"
                rows.append((label, "test_a::test_b", "SHARD-029", name, float(value), str(value), None))


def _errors(rows, dice, labels, ids, measurements):
    steps = max(1, measurements // (len(labels) * len(ALGORITHMS) * 2))
    for label in labels:
        for number, algorithm in enumerate(ALGORITHMS):
            clause = ids[(8 * number + 6) % len(ids)]
            for quantity in ("weight", "sum"):
                for step in range(1, steps + 1):
                    many = 10 ** (step % 5) if quantity == "sum" else None
                    error = dice.expovariate(1.0) if step % 97 else float("inf")
                    at = None if many else step
                    head = (label, f"test_x::test_precision[{algorithm}]", clause, algorithm, quantity)
                    rows.append((*head, "float32", error, 4.0, "ULP", at, many))


def _schedules(rows, labels, ids, curves):
    policies = ("CONSTANT", "LINEAR", "POLY", "STEP", "INVSQRT", "INTERPOLATE", "LINEAR, POLY")
    for number, label in enumerate(labels):
        for which, policy in enumerate(policies):
            for curve in range(curves):
                for step in range(24):
                    rate = 0.1 * (1 + step) / 24
                    seen = rate if number % 3 or step < 9 else None if curve == 1 else -rate
                    case = f"test_warmup::test_{which}[curve-{curve}-{which}]"
                    rows.append((label, case, ids[(4 + 8 * which) % len(ids)], policy, step, rate, seen))


def _speeds(rows, dice, name, peer):
    for task in range(12):
        machine, device = (MACHINE, "cpu") if task < 8 else ("NVIDIA H200", "cuda")
        ratio = dice.uniform(0.8, 4)
        head = (f"{name} 1.0 bench", machine, device, f"8x200k-{task}", "train", name, peer)
        numbers = (ratio, ratio * 0.95, ratio * 1.07, 0.04, task % 3 > 0, True, 0.004, 0.004 * ratio)
        more = (0.001, 4.0, 40_000_000, 4.1e10, None if task % 2 else 1e6, 0.02, "native", None, 2, 1)
        rows.append((*head, *numbers, *more))


def _history(rows, dice, name, commits, many):
    days = pd.date_range("2026-01-01", periods=commits, tz="UTC")
    for series in range(many):
        for number, day in enumerate(days):
            level = 0.01 * (1.5 if series == 3 and number >= commits // 2 else 1.0)
            value = level * dice.uniform(0.99, 1.01)
            commit = f"{number:040x}"
            parameters = f"rows={series}"
            rows.append(
                (name, parameters, "bench1", commit, day.isoformat(), value, "s", value * 0.98, value * 1.02)
            )


if __name__ == "__main__":
    made, known = results()
    began, cpu = time.perf_counter(), time.process_time()
    path = page.write(made, known, Path(sys.argv[1]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{len(made.errors):,} measured errors, {len(made.cases):,} cases, {len(made.clauses):,} verdicts")
    wall, used = time.perf_counter() - began, time.process_time() - cpu
    print(f"{wall:.1f} s, {used:.1f} s of them on the CPU; {peak:.0f} MiB at the peak")
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB")
