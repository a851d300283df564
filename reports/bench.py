"""Reports of `keyedopt bench` as rows of tables."""

from collections.abc import Mapping
from typing import Any

from keyedopt.conformance.results.errors import ResultError
from keyedopt.conformance.results.untrusted import get, number, one_line, text
from keyedopt.conformance.results.verdict import CONFORMANT
from keyedopt.reports.parsed import Parsed, moment

#: The version of the format that is read, and the name of the kind.
SCHEMA, KIND = 1, "keyedopt-bench"
#: Distributions that contain an implementation, if their names differ from its name.
DISTRIBUTIONS = {
    "fused": ("keyedopt",),
    "reference": ("keyedopt",),
    "fbgemm": ("fbgemm-gpu", "fbgemm-gpu-cpu"),
}


def recognised(plain: Mapping[str, Any]) -> bool:
    """Whether a file says that it is a report of the benchmarks."""
    return plain.get("kind") == KIND


def rows(file: str, plain: Mapping[str, Any]) -> Parsed:
    """Return the rows of a report.

    Raises:
        ResultError: the report is of another version, partial, or not as documented.
    """
    if plain.get("schema") != SCHEMA:
        version = one_line(repr(plain.get("schema")), 40)
        raise ResultError(f"it has format version {version}; this keyedopt reads version {SCHEMA}")
    if not get(plain, "complete", bool, True):
        raise ResultError("it is of an interrupted run; run `keyedopt bench run … --output` again")
    where = get(plain, "environment", dict)
    versions = get(where, "versions", dict)
    name = text(plain, "implementation")
    carriers = [each for each in DISTRIBUTIONS.get(name, (name,)) if each in versions]
    parsed = Parsed(name=name, version=text(versions, carriers[0]) if carriers else "unknown")
    proof = get(plain, "conformance", dict, None)
    proven = bool(proof) and get(proof, "conformant", bool)
    device, gpu = text(where, "device"), get(where, "gpu", dict, None)
    cores = get(where, "cores", int)
    capability = text(where, "capability", None)  # a name such as "AMD EPYC" is that of unlike processors
    processor = f"{text(where, 'cpu')}, {cores} cores" + (f", {capability}" if capability else "")
    parsed.run = {
        "kind": "bench",
        "file": file,
        "implementation": name,
        "version": parsed.version,
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
        "verdict": CONFORMANT if proven else None,
    }
    load = get(where, "load", list)
    idle = bool(load) and isinstance(load[0], int | float) and load[0] <= cores
    bandwidth = number(plain, "bandwidth")
    machine = parsed.run["gpu"] or processor
    for row in get(plain, "rows", list):
        speed = _speed(row, bandwidth, idle and proven)
        parsed.rows["speeds"].append((machine, device, *speed))
    return parsed


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
        *(text(row, name, None) for name in ("backend", "peer_backend")),
        *(get(row, name, int, None) for name in ("threads", "peer_threads")),
    )
