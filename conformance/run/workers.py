"""The worker processes that run the cases. Each takes the next case that no worker has taken.

If a case ends its worker, the record of that case says how the worker ended, and a new worker runs the rest.
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
from keyedopt.conformance.suite.support.clock import RAISE, Clock

#: Seconds between looks at the workers.
TICK = 0.03


class WorkersError(KeyedoptError):
    """The workers cannot run cases; the message says why."""


class _Worker:
    """A process that runs cases, and how long it has run the current one."""

    def __init__(self, target: str, limit: float, processes: Processes) -> None:
        self._channel = protocol.Channel()
        self.process = processes.start_worker(target, self._channel.theirs, limit)
        stack = processes.folder / f"stack-{self.process.pid}"
        self.reader = protocol.Reader(self._channel.messages, stack)
        self.late = ""  # why the worker was killed
        self._case: int | None = None
        self._clock = Clock([self.process.pid])

    def look(self) -> tuple[bool, Clock]:
        """Return whether the worker runs a case, and the clock of that, or of the time between cases."""
        case = self.reader.running()
        if case != self._case:
            self._case, self._clock = case, Clock([self.process.pid])
        return case is not None, self._clock

    def stop(self) -> None:
        """Kill the worker and everything that it started."""
        self.process.stop()
        self._channel.close()

    def lost_device(self) -> bool:
        """Return whether the worker ran cases, and ended because nothing can run on its device any more."""
        return self.process.code == protocol.DEVICE_LOST and self.reader.started > 0

    def abort(self, why: str) -> None:
        """Make the worker write its stack, and end."""
        self.late = why
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGABRT)


class Workers:
    """Run the cases that the fork server has collected.

    Args:
        target: the implementation, as on the command line.
        limit: seconds that a case may take, as a `Clock` counts them. Then its worker is aborted, and killed
            if it does not end.
        patience: seconds that a worker may take to start its first case.
        processes: starts the workers, which write records to its folder.
        again: the most cases that are run once more, alone, because they reached the limit.
    """

    def __init__(
        self,
        target: str,
        limit: float,
        patience: float,
        processes: Processes,
        again: int = 0,
    ) -> None:
        self._again, self._done = again, set[str]()
        self._target, self._processes, self._folder = target, processes, processes.folder
        self._limit, self._patience = limit, patience
        self.collected: dict[str, protocol.Head] = {}  # the cases, as soon as a worker has reported them

    def run(self, number: int) -> Generator[dict[str, Any]]:
        """Run the cases on ``number`` workers and yield each record as it comes.

        A case that reached the limit is run once more at the end, alone, and the second record counts.

        Raises:
            WorkersError: a worker ended, or hangs, without running a case.
            ProcessError: workers cannot be started, or the exit status of one is unknown.
        """
        late: list[str] = []
        for record in self._run(number):
            if record.get("late") and len(late) < self._again:
                late.append(record["case"])
            else:
                yield record
        for name in late:
            protocol.release(self._folder, list(self.collected).index(name))
            self._done.remove(name)
            for record in self._run(1):
                yield {**record, "runs": 2}

    def _run(self, number: int) -> Generator[dict[str, Any]]:
        """Run the cases that no worker has taken."""
        workers: list[_Worker] = []
        try:
            for _ in range(number):
                workers.append(self._start())
            while workers and not (self._done and self.collected.keys() <= self._done):
                for worker in list(workers):
                    if worker.reader.forged:
                        worker.process.stop()
                    ended = worker.process.ended  # before reading: then all its records are there
                    found = worker.reader.new(last=ended)
                    self.collected = self.collected or worker.reader.collected
                    if ended:
                        workers.remove(worker)
                        worker.process.stop()
                        crash = self._crash(worker, is_last=not workers)
                        worker.stop()
                        found += crash
                        if (crash or worker.lost_device()) and not self._all_claimed():
                            workers.append(self._start())
                    else:
                        self._kill_if_late(worker)
                    self._done |= {record["case"] for record in found}
                    yield from found
                time.sleep(TICK)
            for worker in workers:
                _ = worker.process.ended  # raises ProcessError if the last case killed the fork server
        finally:  # also idle workers: threads that a case left behind may keep them alive
            for worker in workers:
                worker.stop()

    def _start(self) -> _Worker:
        return _Worker(self._target, self._limit, self._processes)

    def _all_claimed(self) -> bool:
        """Whether no case is left for another worker."""
        count = len(self.collected)
        return bool(count) and protocol.claimed(self._folder, count) == count

    def _kill_if_late(self, worker: _Worker) -> None:
        busy, clock = worker.look()
        late = f"timeout: it did not end within {self._limit:g} s"
        if busy and clock.reached(self._limit * 1.5 + 5):
            worker.late = f"{late}, and could not be aborted{RAISE}"
            worker.process.stop()
        elif busy and not worker.late and clock.reached(self._limit):
            worker.abort(f"{late}{RAISE}")
        elif not busy and not self._all_claimed() and clock.reached(self._patience):
            raise WorkersError(f"a worker ran no case within {self._patience:g} s{RAISE}")

    def _crash(self, worker: _Worker, *, is_last: bool) -> list[dict[str, Any]]:
        """Return the record of the case in which a worker ended, if there is one.

        Args:
            worker: has ended.
            is_last: whether no other worker runs. Otherwise the first worker may still run cases with ranks.
        """
        record = worker.reader.crash(worker.late or f"crash: {worker.process.ending()}")
        if record is not None:
            return [{**record, "late": bool(worker.late)}]
        if worker.reader.forged:
            raise WorkersError(protocol.FORGED)
        code = worker.process.code
        if code == 5 or (code == 0 and not is_last) or self._all_claimed():  # 5: pytest selected none
            return []
        if worker.lost_device():
            return []
        raise WorkersError(f"{worker.process.ending()}: {worker.process.last_words()}")
