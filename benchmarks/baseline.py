"""A baseline: the slowdowns of some rounds, and of what machine and work they are."""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from keyedopt.benchmarks.environment import environment
from keyedopt.benchmarks.workloads import WORKLOADS

#: The version of the format of a baseline.
SCHEMA = 1
KIND = "keyedopt-baseline"
#: A workload, a task, a peer.
Key = tuple[str, str, str]
#: What of the environment has to be the same.
SAME = ("cpu", "cores", "capability", "device", "system", "huge_pages")
#: Versions that have to be the same: those of what is compared with.
PEERS = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu")


class BaselineError(Exception):
    """A baseline that cannot be used here; the message says why and what to do."""


@dataclass(frozen=True)
class Baseline:
    """Slowdowns of rounds, by workload, task and peer, and what they may be compared with.

    Args:
        machine: what has to be the same: processor, cores, threads, device, versions of peers and torch.
        work: a fingerprint of each workload that was measured, by its name.
        rows: for each comparison ``workload``, ``task``, ``peer``, the ``slowdowns`` of each round, and
            ``noise``: the spread that they would have if all of it came from within the rounds.
        about: commit, load and when, which may differ.
    """

    machine: dict[str, Any]
    work: dict[str, str]
    rows: list[dict[str, Any]]
    about: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA
    kind: str = KIND

    def slowdowns(self) -> dict[Key, list[float]]:
        """Return the slowdowns of the rounds of each comparison."""
        return {(row["workload"], row["task"], row["peer"]): row["slowdowns"] for row in self.rows}

    def noise(self) -> dict[Key, float]:
        """Return the noise floor of each comparison."""
        return {(row["workload"], row["task"], row["peer"]): float(row["noise"]) for row in self.rows}

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"


def read(path: Path) -> Baseline:
    """Read a baseline.

    Raises:
        BaselineError: it is none, of another version, or broken.
    """
    again = "write one with `keyedopt bench --write-baseline FILE`"
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaselineError(f"{path} cannot be read ({error.strerror}): {again}") from error
    except (ValueError, RecursionError) as error:
        raise BaselineError(f"{path} is not JSON ({error}): {again}") from error
    if not isinstance(plain, dict) or plain.get("kind") != KIND:
        raise BaselineError(f"{path} is not a baseline: {again}")
    if plain.get("schema") != SCHEMA:
        raise BaselineError(f"{path} has format version {plain.get('schema')}, not {SCHEMA}: {again}")
    try:
        made = Baseline(**plain)
        rounds = [list(map(float, values)) for values in made.slowdowns().values()]
        rounds += [[noise, noise] for noise in made.noise().values()]
        sound = all(len(values) >= 2 and np.isfinite(values).all() for values in rounds) and bool(rounds)
        sound = sound and isinstance(made.machine, dict) and isinstance(made.work, dict)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise BaselineError(f"{path} is not a baseline ({error!r}): {again}") from error
    if not sound:
        raise BaselineError(f"{path} has comparisons of fewer than two rounds: {again}")
    return made


def refuse_other(baseline: Baseline, machine: Mapping[str, Any], work: Mapping[str, str]) -> None:
    """Refuse a baseline of another machine, of other versions, or of workloads that have changed since.

    Raises:
        BaselineError: names the first difference.
    """
    for name in sorted({*baseline.machine, *machine}):
        then, now = baseline.machine.get(name), machine.get(name)
        if then != now:
            raise BaselineError(
                f"the baseline is of another machine: {name} was {then!r}, here it is {now!r}"
            )
    for name, print_then in baseline.work.items():
        if name not in work:
            raise BaselineError(f"the baseline is of a workload that there is none of here: {name!r}")
        if work[name] != print_then:
            raise BaselineError(f"the baseline is of other work: {name!r} has changed since; write it anew")


def machine(device: str, threads: int) -> dict[str, Any]:
    """Return what has to be the same where ratios are compared."""
    now = environment(device)
    versions = {name: version for name, version in now["versions"].items() if name in PEERS}
    gpu = now["gpu"]["name"] if now["gpu"] else None
    return {**{name: now[name] for name in SAME}, "gpu": gpu, "threads": threads, "versions": versions}


def fingerprints(names: Iterable[str]) -> dict[str, str]:
    """Return what identifies the work of some workloads, those that there are."""
    known = {name: WORKLOADS[name] for name in names if name in WORKLOADS}
    return {name: hashlib.sha256(repr(work).encode()).hexdigest()[:16] for name, work in known.items()}


def made_of(
    rounds: Sequence[Mapping[Key, tuple[float, float]]], device: str, threads: int, implementation: str
) -> Baseline:
    """Return the baseline of some rounds: of each comparison, slowdown and ours against itself.

    What is missing in a round is left out of all. Halves have half of the runs, and their ratio twice the
    variance of a ratio of wholes: hence the factor of the noise.
    """
    keys = [key for key in rounds[0] if all(key in one for one in rounds)]
    rows = [
        {
            **dict(zip(("workload", "task", "peer"), key, strict=True)),
            "slowdowns": [one[key][0] for one in rounds],
            "noise": math.sqrt(float(np.mean([one[key][1] ** 2 for one in rounds])) / 2),
        }
        for key in keys
    ]
    now = environment(device)
    about = {name: now[name] for name in ("commit", "load", "versions")}
    about |= {"implementation": implementation, "written": datetime.now(UTC).isoformat(timespec="seconds")}
    work = fingerprints(dict.fromkeys(key[0] for key in keys))
    return Baseline(machine(device, threads), work, rows, about)
