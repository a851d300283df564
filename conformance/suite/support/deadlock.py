"""Whether processes wait for each other forever, from what the kernel says of them."""

from collections.abc import Sequence
from pathlib import Path

from keyedopt.conformance.suite.support.clock import IDLE, LOOK, kernel_fields

#: Looks without a change after which processes are in a deadlock.
LOOKS = 8
#: Clock ticks of CPU time in a second, which is 100 for all programs on Linux.
_TICKS = 100


class Watch:
    """A watch over processes that may be in a deadlock.

    A busy machine does not make a deadlock: a process that is to run, or waits for a disk, does not sleep.
    """

    def __init__(self) -> None:
        self._switches: list[int] = []
        self._ticks = self._looks = 0

    def deadlocked(self, pids: Sequence[int]) -> bool:
        """Look at the processes, `LOOK` seconds after the last look.

        Return whether, for `LOOKS` looks, the main thread of each process has slept without a pause, no
        thread has had children or waited for a disk, and the threads have used hardly any CPU time.
        """
        try:
            seen = [_activity(Path("/proc", str(pid))) for pid in pids]
        except (OSError, ValueError, IndexError):  # a process has just ended, or /proc is not Linux's
            seen = []
        switches, ticks = [switches for switches, _ in seen], sum(ticks for _, ticks in seen)
        idle = ticks - self._ticks <= IDLE * _TICKS * LOOK * (self._looks + 1) * len(seen)
        if not seen or -1 in switches or switches != self._switches or not idle:
            self._switches, self._ticks, self._looks = switches, ticks, 0
        else:
            self._looks += 1
        return self._looks >= LOOKS


def _activity(process: Path) -> tuple[int, int]:
    """Return how often the main thread has been switched, or -1 if the process is busy, and its CPU time."""
    fields = kernel_fields(process / "stat")
    tasks = list((process / "task").iterdir())
    waits = fields[0] == "S" and all(kernel_fields(task / "stat")[0] in "SR" for task in tasks)
    parent = any((task / "children").read_text() for task in tasks)
    lines = (process / "task" / process.name / "status").read_text().splitlines()
    switches = sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return switches if waits and not parent else -1, int(fields[11]) + int(fields[12])
