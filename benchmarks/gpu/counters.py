"""Stage 6: Nsight Compute's counters of the kernels of a step, to correct `model` by them.

``python -m keyedopt.benchmarks.gpu.counters WORKLOAD`` takes the profiled step.
"""

import csv
import io
import shutil
import sys
from typing import Any

import torch

from keyedopt.benchmarks import tasks
from keyedopt.benchmarks.gpu import model
from keyedopt.benchmarks.gpu.stage import Context
from keyedopt.benchmarks.tasks import TASKS
from keyedopt.benchmarks.workloads import WORKLOADS
from keyedopt.conformance.targets.find import find

#: Few counters: each pass of Nsight Compute replays the kernel.
COUNTERS = {
    "gpu__time_duration.sum": "nanoseconds",
    "dram__bytes_read.sum": "bytes read from memory",
    "dram__bytes_write.sum": "bytes written to memory",
    "lts__t_bytes.sum": "bytes of the L2 cache",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "achieved occupancy in percent",
    "smsp__inst_executed.sum": "instructions of warps",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "stalled on memory",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "stalled at barriers",
}
#: The update, what it needs, and the sort.
KERNELS = "regex:^(update|sum_chunks|fold_chunks|write_keys|radix_pass|find_runs|pool)$"
NAMES = model.NAMES[:2]
TASK = f"train-{model.ALGORITHM}"
#: Launches of a step, at most.
LAUNCHES = 16


def run(context: Context) -> None:
    """Save the counters of each kernel of a step of two workloads."""
    found: dict[str, Any] = {"counters": COUNTERS, "workloads": {}}
    for name in ("small-step",) if context.small else NAMES:
        found["workloads"][name] = profiled(context, name)
        context.save(found)


def profiled(context: Context, name: str) -> dict[str, Any]:
    """Profile a step of a workload; return the outcome, the kernels with their counters, and the output."""
    if shutil.which("ncu") is None:
        return {"outcome": "missing", "kernels": [], "output": "ncu is not on PATH"}
    if context.left() < 5:
        return {"outcome": "no time left", "kernels": [], "output": ""}
    command = ["ncu", "--clock-control", "none", "--csv", "--profile-from-start", "off"]
    command += ["--print-units", "base", "--metrics", ",".join(COUNTERS)]
    command += ["--kernel-name", KERNELS, "--launch-count", str(LAUNCHES)]
    command += [sys.executable, "-m", "keyedopt.benchmarks.gpu.counters", name, context.device]
    code, text = context.command(command, f"ncu-{name}", context.left() / (2 if name == NAMES[0] else 1))
    outcome = "cut short" if code is None else f"exit code {code}"
    return {"outcome": outcome, "kernels": read(text), "output": text[-2000:]}


def read(text: str) -> list[dict[str, Any]]:
    r"""Return the kernels in Nsight Compute's output, each with its counters, in order.

    >>> lines = ['==PROF== Connected', '"ID","Kernel Name","Grid Size","Metric Name","Metric Value"']
    >>> read("\n".join([*lines, '"0","update","(8, 1, 1)","dram__bytes_read.sum","1,024"']))
    [{'kernel': 'update', 'grid': '(8, 1, 1)', 'dram__bytes_read.sum': 1024.0}]
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines))):
        try:
            value = float(row["Metric Value"].replace(",", ""))
            kernel = {"kernel": row["Kernel Name"], "grid": row["Grid Size"]}
            found.setdefault(row["ID"], kernel)[row["Metric Name"]] = value
        except (KeyError, TypeError, ValueError, AttributeError):
            continue  # a line of the program, or a counter that this GPU lacks
    return list(found.values())


def step(name: str, device: str) -> None:
    """Take a few steps of a workload, of which only the last is profiled."""
    job = tasks.make(find("fused").surface(), TASKS[TASK], WORKLOADS[name], device)
    for _ in range(3):
        job.prepare()
        job.run()
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    job.prepare()
    job.run()
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    step(*sys.argv[1:])
