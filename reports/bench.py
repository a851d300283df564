"""Reports of `keyedopt bench` as rows of tables."""

from collections.abc import Mapping
from typing import Any

from keyedopt.reports.found import Found, moment
from keyedopt.reports.plain import Refused, get, number, one_line, text

#: The version of the format that is read, and the name of the kind.
SCHEMA, KIND = 1, "keyedopt-bench"
#: Distributions that carry an implementation, where it is not one of its own name.
CARRIERS = {"fused": ("keyedopt",), "reference": ("keyedopt",), "fbgemm": ("fbgemm-gpu", "fbgemm-gpu-cpu")}


def recognised(plain: Mapping[str, Any]) -> bool:
    """Whether a file says that it is a report of the benchmarks."""
    return plain.get("kind") == KIND


def rows(file: str, plain: Mapping[str, Any]) -> Found:
    """Return the rows of a report.

    Raises:
        Refused: it is of another version, or not as documented.
    """
    if plain.get("schema") != SCHEMA:
        version = one_line(repr(plain.get("schema")), 40)
        raise Refused(f"it has format version {version}; this keyedopt reads version {SCHEMA}")
    if not get(plain, "complete", bool, True):
        raise Refused("it is of an interrupted run; run `keyedopt bench run … --output` again")
    where = get(plain, "environment", dict)
    versions = get(where, "versions", dict)
    name = text(plain, "implementation")
    carriers = [each for each in CARRIERS.get(name, (name,)) if each in versions]
    found = Found(name=name, version=text(versions, carriers[0]) if carriers else "unknown")
    proof = get(plain, "conformance", dict, None)
    device, gpu = text(where, "device"), get(where, "gpu", dict, None)
    cores = get(where, "cores", int)
    processor = f"{text(where, 'cpu')}, {cores} cores"
    found.run = {
        "kind": "bench",
        "file": file,
        "implementation": name,
        "version": found.version,
        "suite_hash": text(proof, "suite", None) if proof else None,
        "started": moment(text(plain, "started")),
        "seconds": number(plain, "seconds"),
        "machine": text(where, "system"),
        "processor": processor,
        "device": device,
        "gpu": text(gpu, "name") if gpu else None,
        "python": text(where, "python"),
        "torch": text(versions, "torch", None),
        "commit": text(where, "commit", None),
        "complete": True,
        "conformant": get(proof, "conformant", bool) if proof else None,
    }
    load = get(where, "load", list)
    idle = bool(load) and isinstance(load[0], int | float) and load[0] <= cores
    proven = bool(found.run["conformant"])
    bandwidth = number(plain, "bandwidth")
    machine = found.run["gpu"] or processor
    for row in get(plain, "rows", list):
        speed = _speed(row, bandwidth, idle and proven)
        found.rows["speeds"].append((machine, device, *speed))
    return found


def _speed(row: Any, bandwidth: float, fit: bool) -> tuple[Any, ...]:
    median, bound = number(get(row, "seconds", dict), "median"), number(row, "bound")
    matches = get(row, "matches", bool)
    return (
        *(text(row, name) for name in ("workload", "task", "implementation", "peer")),
        *(number(row, name) for name in ("ratio", "low", "high", "noise")),
        get(row, "publishable", bool, fit and matches),
        matches,
        median,
        number(get(row, "peer_seconds", dict), "median"),
        bound,
        median / bound if bound else None,
        get(row, "bytes", int),
        bandwidth,
        number(row, "memory", None),
        number(row, "first"),
    )
