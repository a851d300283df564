"""What a run costs besides time: peak memory and kernel launches; and flushing of caches."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_STATUS, _PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def extra_memory(run: Callable[[], object], device: str) -> int | None:
    """Return the peak memory of a call beyond the memory in use before it, in bytes; None if unknown.

    On a GPU torch's allocator counts, and the call synchronizes. On a CPU it is the resident memory of the
    process; free memory is first returned to the system, so that reuse of it counts.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)
        _PEAK.write_text("5", encoding="ascii")  # reset the peak to the present value
    except (OSError, AttributeError):
        return None
    before = _resident("VmRSS")
    run()
    return max(0, _resident("VmHWM") - before)


def _resident(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB$", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def launches(run: Callable[[], object], device: str) -> int | None:
    """Return the number of kernels, copies and fills that a call starts on a GPU; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    return len(_events_on_gpu(run))


def kernel_times(run: Callable[[], object], device: str) -> dict[str, dict[str, float]] | None:
    """Return by kernel how often a call starts it, and its seconds on the GPU; None on a CPU."""
    if torch.device(device).type != "cuda":
        return None
    found: dict[str, dict[str, float]] = {}
    for event in _events_on_gpu(run):
        one = found.setdefault(event.name, {"launches": 0, "seconds": 0.0})
        one["launches"] += 1
        one["seconds"] += event.time_range.elapsed_us() / 1e6
    return found


def _events_on_gpu(run: Callable[[], object]) -> list[Any]:
    """Return what a call starts on a GPU, as torch's profiler records it."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return [event for event in profile.events() if event.device_type.name == "CUDA"]


def flush(device: str, size: int = 1 << 27) -> Callable[[], object]:
    """Return a function that flushes the caches by updating `size` bytes, by default 128 MiB."""
    numbers = torch.zeros(size // 4, device=device)
    return lambda: numbers.add_(1)
