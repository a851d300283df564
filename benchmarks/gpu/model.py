"""Predict the time of a backward pass of tables on an H100: ``python -m keyedopt.benchmarks.gpu.model``.

`kernels.json` has instructions, bytes and registers of each launch, for a small batch of each workload;
``python -m keyedopt.tools.measure_kernels`` writes the file. Instructions and bytes grow with the number of
lookups. Assumptions:

- a multiprocessor issues `ISSUED` instructions in a cycle, and one of PTX is one of the machine;
- a launch takes `LAUNCH` on the device, and kernels do not overlap;
- a program takes a chain of dependent accesses, and as many programs run at a time as fit;
- a launch takes the longest of instructions, chains, bytes of the L2 cache and bytes of memory; in the sort,
  where all programs run at the same time, the chain comes on top of the instructions;
- an update reads and writes each distinct row and its state once, at `BANDWIDTH` of the peak; gradients come
  from the L2 cache as far as they fit;
- a tile of the sort adds up T earlier tiles in √(T / 4) rounds, as they publish sums while it looks back;
- FBGEMM's update moves the same rows at `FBGEMM` of the peak, which is an estimate, too.

Counters on an H100 (`results/nvidia-h100-80gb-hbm3/first-light-1`) show what is wrong with them: one
instruction of PTX is 1.7 (`write_keys`) to 4 (`radix_pass`) of the machine, and a multiprocessor issues 1.1
to 1.7 in a cycle in steps of 164 thousand lookups, because few programs fit. So times are multiplied by
`MEASURED`, the mean ratio of the six workloads. Then the prediction of the sort is off by at most 13 %, and
that of updates by up to 78 %: most for the smallest, whose programs mostly wait. The command prints the
measured times, too.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from keyedopt.benchmarks.workloads import WORKLOADS, Lookups

KERNELS = Path(__file__).parent / "kernels.json"
#: The algorithm, which has one number of state for each row.
ALGORITHM = "rowwise_adagrad"
NAMES = ("8x200k-zipf", "8x200k-uniform", "one-huge-table", "wide-rows", "dlrm-dcnv2-100th")
LARGE = Lookups("32x8192x20x64", "32 tables in a large batch", 32, 1_000_000, 64, 8192, 20)
#: An H100: multiprocessors, cycles a second, peak bytes a second of memory and of the L2 cache, its bytes.
MULTIPROCESSORS, CLOCK, MEMORY, CACHE, CACHED = 132, 1.755e9, 3.35e12, 5.5e12, 25e6
ISSUED, BANDWIDTH, FBGEMM, LAUNCH = 0.7 * 4, 0.88, 0.46, 1e-6
#: Measured times by predicted times of each part: geometric means of the six workloads, from `RESULT`.
MEASURED = {"sort": 1.83, "sums": 3.0, "update": 1.77, "fbgemm": 1.69}
RESULT = KERNELS.parents[1] / "results" / "nvidia-h100-80gb-hbm3" / "first-light-2" / "5-speed.json"
#: The kernels of each part.
PARTS = {
    "sort": ("write_keys", "radix_pass", "find_runs"),
    "sums": ("sum_chunks", "fold_chunks"),
    "update": ("update",),
}
#: Cycles of an access of the L2 cache and of memory, and of a prefix sum of all threads of a program.
NEAR, FAR, PREFIX = 270, 650, 200
#: Cycles of the dependent accesses of a program of the sort, without its look-back.
CHAINS = {
    "write_keys": 3 * NEAR + 12 * 40 + FAR,  # fields, values, bisection of the bags, counts
    "radix_pass": 2 * NEAR
    + 4 * (NEAR + 2 * PREFIX)
    + 5 * NEAR,  # ticket and keys; exchanges; counts and results
    "find_runs": 2 * NEAR + PREFIX + 2 * NEAR,
}


@dataclass(frozen=True)
class Prediction:
    """What is predicted for a workload, in seconds.

    Args:
        sort, sums, update: of the launches.
        bound: of the bytes that must move, at the peak.
        fbgemm: of FBGEMM's update.
    """

    name: str
    sort: float
    sums: float
    update: float
    bound: float
    fbgemm: float


def workloads() -> list[Lookups]:
    """Return the workloads."""
    return [*(one for name in NAMES if isinstance(one := WORKLOADS[name], Lookups)), LARGE]


def occupancy(launch: dict[str, Any]) -> int:
    """Return how many programs of a launch fit on a multiprocessor, by warps and registers.

    >>> occupancy({"warps": 8, "registers": 61})
    4
    """
    warps, registers = launch["warps"], -(-launch["registers"] // 8) * 8
    return int(min(64 // warps, 65536 // (32 * registers * warps), 32))


def sort_seconds(launch: dict[str, Any], scale: float, lookups: int) -> float:
    """Return the time of a launch of the sort."""
    programs = max(1.0, launch["programs"] * scale)
    share = math.ceil(programs / MULTIPROCESSORS) / (programs / MULTIPROCESSORS) if programs > 1 else 1.0
    cycles = CHAINS[launch["kernel"]] + launch["instructions"] * scale * share / (MULTIPROCESSORS * ISSUED)
    if launch["kernel"] == "radix_pass":
        cycles += math.sqrt(lookups / 1024 / 4) * (NEAR + PREFIX)
    moved = float(launch["read"] + launch["written"]) * scale
    return float(max(cycles / CLOCK, moved / CACHE)) + LAUNCH


def row_seconds(launch: dict[str, Any], scale: float, chain: float, cached: float, memory: float) -> float:
    """Return the time of a launch that sums gradients or updates rows.

    Args:
        launch: as measured.
        scale: how many times as many lookups there are.
        chain: cycles of dependent accesses of all programs together.
        cached: bytes that move from the L2 cache.
        memory: bytes that move from memory.
    """
    slots = MULTIPROCESSORS * occupancy(launch)
    issued = launch["instructions"] * scale / (MULTIPROCESSORS * ISSUED)
    waiting = max(chain / slots, chain / max(launch["programs"] * scale, 1.0))
    seconds = (issued / CLOCK, waiting / CLOCK, cached / CACHE, memory / (BANDWIDTH * MEMORY))
    return float(max(seconds)) + LAUNCH


def predict(work: Lookups, measured: dict[str, Any]) -> Prediction:
    """Return the prediction for a workload."""
    counts = torch.cat([torch.bincount(values) for values in work.values()])
    counts = counts[counts > 0]
    lookups, rows = int(counts.sum()), len(counts)
    scale = lookups / measured["lookups"]
    gradients = 4 * work.dim * work.tables * work.batch
    missing = max(0.0, 1 - CACHED / gradients)
    gradient = NEAR + missing * (FAR - NEAR)
    payload = rows * (work.dim + 1) * 8 + gradients
    loads = 4 * work.dim * lookups
    traffic = payload + missing * loads
    chunk, at_a_time, unroll = 32, measured["rows"], measured["unroll"]
    chunks = float((counts // chunk * (counts >= 2 * chunk)).sum()) / at_a_time
    # a program reads a run's begin, key, table, fields, state, and its lookup; then row by row weights and
    # gradients. Groups of threads wait for the longest run of their tile; with mixed runs twice the mean.
    programs = next(one["programs"] for one in measured["launches"] if one["kernel"] == "update") * scale
    head = 5 * NEAR + FAR + 40 * math.log2(work.tables + 1)
    summed = 2 * float((counts.clamp(max=2 * chunk) - 1).sum()) * gradient
    chains = {
        "update": programs * head + (rows * FAR + summed) / at_a_time,
        "sum_chunks": chunks * chunk / unroll * (140 + gradient),  # place, lookup, gradient
        "fold_chunks": chunks * NEAR,
    }
    times = {"sort": 0.0, "sums": 0.0, "update": 0.0}
    for launch in measured["launches"]:
        if launch["kernel"] in CHAINS:
            times["sort"] += sort_seconds(launch, scale, lookups)
        elif launch["kernel"] == "update":
            times["update"] += row_seconds(launch, scale, chains["update"], loads + payload, traffic)
        else:
            times["sums"] += row_seconds(launch, scale, chains[launch["kernel"]], 0.0, 0.0)
    times["fbgemm"] = payload / (FBGEMM * MEMORY)
    corrected = {part: seconds * MEASURED[part] for part, seconds in times.items()}
    return Prediction(work.name, **corrected, bound=payload / MEMORY)


def measured_times(file: Path = RESULT) -> dict[str, dict[str, float]]:
    """Return the measured seconds of each part by workload; empty without the file, as in a package."""
    if not file.exists():
        return {}
    found = {}
    for name, who in json.loads(file.read_text(encoding="utf-8"))["kernels"].items():
        found[name] = {
            part: sum(who["fused"][kernel]["seconds"] for kernel in kernels)
            for part, kernels in PARTS.items()
        }
        updates = [one["seconds"] for kernel, one in who["fbgemm"].items() if ALGORITHM in kernel]
        found[name]["fbgemm"] = sum(updates)
    return found


def main() -> None:
    """Print registers and occupancy of the kernels, and a prediction for each workload."""
    measured = json.loads(KERNELS.read_text(encoding="utf-8"))["workloads"]
    print(f"{'kernel':12} warps registers programs on a multiprocessor, instructions a lookup")
    for launch in measured[NAMES[0]]["launches"]:
        each = launch["instructions"] / measured[NAMES[0]]["lookups"]
        resources = f"{launch['warps']:5} {launch['registers']:9} {occupancy(launch):4}"
        print(f"{launch['kernel']:12} {resources} {each:8.1f}")
    print("\nµs, predicted (measured)")
    print(f"{'workload':18} bound {'':8}sort {'':8}sums {'':6}update FBGEMM's update")
    seen = measured_times()
    for work in workloads():
        one = predict(work, measured[work.name])
        print(f"{one.name:18} {1e6 * one.bound:5.0f}", end="")
        for part in MEASURED:
            known = f"({1e6 * seen[one.name][part]:.0f})" if one.name in seen else ""
            print(f" {1e6 * getattr(one, part):5.0f} {known:6}", end="")
        print()


if __name__ == "__main__":
    main()
