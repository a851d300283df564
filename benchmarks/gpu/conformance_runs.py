"""Stage 3: `keyedopt check` on the device, what is fast first, with a control on torch's own optimizers."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from keyedopt.benchmarks.gpu.stage import Context, finish
from keyedopt.conformance import spec
from keyedopt.conformance.results import model

#: The areas that are checked first.
FIRST = ("fused", "algorithms", "sparse", "clipping", "devices")
#: The area in which torch is checked, as a control that the machine is sound.
CONTROL = "algorithms"
#: Seconds that the control may take, and those that the check before it leaves for the control.
CONTROL_LIMIT, CONTROL_RESERVE = 25.0, 20.0
#: Seconds between two readings of the journal of a running check.
AGAIN = 5.0


def runs(small: bool) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return name, target and areas of each check, in order.

    >>> [name for name, *_ in runs(small=False)]
    ['fused-first', 'torch-control', 'fused-rest']
    """
    if small:
        return [("fused-first", "fused", ("clipping",)), ("torch-control", "torch", (CONTROL,))]
    rest = tuple(name for name in spec.areas() if name not in FIRST)
    return [
        ("fused-first", "fused", FIRST),
        ("torch-control", "torch", (CONTROL,)),
        ("fused-rest", "fused", rest),
    ]


def limit(name: str, left: float) -> float:
    """Return the seconds that a check may take.

    Args:
        name: the check.
        left: seconds that are left for this check and those after it.

    >>> [limit(name, 190.0) for name in ("fused-first", "torch-control", "fused-rest")]
    [170.0, 25.0, 190.0]
    """
    if name == "torch-control":
        return min(left, CONTROL_LIMIT)
    return left - min(CONTROL_RESERVE, left / 4) if name == "fused-first" else left


def run(context: Context) -> None:
    """Save the results of all checks; of one that reaches its limit, its cases until then.

    The backend is the one that users get on the device: the stage does not choose it.
    """
    found: dict[str, Any] = {}
    count = 2 if context.small else len(os.sched_getaffinity(0))  # each worker compiles kernels
    for name, target, areas in runs(context.small):
        if context.left() < 1:
            found[name] = {"outcome": "no time left"}
            context.save({"checks": found})
            continue
        output = context.work / f"{name}.json"
        for old in (output, model.journal_path(output)):
            old.unlink(missing_ok=True)
        command = [sys.executable, "-m", "keyedopt.cli.main", "check", target, "--device", context.device]
        command += [f"--area={area}" for area in areas]
        command += ["--output", str(output), "--workers", str(count)]
        begin = time.monotonic()
        end = begin + limit(name, context.left())
        process = context.start(command, context.work / f"{name}.txt")
        while process.poll() is None and (left := end - time.monotonic()) > 0:
            wait_or_end(process, min(AGAIN, left))
            found[name] = {"outcome": "running", "result": partial(output)}
            context.save({"checks": found})
        code = finish(process, 0.1)
        text = (context.work / f"{name}.txt").read_text(encoding="utf-8", errors="replace")
        found[name] = {
            "outcome": "cut short" if code is None else f"exit code {code}",
            "seconds": round(time.monotonic() - begin, 1),
            "result": partial(output),
            "output": text[-4000:],
        }
        context.save({"checks": found})


def wait_or_end(process: Any, seconds: float) -> None:
    """Wait for a process for some seconds, or until it ends."""
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.1)


def partial(output: Path) -> dict[str, Any] | None:
    """Return the result in a file, or what its journal has of it; None if there is neither."""
    if output.exists():
        return dict(json.loads(output.read_text(encoding="utf-8")))
    journal = model.journal_path(output)
    if not journal.exists() or not os.path.getsize(journal):
        return None
    try:
        return model.read(journal, partial=True).to_dict()
    except model.ResultError:
        return None
