"""How far the gate can be believed: runs of it with nothing changed, and with a planted regression.

``python -m keyedopt.benchmarks.trials FOLDER --trials 20`` writes a baseline, then runs the gate on the
default set as often as asked for, without any change, and as often with one optimizer that takes a tenth
longer, each optimizer of the set in turn. Every round is of processes of its own. FOLDER keeps
``baseline.json`` with the build beside it, a line for each trial in ``trials.jsonl`` with what every round
gave, and the figures in ``figures.md``; started again, it goes on where it stopped. In a trial with a plant
only the comparisons of that optimizer are measured, at the levels of the whole set; ratios to peers, which
decide nothing, are left out of all trials.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from keyedopt.benchmarks import baseline as baselines
from keyedopt.benchmarks import guard
from keyedopt.benchmarks.baseline import Baseline
from keyedopt.benchmarks.compare import DEFAULT
from keyedopt.benchmarks.gate import Change, Limits
from keyedopt.benchmarks.rounds import Key, Request

#: The plant of each task of the default set.
PLANTS = {
    "train-rowwise_adagrad": "rowwise_adagrad",
    "train-sgd": "sgd",
    "train-adagrad": "adagrad",
    "train-adam": "adam",
    "sparse-adam": "sparse_adam",
    "clip-adam": "clipping",
}
WANTED = tuple((work, task) for work, tasks in DEFAULT for task in tasks)


def trial(target: str, baseline: Baseline, folder: Path, limits: Limits) -> dict[Key, Change]:
    """Run the gate."""
    return guard.hold(baseline, folder, Request(target), limits, ratios=False)[0]


def part(baseline: Baseline, task: str) -> Baseline:
    """Return the comparisons of a task alone."""
    return replace(baseline, rows=[row for row in baseline.rows if row["task"] == task])


def run(folder: Path, trials: int, rounds: int) -> None:
    """Make the trials that are missing, null and planted in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "baseline.json"
    if not path.exists():
        guard.write(
            path, Request("fused"), WANTED, rounds, lambda *what: print("baseline:", *what, flush=True)
        )
    baseline = baselines.read(path)
    log = folder / "trials.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    limits = Limits(comparisons=len(baseline.rows))
    tasks = [task for task in PLANTS if any(row["task"] == task for row in baseline.rows)]
    for number in range(trials):
        for kind in ("nothing", tasks[number % len(tasks)]):
            if any(
                item["number"] == number and (item["planted"] == "nothing") == (kind == "nothing")
                for item in done
            ):
                continue
            began = time.monotonic()
            if kind == "nothing":
                found = trial("fused", baseline, folder, limits)
            else:
                target = f"keyedopt.benchmarks.plant:{PLANTS[kind]}"
                found = trial(target, part(baseline, kind), folder, limits)
            item: dict[str, Any] = {
                "number": number,
                "planted": kind,
                "seconds": round(time.monotonic() - began, 1),
                "load": os.getloadavg()[0],
                "found": [{"key": key, **asdict(change)} for key, change in found.items()],
            }
            done.append(item)
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(item) + "\n")
            worse = [one["key"] for one in item["found"] if one["verdict"] == "worse"]
            print(f"trial {number}, {kind} planted: {worse or 'no alarm'}, {item['seconds']} s", flush=True)
            (folder / "figures.md").write_text(figures(done), encoding="utf-8")
    print(figures(done))


def figures(done: Sequence[Mapping[str, Any]]) -> str:
    """Return what the trials gave, as text."""
    null = [item for item in done if item["planted"] == "nothing"]
    plants = [item for item in done if item["planted"] != "nothing"]

    def alarmed(item: Mapping[str, Any]) -> bool:
        return any(one["verdict"] == "worse" for one in item["found"])

    quiet = sum(not alarmed(item) for item in null)
    lines = [
        "# Trials of the gate",
        "",
        f"- nothing changed: no alarm in any comparison in {quiet} of {len(null)} trials",
        f"- one optimizer 10 % slower: found in {sum(map(alarmed, plants))} of {len(plants)} trials",
        "",
        "| planted | trials | found | change, median |",
        "|---|---|---|---|",
    ]
    for task in dict.fromkeys(item["planted"] for item in plants):
        some = [item for item in plants if item["planted"] == task]
        values = sorted(one["value"] for item in some for one in item["found"])
        middle = values[len(values) // 2]
        lines.append(f"| {task} | {len(some)} | {sum(map(alarmed, some))} | {middle:+.1%} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=guard.ROUNDS, help="of the baseline")
    given = parser.parse_args()
    run(given.folder, given.trials, given.rounds)


if __name__ == "__main__":
    main()
