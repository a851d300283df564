"""What the command line asks of ``keyedopt bench``, and what of it does not go together."""

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from keyedopt.benchmarks.compare import RequestError
from keyedopt.conformance.results.untrusted import error_text

#: Numbers in a row of the tables of a trace, and seconds for a comparison, where nothing else is asked for.
DIM, SECONDS = 64, 1.0
#: More threads than this for each core measure nothing; so many that they cannot be had end the process.
THREADS_A_CORE = 8
#: Options of a run that compares with peers.
ALONE = ("--conformance", "--check", "--cold", "--trace", "--dim", "--seconds")
#: Options that a mode has no use for; the first one is that of no mode.
IGNORED = {
    "": ("--rounds",),
    "--gate": (*ALONE, "--rounds"),
    "--write-baseline": (*ALONE, "--output"),
    "--compare-commits": (*ALONE, "--against"),
    "--harness": (
        *("--conformance", "--check", "--cold", "--trace", "--dim", "--rounds", "--workload", "--task"),
        *("--against", "--implementation", "--device", "--threads"),
    ),
}
#: What an option needs.
NEEDS = {
    "--rounds": "goes with --write-baseline or --compare-commits",
    "--dim": "goes with --trace",
}


@dataclass(frozen=True)
class Asked:
    """What the command line asks for; see the help of the options."""

    workloads: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    implementation: str = "fused"
    against: tuple[str, ...] | None = None
    device: str = "cpu"
    output: Path | None = None
    conformance: Path | None = None
    check: bool = False
    seconds: float | None = None
    threads: int | None = None
    cold: bool = False
    trace: Path | None = None
    dim: int | None = None
    gate: Path | None = None
    write_baseline: Path | None = None
    rounds: int | None = None
    commits: tuple[str, str] | None = None
    harness: bool = False


def refuse_together(asked: Asked) -> None:
    """Refuse options of which one would be ignored, and numbers that are none.

    Raises:
        RequestError: names them.
    """
    modes = {
        "--gate": asked.gate is not None,
        "--write-baseline": asked.write_baseline is not None,
        "--compare-commits": asked.commits is not None,
        "--harness": asked.harness,
    }
    options = {
        "--conformance": asked.conformance is not None,
        "--check": asked.check,
        "--cold": asked.cold,
        "--trace": asked.trace is not None,
        "--dim": asked.dim is not None,
        "--seconds": asked.seconds is not None,
        "--rounds": asked.rounds is not None,
        "--output": asked.output is not None,
        "--workload": bool(asked.workloads),
        "--task": bool(asked.tasks),
        "--against": asked.against is not None,
        "--implementation": asked.implementation != "fused",
        "--device": asked.device != "cpu",
        "--threads": asked.threads is not None,
    }
    given = [name for name, there in modes.items() if there]
    if len(given) > 1:
        raise RequestError(f"{given[0]} and {given[1]} do not go together")
    mode = given[0] if given else ""
    for name, there in options.items():
        if there and name in IGNORED[mode]:
            raise RequestError(f"{mode} and {name} do not go together" if mode else f"{name} {NEEDS[name]}")
    read = {"--gate": asked.gate, "--conformance": asked.conformance, "--trace": asked.trace}
    for name, path in read.items():
        if path is not None and asked.output is not None and path.resolve() == asked.output.resolve():
            raise RequestError(f"--output would replace what {name} reads: name another file")
    most = THREADS_A_CORE * (os.cpu_count() or 1)
    if asked.threads is not None and asked.threads > most:
        raise RequestError(f"--threads {asked.threads} is too many: {most} at most on this machine")
    if asked.seconds is not None and math.isnan(asked.seconds):
        raise RequestError("--seconds is a number of seconds")
    if asked.conformance is not None and asked.check:
        raise RequestError("--conformance and --check do not go together")
    if asked.dim is not None and asked.trace is None:
        raise RequestError(f"--dim {NEEDS['--dim']}")


def check_device(device: str) -> None:
    """Refuse a device that cannot be measured on.

    Raises:
        RequestError: says why.
    """
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise RequestError(f"{device!r} is not a device: give cpu or cuda") from error
    if kind not in ("cpu", "cuda"):
        raise RequestError(f"there is no clock for {kind!r}: give cpu or cuda")
    if kind == "cuda":
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise RequestError(f"{device!r} cannot be used: {error_text(error)}") from error
