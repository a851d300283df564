"""A clock for time limits that a busy machine does not shorten, from what the kernel says of processes."""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

#: Seconds between two looks at processes, and the most that the time between two looks counts: if it was
#: longer, this process was stopped, and the others may have been too, for example with their virtual machine.
LOOK, STEP = 0.5, 1.0
#: The part of a processor that a waiting process may use: the thread of each of its groups in gloo wakes up a
#: hundred times a second.
IDLE = 0.05
#: Wall-clock time ends what never gets a processor, or waits for a disk, after so many times the limit.
BACKSTOP = 20.0
#: Ends the message of each time limit.
RAISE = "; --time-limit gives more"


class Clock:
    """Count the seconds of processes and of their children: CPU time, and time in which all of them sleep.

    While a process is to run but others use the processors, or while it waits for a disk, no time is counted.
    The first `LOOK` seconds are not counted either, so that the clock of a short case costs nothing.

    Args:
        pids: the processes.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids, self._used = pids, -1.0
        self._looked = time.monotonic()
        self.seconds = self._passed = 0.0

    def reached(self, limit: float) -> bool:
        """Return whether the processes have used so many seconds, or many times more have passed."""
        passed = time.monotonic() - self._looked
        if passed >= LOOK:
            self._look(min(passed, STEP))
        return self.seconds >= limit or self._passed >= limit * BACKSTOP

    def _look(self, passed: float) -> None:
        seen = [_use_and_sleep(pid) for pid in families(self._pids)]
        used, asleep = sum(seconds for seconds, _ in seen), all(sleeps for _, sleeps in seen)
        if self._used >= 0:
            spent = min(max(0.0, used - self._used), passed)
            self.seconds += passed if asleep and spent <= IDLE * passed else spent
        self._used, self._looked = used, time.monotonic()
        self._passed += passed


def families(pids: Sequence[int]) -> Iterator[int]:
    """Yield processes and all that they started."""
    for pid in pids:
        yield pid
        for path in _of_threads(pid, "children"):
            with contextlib.suppress(OSError):
                yield from families([*map(int, path.read_text(encoding="ascii").split())])


def _of_threads(pid: int, name: str) -> list[Path]:
    """Return a file of each thread of a process; none if it has ended, or ends meanwhile."""
    with contextlib.suppress(OSError):
        return list(Path(f"/proc/{pid}/task").glob(f"*/{name}"))
    return []


def _use_and_sleep(pid: int) -> tuple[float, bool]:
    """Return the CPU time of a process and of its ended children, and whether all its threads sleep."""
    threads = [kernel_fields(path) for path in _of_threads(pid, "stat")]
    fields = kernel_fields(Path(f"/proc/{pid}/stat"))
    used = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return used, not any(thread[0] in "RD" for thread in threads if thread)


def kernel_fields(path: Path) -> list[str]:
    """Return what the kernel says of a process or thread, from its state on; nothing if it has ended."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []
