"""Forks of this process that call functions: their requests, their outcomes, and how they end."""

import contextlib
import ctypes
import faulthandler
import gc
import os
import pickle
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from keyedopt.conformance.suite.support.clock import LOOK, Clock
from keyedopt.conformance.suite.support.deadlock import Watch

#: Seconds that the other ranks may take to end after one has failed: they lose a peer in a collective.
_GRACE = 2.0
#: What is said of a process that reached the time limit, before the place where it was.
LATE = "reached the time limit (--time-limit) in"


class StoreFile:
    """A file in memory, for the store through which ranks find each other."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("store")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        """Forget the contents."""
        os.close(self._descriptor)


class RankProcess:
    """A fork that runs a function; its outcomes come back in memory that both processes have."""

    def __init__(self, number: int, run: Callable[["RankProcess"], None]) -> None:
        self.number = number
        self._said, self._stack = os.memfd_create("outcome"), os.memfd_create("stack")
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.status: int | None = None
        self.late = False  # whether it reached the time limit
        self._answered = False
        parent = os.getpid()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            code = 70
            try:
                _end_with(parent)
                self.channel.close()
                self.channel = theirs
                gc.freeze()  # else a collection copies the memory of this process
                faulthandler.register(signal.SIGUSR1, file=self._stack, all_threads=False)
                faulthandler.enable(file=self._stack, all_threads=False)
                run(self)
                code = 0
            finally:
                os._exit(code)  # without the exit handlers of the forked process
        theirs.close()
        self.process = os.pidfd_open(self.pid)

    def request(self, body: Any, arguments: Sequence[Any]) -> None:
        """Ask the process for an outcome, and forget that of an earlier request."""
        os.ftruncate(self._said, 0)
        self._answered = False
        with contextlib.suppress(OSError):  # then it has ended, which is its outcome
            self.channel.send(pickle.dumps((body, arguments)))

    def requests(self) -> Iterator[tuple[Any, Sequence[Any]]]:
        """Yield what the other process requests."""
        while request := self.channel.recv(1 << 20):
            yield pickle.loads(request)

    def answer(self, outcome: Any) -> None:
        """Give the outcome to the other process."""
        self._write(outcome)
        self.channel.send(b".")

    def _write(self, outcome: Any) -> None:
        os.ftruncate(self._said, 0)
        os.pwrite(self._said, pickle.dumps(outcome), 0)

    def receive(self) -> None:
        """Note whether the process has given an outcome, or has closed the channel without one."""
        self._answered = bool(self.channel.recv(1))

    def reap(self) -> None:
        """Note how the process ended."""
        self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def running(self) -> bool:
        """Whether there is no outcome yet."""
        return self.status is None and not self._answered

    def where(self) -> str:
        """Return where the running process is: the innermost line outside torch."""
        os.kill(self.pid, signal.SIGUSR1)
        end = time.monotonic() + 1.0
        while os.fstat(self._stack).st_size == 0 and time.monotonic() < end:
            time.sleep(0.01)
        return self._place() or "an unknown place"

    def _place(self) -> str:
        """Return the innermost line outside torch of the stack that the process has written, if it has."""
        stack = os.pread(self._stack, 1 << 16, 0).decode(errors="replace")
        lines = [line.strip() for line in stack.splitlines() if line.startswith("  File ")]
        return next((line for line in lines if f"{os.sep}torch{os.sep}" not in line), "")

    def kill(self) -> None:
        """Kill the process if it has not ended."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.reap()

    def end(self) -> Any:
        """Kill the process, after noting where it was if it still ran, and return its outcome."""
        if self.running:
            self._write(("late" if self.late else "hung", self.where()))
        if self.status is None:
            self.kill()
            self.status = 0
        found = self.outcome()
        for descriptor in (self.process, self._said, self._stack):
            os.close(descriptor)
        self.channel.close()
        return found

    def outcome(self) -> Any:
        """Return ``("result", value)``, or the kind of a failure and its text."""
        if self.status:
            how = f"killed by signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
            place = self._place()
            return "ended", f"{how} in {place}" if place else how
        written = os.pread(self._said, os.fstat(self._said).st_size, 0)
        if not written:
            return "ended", "exit status 0 before its end"
        return pickle.loads(written)


def wait_for(ranks: Sequence[RankProcess], limit: float, *, together: bool = False) -> None:
    """Wait for the outcomes of all ranks; shorter after one has failed.

    Args:
        ranks: the processes.
        limit: seconds, as a `Clock` counts them, after which this returns although ranks still run.
        together: the ranks wait for nobody else, so that this returns also when they are in a deadlock.
    """
    poll, of = select.poll(), {}
    for rank in ranks:
        for descriptor in (rank.process, rank.channel.fileno()):
            poll.register(descriptor, select.POLLIN)
            of[descriptor] = rank
    clock, watch = Clock([rank.pid for rank in ranks]), Watch()
    failed = False
    while running := [rank for rank in ranks if rank.running]:
        ready = poll.poll(min(limit, LOOK) * 1000)
        if not ready and clock.reached(limit):
            for rank in running:
                rank.late = not failed
            return
        if not ready and together and watch.deadlocked([rank.pid for rank in running]):
            return
        for descriptor, _ in ready:
            poll.unregister(descriptor)
            rank = of[descriptor]
            if descriptor == rank.process:
                rank.reap()
            elif rank.running:
                rank.receive()
            if not rank.running and rank.outcome()[0] != "result":
                limit, failed = min(limit, clock.seconds + _GRACE), True


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(70)
