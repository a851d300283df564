"""Summarize the results of `gpu.sh`: ``python -m keyedopt.benchmarks.gpu.summary FOLDER [MISSING...]``.

Reads the files that the parts of the script have written, writes ``summary.json`` beside them, and prints a
short table. MISSING are the tools that the machine lacks. With ``--asv CONFIG`` it writes ``asv.conf.json``
instead: a copy of CONFIG whose results go to the folder.
"""

import argparse
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from keyedopt.benchmarks.asv import history
from keyedopt.conformance.results import model as results
from keyedopt.conformance.results.files import parse_json, read_text

SUMMARY, CONFIG = "summary.json", "asv.conf.json"


def read(folder: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the readable results of a folder by name, and the names of the unreadable ones."""
    found, broken = {}, []
    for path in sorted(folder.glob("*.json")):
        if path.name in (SUMMARY, CONFIG):
            continue
        try:
            plain = parse_json(read_text(path))
        except (results.ResultError, ValueError):
            plain = None
        if isinstance(plain, dict):
            found[path.stem] = plain
        else:
            broken.append(path.name)
    for path in sorted(folder.glob("*.json.journal")):  # left by a run that was killed
        try:
            plain = results.read(path, partial=True).to_dict()
        except results.ResultError:
            broken.append(path.name)
        else:
            found[f"{path.name.removesuffix('.json.journal')}.partial"] = plain
    return found, broken


def summary(folder: Path, missing: Sequence[str], interrupted: bool = False) -> dict[str, Any]:
    """Return verdicts, checks, geometric means of ratios, and asv's values from the files of a folder."""
    found, broken = read(folder)
    ratios: dict[tuple[str, str], list[tuple[float, str]]] = {}
    checks: list[dict[str, str]] = []
    verdicts = {}
    for name, report in found.items():
        checks += report.get("checks", [])
        if name.startswith("conformance"):
            outcomes = [case["outcome"] for case in report["cases"]]
            verdicts[name] = {one: outcomes.count(one) for one in sorted(set(outcomes))}
        for row in report.get("rows", []):
            if row["matches"]:
                ratios.setdefault((row["task"], row["peer"]), []).append((row["ratio"], row["status"]))
    means = [
        {
            "task": task,
            "peer": peer,
            "ratio": math.exp(sum(math.log(ratio) for ratio, _ in each) / len(each)),
            "workloads": len(each),
            "status": next((why for _, why in each if why != "publishable"), "publishable"),
        }
        for (task, peer), each in sorted(ratios.items())
    ]
    return {
        "kind": "keyedopt-gpu",
        "interrupted": interrupted,
        "missing": list(missing),
        "broken": broken,
        "cut_short": [name for name, report in found.items() if not report.get("complete", True)],
        "environment": next((one.get("environment") for one in found.values() if "rows" in one), None),
        "conformance": verdicts,
        "checks": checks,
        "ratios": means,
        "asv": _of_asv(folder / "asv"),
    }


def _of_asv(folder: Path) -> list[dict[str, Any]]:
    if not (folder / "benchmarks.json").exists():
        return []
    return [
        {"benchmark": item.benchmark, **dict(item.params), "value": item.value, "unit": item.unit}
        for item in history.read(folder)
    ]


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the lines of the short table."""
    said = ["interrupted: these are the results so far"] if found["interrupted"] else []
    said += [f"missing: {name}" for name in found["missing"]]
    said += [f"cut short: {name.removesuffix('.partial')}" for name in found["cut_short"]]
    said += [f"cannot be read: {name}" for name in found["broken"]]
    for name, counts in found["conformance"].items():
        said.append(f"{name:28} " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    for row in found["checks"]:
        if row["outcome"] != "held":
            said.append(f"{row['check']:28} {row['algorithm']:20} {row['outcome']}: {row['message']}")
    for row in found["ratios"]:
        said.append(
            f"{row['task']:28} {row['peer']:10} {row['ratio']:7.2f} x over {row['workloads']} workloads, "
            f"{row['status']}"
        )
    for row in found["asv"]:
        what = row["benchmark"].rpartition(".")[2]
        said.append(f"asv {what:24} {row['implementation']:14} {row['value']:.3g} {row['unit']}, unverified")
    return said


def asv_config(source: Path, folder: Path) -> None:
    """Write a copy of asv's configuration to a folder, with absolute paths and results in that folder."""
    text = re.sub(r"^\s*//.*$", "", source.read_text(encoding="utf-8"), flags=re.MULTILINE)
    config = json.loads(text)
    config |= {"repo": str(source.parent), "benchmark_dir": str(source.parent / config["benchmark_dir"])}
    config |= {f"{name}_dir": str(folder / place) for name, place in PLACES.items()}
    results.write_atomically(folder / CONFIG, json.dumps(config, indent=1) + "\n")


#: The subfolders of asv.
PLACES = {"results": "asv", "env": ".asv-env", "html": "asv-html"}


def main() -> int:
    """Write the summary and print it; return 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("missing", nargs="*", help="a tool that the machine lacks")
    parser.add_argument("--interrupted", action="store_true", help="mark the summary as interrupted")
    parser.add_argument("--asv", type=Path, metavar="CONFIG", help="write a configuration for asv instead")
    given = parser.parse_args()
    if given.asv:
        asv_config(given.asv, given.folder)
        return 0
    found = summary(given.folder, given.missing, given.interrupted)
    results.write_atomically(given.folder / SUMMARY, json.dumps(found, indent=1) + "\n")
    print("\n".join(lines(found)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
