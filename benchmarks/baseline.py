"""A baseline: how rounds compared when it was written, and of what machine, work and build they are."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from keyedopt.benchmarks import builds
from keyedopt.benchmarks.environment import environment
from keyedopt.benchmarks.rounds import Key
from keyedopt.benchmarks.workloads import WORKLOADS

#: The version of the format of a baseline.
SCHEMA = 2
KIND = "keyedopt-baseline"
#: What of the environment has to be the same.
SAME = ("cpu", "cores", "capability", "device", "system", "huge_pages")
#: Versions that have to be the same: those of what is compared with.
PEERS = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu")


class BaselineError(Exception):
    """A baseline that cannot be used here; the message says why and what to do."""


@dataclass(frozen=True)
class Baseline:
    """What rounds gave, by workload, task and peer, and what they may be compared with.

    Args:
        implementation: the target that it is of.
        machine: what has to be the same: processor, cores, threads, device, versions of peers and torch.
        work: a fingerprint of each workload that was measured, by its name.
        rows: for each comparison ``workload``, ``task``, ``peer`` (empty if none does the task);
            ``slowdowns``, the logarithms that the rounds gave: with a build, of the implementation against
            itself, else against the peer; and ``ratios``: how many times as long the peer took, by round.
        build: name and SHA-256 of the archive with the build, which lies beside it; None if there is none.
        about: commit, load and when, which may differ.
    """

    implementation: str
    machine: dict[str, Any]
    work: dict[str, str]
    rows: list[dict[str, Any]]
    build: dict[str, str] | None = None
    about: dict[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA
    kind: str = KIND

    def slowdowns(self) -> dict[Key, list[float]]:
        """Return the slowdowns of the rounds of each comparison."""
        return {key_of(row): row["slowdowns"] for row in self.rows}

    def ratios(self) -> dict[Key, float]:
        """Return the ratio of each comparison that has one: the geometric mean of those of the rounds."""
        found = {key_of(row): row["ratios"] for row in self.rows if row["ratios"]}
        return {key: float(np.exp(np.mean(np.log(values)))) for key, values in found.items()}

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"


def key_of(row: Mapping[str, Any]) -> Key:
    """Return what a row is about."""
    return row["workload"], row["task"], row["peer"]


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
        _refuse_strange(made)
        rounds = [np.asarray(values, dtype=np.float64) for values in made.slowdowns().values()]
        sound = all(len(values) >= 2 and np.isfinite(values).all() for values in rounds) and bool(rounds)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise BaselineError(f"{path} is not a baseline ({error!r}): {again}") from error
    if not sound:
        raise BaselineError(f"{path} has comparisons of fewer than two rounds: {again}")
    return made


def _refuse_strange(made: Baseline) -> None:
    """Refuse values of other kinds than those that are written.

    Raises:
        TypeError, ValueError: names the first.
    """
    kinds = {"implementation": str, "machine": dict, "work": dict, "rows": list, "about": dict}
    for name, kind in kinds.items():
        if not isinstance(getattr(made, name), kind):
            raise TypeError(name)
    if any(not isinstance(part, str) for key in made.slowdowns() for part in key):
        raise TypeError("rows")
    if any(value <= 0 for row in made.rows for value in map(float, row["ratios"])):
        raise ValueError("ratios")
    if made.build is not None:
        file, digest = made.build["file"], made.build["sha256"]
        if not (isinstance(digest, str) and Path(file).name == file):
            raise ValueError("build")


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
    """Return what has to be the same where rounds are compared."""
    now = environment(device)
    versions = {name: version for name, version in now["versions"].items() if name in PEERS}
    gpu = now["gpu"]["name"] if now["gpu"] else None
    same = {name: now[name] for name in SAME}
    return {**same, "abi": builds.abi(), "gpu": gpu, "threads": threads, "versions": versions}


def fingerprints(names: Iterable[str]) -> dict[str, str]:
    """Return what identifies the work of some workloads, those that there are."""
    known = {name: WORKLOADS[name] for name in names if name in WORKLOADS}
    return {name: hashlib.sha256(repr(work).encode()).hexdigest()[:16] for name, work in known.items()}


def made_of(
    slowdowns: Mapping[Key, Sequence[float]],
    ratios: Mapping[Key, Sequence[float]],
    implementation: str,
    device: str,
    threads: int,
    build: dict[str, str] | None = None,
) -> Baseline:
    """Return the baseline of some rounds, of which each comparison has as many slowdowns."""
    rows = [
        {
            **dict(zip(("workload", "task", "peer"), key, strict=True)),
            "slowdowns": [round(value, 6) for value in values],
            "ratios": [round(value, 6) for value in ratios.get(key, ())],
        }
        for key, values in slowdowns.items()
    ]
    now = environment(device)
    about = {name: now[name] for name in ("commit", "load", "versions")}
    about |= {"written": datetime.now(UTC).isoformat(timespec="seconds")}
    work = fingerprints(dict.fromkeys(key[0] for key in slowdowns))
    return Baseline(implementation, machine(device, threads), work, rows, build, about)
