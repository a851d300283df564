"""The worker processes that run the cases, each taking the next one that none has taken.

A case that ends its worker costs that case alone: it gets a record that says how the worker ended, and
another worker goes on with the rest.
"""

import contextlib
import os
import signal
import time
from collections.abc import Generator
from typing import Any

from keyedopt.conformance.results.errors import KeyedoptError
from keyedopt.conformance.run import protocol
from keyedopt.conformance.run.processes import Processes

#: Seconds between looks at the workers.
TICK = 0.03
#: What the time between two looks counts for at most: in a longer one this process was not let run, and a
#: worker may not have been either, as when a virtual machine stands still.
STEP = 10 * TICK


class WorkersError(KeyedoptError):
    """The workers cannot run any case; the message says why."""


class _Worker:
    """A process that runs cases, and for how long it has run the present one."""

    def __init__(self, target: str, processes: Processes) -> None:
        self.process = processes.start_worker(target)
        self.reader = protocol.Reader(processes.folder, self.process.pid)
        self.late = ""  # why it was killed
        self._case: bytes | None = None
        self._seconds, self._looked = 0.0, time.monotonic()

    def look(self) -> tuple[bool, float]:
        """Return whether it is busy with a case, and for how long it has been seen to be so."""
        case, now = self.reader.running(), time.monotonic()
        self._seconds = self._seconds + min(now - self._looked, STEP) if case == self._case else 0.0
        self._case, self._looked = case, now
        return case is not None, self._seconds

    def abort(self, why: str) -> None:
        """Let it write down where it is, and end."""
        self.late = why
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGABRT)


class Workers:
    """Runs the cases that the fork server has collected.

    Args:
        target: the implementation, as on the command line.
        limit: seconds that a case may take. A worker is aborted then; one that goes on is killed.
        patience: seconds that a worker may take to begin.
        processes: what starts them; records are written to its folder.
    """

    def __init__(
        self,
        target: str,
        limit: float,
        patience: float,
        processes: Processes,
    ) -> None:
        self._target, self._processes, self._folder = target, processes, processes.folder
        self._limit, self._patience = limit, patience
        self.collected: dict[str, protocol.Head] = {}  # what there is to run, once that is known

    def run(self, number: int) -> Generator[dict[str, Any]]:
        """Run the cases on ``number`` workers and yield each record as it comes.

        Raises:
            WorkersError: a worker ended, or hangs, without running a case.
            ProcessError: workers cannot be started, or it is not known how one ended.
        """
        workers: list[_Worker] = []
        done: set[str] = set()
        try:
            for _ in range(number):
                workers.append(self._start())
            while workers and not (done and done >= set(self.collected)):
                self.collected = self.collected or protocol.collected(self._folder)
                for worker in list(workers):
                    ended = worker.process.ended  # asked first: then all its records are there
                    found = worker.reader.new()
                    if ended:
                        workers.remove(worker)
                        worker.process.stop()
                        crash = self._crash(worker)
                        found += crash
                        if crash and not self._all_claimed():
                            workers.append(self._start())
                    else:
                        self._kill_if_late(worker)
                    done |= {record["case"] for record in found}
                    yield from found
                time.sleep(TICK)
        finally:  # also of those that have nothing to do, but hold on to threads that a case left behind
            for worker in workers:
                worker.process.stop()

    def _start(self) -> _Worker:
        return _Worker(self._target, self._processes)

    def _all_claimed(self) -> bool:
        """Whether there is nothing left for a worker to begin."""
        return bool(self.collected) and protocol.claimed(self._folder) >= len(self.collected)

    def _kill_if_late(self, worker: _Worker) -> None:
        busy, seconds = worker.look()
        if busy and seconds > self._limit * 1.5 + 5:
            worker.late = "timeout: it did not end within the time limit, nor let itself be ended"
            worker.process.stop()
        elif busy and seconds > self._limit and not worker.late:
            worker.abort("timeout: it did not end within the time limit")
        elif not busy and seconds > self._patience and not self._all_claimed():
            raise WorkersError(f"a worker ran no case within {self._patience:g} s")

    def _crash(self, worker: _Worker) -> list[dict[str, Any]]:
        """Return the record of the case that a worker ended in, if it did."""
        record = worker.reader.crash(worker.late or f"crash: {worker.process.ending()}")
        if record is not None:
            return [record]
        if worker.process.code == 5 or self._all_claimed():  # 5: pytest selected none
            return []
        raise WorkersError(f"{worker.process.ending()}: {worker.process.last_words()}")
