"""What Linux knows of the processes that this one started: their ends, their memory, their state.

A process that a target starts, moves to another session and forks twice is not a child of the target any
more. It becomes a child of the next ancestor that adopts orphans, which ends it.
"""

import contextlib
import ctypes
import os
import resource
import signal
import time
from collections.abc import Collection
from pathlib import Path

from keyedopt.conformance.suite.support.clock import families, kernel_fields

_PARENT_DEATH, _SUBREAPER = 1, 36  # of prctl
#: The share of the machine's memory that one process may have as data, and the least that it gets.
SHARE, LEAST = 0.5, 2 << 30
#: Seconds until children that do not end are left to themselves.
GRACE = 2.0
#: The names of compilers, as Linux knows their processes.
COMPILERS = {"ninja", "cc1plus", "c++", "g++", "clang++", "nvcc", "cicc", "ptxas"}


def _prctl(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another system than Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_SUBREAPER, 1)


def end_with_parent(number: signal.Signals) -> None:
    """Receive a signal when the parent ends, however it ends and whatever this process does."""
    parent = os.getppid()
    _prctl(_PARENT_DEATH, number)
    if os.getppid() != parent:  # it has ended already
        os.kill(os.getpid(), number)


def children() -> set[int]:
    """Return the children of this process, with those that it adopted."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(map(int, path.read_text(encoding="ascii").split()))
    return found


def end_children(spared: Collection[int] = ()) -> None:
    """Kill the children, and those of theirs that are adopted then, until only the spared ones are left."""
    end = time.monotonic() + GRACE
    while (left := children() - set(spared)) and time.monotonic() < end:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def bound_memory() -> None:
    """Bound the data of this process, and let the kernel end it first if memory runs out.

    Without the bound on a machine with a GPU, whose driver maps more memory than there is.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if not any(Path("/dev", name).exists() for name in ("nvidiactl", "kfd", "davinci_manager")):
        bound = max(LEAST, int(_memory() * SHARE))
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        bound = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (bound, bound))


def _memory() -> int:
    """Return the bytes of memory of the machine, or of its container if that has less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return total


def state(pid: int) -> str:
    """Return the letter of a process's state: ``T`` if it was stopped; empty if it is gone."""
    return (kernel_fields(Path(f"/proc/{pid}/stat")) or [""])[0]


def compiles(pid: int) -> bool:
    """Whether a compiler runs below a process."""
    for each in families([pid]):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{each}/comm").read_text(encoding="utf-8", errors="replace").strip() in COMPILERS:
                return True
    return False
