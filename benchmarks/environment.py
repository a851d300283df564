"""The environment of a measurement: machine, load, versions and commit."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

#: Distributions whose versions are recorded if they are installed.
DISTRIBUTIONS = ("keyedopt", "torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "triton", "numpy")


def environment(device: str) -> dict[str, Any]:
    """Return the machine, its load, versions, and the commit of keyedopt if it is a checkout."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mhz": _clock(),
        "huge_pages": _huge_pages(),
        "load": list(os.getloadavg()),
        "device": device,
        "gpu": _gpu(device),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions(DISTRIBUTIONS),
        "commit": _commit(),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _clock() -> float | None:
    """Return the present mean clock rate of the processors, in MHz; None if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        clocks = [float(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
    except (OSError, ValueError):
        return None
    return sum(clocks) / len(clocks) if clocks else None


def _huge_pages() -> str | None:
    """Return the mode of transparent huge pages: always, madvise or never; None if unknown."""
    try:
        modes = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return None
    return modes.partition("[")[2].partition("]")[0]


def free_memory(device: str) -> int:
    """Return the bytes of free memory on a device."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    (available,) = [line.split()[1] for line in lines if line.startswith("MemAvailable")]
    return int(available) * 1024


def _gpu(device: str) -> dict[str, Any] | None:
    if torch.device(device).type != "cuda":
        return None
    about = torch.cuda.get_device_properties(device)
    fields = "driver_version,clocks.sm,clocks.mem,power.limit"
    return {
        "name": about.name,
        "memory": about.total_memory,
        "cuda": torch.version.cuda,
        fields: _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"),
    }


def versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of the installed ones among some distributions."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """Return the commit of the running code, with a + if files differ from it; empty without a checkout."""
    here = str(Path(__file__).resolve().parent)
    commit = _output("git", "-C", here, "rev-parse", "HEAD")
    changed = _output("git", "-C", here, "status", "--porcelain", "--untracked-files=no")
    return commit + "+" if commit and changed else commit


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
