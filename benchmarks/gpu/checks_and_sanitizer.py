"""Stage 4: the checks of `checks`, and compute-sanitizer on one small step.

``python -m keyedopt.benchmarks.gpu.checks_and_sanitizer ALGORITHM DEVICE`` takes that step.
"""

import os
import shutil
import sys
from typing import Any
from unittest.mock import patch

from keyedopt.benchmarks.gpu import checks
from keyedopt.benchmarks.gpu.stage import Context
from keyedopt.conformance.targets.find import find

#: The tools of compute-sanitizer, with the seconds that each may take.
TOOLS = {"memcheck": 20.0, "racecheck": 20.0}
#: A step under the sanitizer is some hundred times as slow: one algorithm with two states.
ALGORITHM = "Adam"


def run(context: Context) -> None:
    """Save the outcome of each check, the time of a step without the sort beside it, and the sanitizer's."""
    on_gpu = context.device.startswith("cuda")
    surface = find("fused").surface()
    found: dict[str, Any] = {"checks": []}
    names = tuple(checks.CHECKS) if on_gpu else ("first step",)
    for name in names:
        if context.left() < 1:
            found["checks"].append({"check": name, "outcome": "no time left"})
            continue
        found["checks"] += checks.run(surface, context.device, [name])
        context.save(found)
    found["sanitizer"] = {}
    for tool, seconds in TOOLS.items():
        found["sanitizer"][tool] = sanitized(context, tool, seconds)
        context.save(found)
    found["times"] = []
    for bags in (checks.BAGS, 64 * checks.BAGS, 256 * checks.BAGS) if on_gpu else ():
        if context.left() > 5:
            found["times"].append(checks.time_without_overlap(surface, context.device, bags))
            context.save(found)


def sanitized(context: Context, tool: str, seconds: float) -> dict[str, Any]:
    """Run one step under a tool of compute-sanitizer; return its outcome and the end of its output."""
    if shutil.which("compute-sanitizer") is None:
        return {"outcome": "missing", "output": "compute-sanitizer is not on PATH"}
    if context.left() < 5:
        return {"outcome": "no time left", "output": ""}
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    command += [sys.executable, "-m", "keyedopt.benchmarks.gpu.checks_and_sanitizer"]
    command += [ALGORITHM, context.device]
    # torch's allocator would hide accesses beyond a tensor inside its large blocks
    code, text = context.command(command, tool, seconds, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    outcome = {None: "cut short", 0: "held", 9: "failed"}.get(code, f"exit code {code}")
    return {"outcome": outcome, "output": text[-6000:]}


def step(algorithm: str, device: str) -> None:
    """Take a step, with a few bags, without the self-check, and read the tables back."""
    with patch.dict(os.environ, {"KEYEDOPT_SELF_CHECK": "0"}):
        module = checks.tables(find("fused").surface(), algorithm, device)
        checks.step(module, checks.features(device, 0, 64))
        for tensor in checks.contents(module):
            tensor.cpu()


if __name__ == "__main__":
    step(*sys.argv[1:])
