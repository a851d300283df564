"""How reliable is the gate? Run it without a change, and with a planted regression, and count its alarms.

``python -m keyedopt.tools.trials FOLDER --trials 20`` builds HEAD and measures its noise floor on the default
set. Then it runs the gate 20 times without a change, and 20 times with one optimizer of the set that takes
10 % longer, each optimizer in turn. FOLDER gets ``noise.json``, a line per trial in ``trials.jsonl`` with
the slowdown of every round, and the counts in ``figures.md``. A second call continues where the first one
stopped, with the commit of the first. A trial with a plant measures only the comparisons of the planted
optimizer, at the levels of the whole set.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from keyedopt.benchmarks import commit_builds, gate
from keyedopt.benchmarks.ab_round import Key, Request
from keyedopt.benchmarks.compare import DEFAULT
from keyedopt.benchmarks.environment import environment
from keyedopt.benchmarks.gate import Limits
from keyedopt.conformance.results import model as results

#: The plant of each task of the default set.
PLANTS = {
    **{
        f"{form}-{name}": name
        for form in ("train_joined", "train")
        for name in ("rowwise_adagrad", "sgd", "adagrad", "adam")
    },
    "sparse-adam": "sparse_adam",
    "clip-adam": "clipping",
}
WANTED = tuple((work, task) for work, tasks in DEFAULT for task in tasks)
NOTHING = "nothing"


def run(folder: Path, trials: int, rounds: int, wanted: Sequence[Key] = WANTED) -> None:
    """Make the missing trials, alternately without and with a plant.

    Args:
        folder: the folder for noise, trials and figures.
        trials: the number of trials of each kind.
        rounds: rounds of the noise floor.
        wanted: the comparisons.
    """
    folder.mkdir(parents=True, exist_ok=True)
    root = commit_builds.repository_root(Path.cwd())
    file = folder / "noise.json"
    stored = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    commit = stored.get("commit") or commit_builds.resolve("HEAD", root)
    with commit_builds.built_commits(root, [commit], _print) as trees:
        request = Request((trees[commit],) * 2, ("fused", "fused"))
        if not stored:
            noise, _ = gate.noise_floor(request, wanted, rounds, _print)
            rows = [{"workload": key[0], "task": key[1], "slowdowns": each} for key, each in noise.items()]
            about = {"kind": "keyedopt-noise", "commit": commit, "environment": environment("cpu")}
            stored = {**about, "rows": rows}
            results.write_report(file, stored)
        noise = {(row["workload"], row["task"]): row["slowdowns"] for row in stored["rows"]}
        _make_missing(folder, trials, request, noise)


def _print(*progress: object) -> None:
    print(*progress, flush=True)


def _make_missing(folder: Path, trials: int, request: Request, noise: Mapping[Key, Sequence[float]]) -> None:
    log = folder / "trials.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    tasks = [task for task in PLANTS if any(key[1] == task for key in noise)]
    for number in range(trials):
        for kind in (NOTHING, tasks[number % len(tasks)]):
            if any(
                one["number"] == number and (one["planted"] == NOTHING) == (kind == NOTHING) for one in done
            ):
                continue
            item = {"number": number, **trial(kind, request, noise)}
            done.append(item)
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(item) + "\n")
            worse = [one["key"] for one in item["found"] if one["verdict"] == "worse"]
            _print(f"trial {number}, {kind} planted: {worse or 'no alarm'}, {item['seconds']} s")
            (folder / "figures.md").write_text(figures(done), encoding="utf-8")
    print(figures(done))


def trial(kind: str, request: Request, noise: Mapping[Key, Sequence[float]]) -> dict[str, Any]:
    """Run the gate once, with a plant in the task `kind` or with `NOTHING`; return what it found."""
    began = time.monotonic()
    limits = Limits(comparisons=len(noise))
    if kind == NOTHING:
        found = gate.run(request, noise, limits)
    else:
        planted = replace(request, targets=("fused", f"keyedopt.tools.plant:{PLANTS[kind]}"))
        found = gate.run(planted, {key: each for key, each in noise.items() if key[1] == kind}, limits)
    return {
        "planted": kind,
        "seconds": round(time.monotonic() - began, 1),
        "load": os.getloadavg()[0],
        "found": [{"key": key, **asdict(change)} for key, change in found.items()],
    }


def figures(done: Sequence[Mapping[str, Any]]) -> str:
    """Return the counts of alarms as Markdown."""
    null = [item for item in done if item["planted"] == NOTHING]
    plants = [item for item in done if item["planted"] != NOTHING]

    def alarmed(item: Mapping[str, Any]) -> bool:
        return any(one["verdict"] == "worse" for one in item["found"])

    quiet = sum(not alarmed(item) for item in null)
    lines = [
        "# Trials of the gate",
        "",
        f"- nothing changed: no alarm in any comparison in {quiet} of {len(null)} trials",
        f"- one optimizer 10 % slower: found in {sum(map(alarmed, plants))} of {len(plants)} trials",
        "",
        "| planted | trials | found | slowdown, median |",
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
    parser.add_argument("--rounds", type=int, default=gate.NOISE_ROUNDS, help="of the noise floor")
    parser.add_argument("--workload", action="append", help="only this workload; repeatable")
    given = parser.parse_args()
    wanted = [key for key in WANTED if not given.workload or key[0] in given.workload]
    run(given.folder, given.trials, given.rounds, wanted)


if __name__ == "__main__":
    main()
