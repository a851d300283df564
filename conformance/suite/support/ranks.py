"""Real ranks: forks of this process that form a process group, with a time limit.

This process has imported torch and the implementation, so ranks start in milliseconds. Under torchrun each of
its processes forks its own rank of the case, after all have come to the case. No rank listens on a fixed port
or writes a file; ranks end with this process, however it ends.
"""

import contextlib
import ctypes
import datetime
import faulthandler
import functools
import gc
import hashlib
import importlib
import os
import pickle
import secrets
import select
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import Mismatch
from keyedopt.conformance.suite.support.device import the_device
from keyedopt.conformance.suite.support.torchrun import (
    PATIENCE,
    meet,
    processes,
    store,
    this_process,
    under_torchrun,
)

#: Seconds that the ranks of a case may take.
LIMIT = 20.0
#: Seconds that the other ranks may take to end after one has failed: they lose a peer in a collective.
GRACE = 2.0
#: What most ranks import: once in this process, not in each fork.
_SLOW_IMPORTS = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "fsspec")
_NUMBER_OF_RANKS = [2]
_CASE: list[Any] = ["", 0]  # the case that runs, and how often it has started ranks or made a folder
_REPLACED: list[Callable[[], str]] = []  # each names a function that the implementation has replaced


def the_ranks() -> int:
    """Return the number of ranks of each case."""
    return processes() if under_torchrun() else _NUMBER_OF_RANKS[0]


def choose_ranks(ranks: int) -> None:
    """Set the number of ranks of each case."""
    _NUMBER_OF_RANKS[0] = ranks


def begin_case(name: str) -> None:
    """Note the case that begins, so that all processes of torchrun have one name for what it starts."""
    _CASE[:] = [name, 0]


def inspect_ranks(replaced: Callable[[], str]) -> None:
    """Call a function at the end of each rank, which fails if the function returns a name."""
    _REPLACED.append(replaced)


def _next_name() -> str:
    _CASE[1] += 1
    return f"{_CASE[0]} {_CASE[1]}"


def on_ranks(
    body: Callable[..., Any], *arguments: Any, ranks: int | None = None, limit: float = LIMIT
) -> list[Any]:
    """Call a function on each rank, and return the results in the order of the ranks.

    Args:
        body: runs with an initialized default group.
        arguments: its arguments, the same on each rank.
        ranks: the number of ranks; without it `the_ranks`. Under torchrun it is the number of processes.
        limit: seconds until ranks that still run are killed.

    Raises:
        Mismatch: names each rank that failed, and how: by an error, by a signal, or where it hung.
    """
    size = the_ranks() if ranks is None or under_torchrun() else ranks
    for name in _SLOW_IMPORTS:
        importlib.import_module(name)
    run = _next_name()
    numbers: Sequence[int] = range(size)
    if under_torchrun():
        numbers = [this_process()]
        if absent := meet(run, PATIENCE):
            raise Mismatch(f"all {size} ranks to begin", absent)
    file = f"/proc/{os.getpid()}/fd/{os.memfd_create('store')}"
    started = []
    try:
        for number in numbers:
            join = functools.partial(_join, file, number, size, limit, run)
            started.append(_Rank(number, join, body, arguments))
        _wait(started, limit)
    finally:
        for rank in started:
            rank.end()
        os.close(int(file.rpartition("/")[2]))
    return _results([rank.found for rank in started], size)


@contextlib.contextmanager
def common_folder() -> Iterator[str]:
    """Return a folder for all ranks, also for those of torchrun on one machine; it is removed afterwards."""
    if not under_torchrun():
        with tempfile.TemporaryDirectory(prefix="keyedopt-") as name:
            yield name
        return
    job = [os.environ[f"TORCHELASTIC_{name}"] for name in ("RUN_ID", "RESTART_COUNT")]
    name = hashlib.sha256(" ".join([*job, os.environ["MASTER_PORT"], _next_name()]).encode()).hexdigest()
    folder = Path(tempfile.gettempdir(), f"keyedopt-{name[:16]}")
    folder.mkdir(mode=0o700, exist_ok=True)
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # each process removes it


def _join(file: str, number: int, size: int, limit: float, run: str) -> None:
    """Make the default group of the ranks of a case."""
    distributed: Any = torch.distributed
    seconds = 2 * limit  # the limit ends a hanging rank first, and says where it was
    if under_torchrun():
        shared = distributed.PrefixStore(run, store(seconds))
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        shared = distributed.FileStore(file, size)
    backend = "gloo"
    if the_device().type == "cuda":
        backend = "nccl"
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", number)))
    timeout = datetime.timedelta(seconds=seconds)
    distributed.init_process_group(backend, store=shared, rank=number, world_size=size, timeout=timeout)


class _Rank:
    """A fork that runs a function; its outcome comes back in memory that both processes have."""

    def __init__(
        self, number: int, join: Callable[[], None], body: Callable[..., Any], arguments: Sequence[Any]
    ) -> None:
        self.number = number
        self._said, self._stack = os.memfd_create("outcome"), os.memfd_create("stack")
        self._secret = secrets.token_bytes(32)  # else code under test could write its own outcome
        self.status: int | None = None
        parent = os.getpid()
        sys.stdout.flush()
        self._pid = os.fork()
        if not self._pid:
            code = 70
            try:
                _end_with(parent)
                gc.freeze()  # else a collection copies the memory of this process
                faulthandler.register(signal.SIGUSR1, file=self._stack, all_threads=False)
                self._write(_outcome(join, body, arguments))
                code = 0
            finally:
                os._exit(code)  # without the exit handlers of the forked process
        self.process = os.pidfd_open(self._pid)

    def _write(self, outcome: Any) -> None:
        os.ftruncate(self._said, 0)
        os.pwrite(self._said, self._secret + pickle.dumps(outcome), 0)

    def reap(self) -> None:
        """Note how the process ended."""
        self.status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    @property
    def failed(self) -> bool:
        """Whether the process has ended with an error."""
        return self.status is not None and (self.status != 0 or self.outcome()[0] != "result")

    def where(self) -> str:
        """Return where the running process is: the innermost line outside torch."""
        os.kill(self._pid, signal.SIGUSR1)
        end = time.monotonic() + 1.0
        while os.fstat(self._stack).st_size == 0 and time.monotonic() < end:
            time.sleep(0.01)
        lines = os.pread(self._stack, 1 << 16, 0).decode(errors="replace").splitlines()[1:]
        ours = [line.strip() for line in lines if f"{os.sep}torch{os.sep}" not in line]
        return ours[0] if ours else "an unknown place"

    def end(self) -> None:
        """Kill the process if it still runs, after noting where it was."""
        if self.status is None:
            self._write(("hung", self.where()))
            os.kill(self._pid, signal.SIGKILL)
            self.reap()
            self.status = 0
        self.found = self.outcome()
        for descriptor in (self.process, self._said, self._stack):
            os.close(descriptor)

    def outcome(self) -> Any:
        """Return ``("result", value)``, or the kind of a failure and its text."""
        if self.status:
            how = f"killed by signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
            return "ended", how
        written = os.pread(self._said, os.fstat(self._said).st_size, 0)
        if not written.startswith(self._secret):
            return "ended", "exit status 0 before its end"
        return pickle.loads(written[len(self._secret) :])


def _end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(70)


def _outcome(join: Callable[[], None], body: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call the function on this rank; under torchrun, return the outcomes of all ranks."""
    torch.set_num_threads(1)  # the threads of the parent are not in this process
    try:
        torch.ones(1, requires_grad=True).backward()
    except RuntimeError as error:  # the threads of autograd are missing, too
        return "unable", str(error)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            join()
            found: Any = ("result", body(*arguments))
        for name in filter(None, (replaced() for replaced in _REPLACED)):
            found = ("raised", f"an error: {name} was replaced")
    except Mismatch as error:
        found = ("mismatch", (error.expected, error.seen))
    except BaseException as error:  # also an exit of the code under test
        lost = "by peer" in str(error)  # gloo's words; another rank is the cause
        found = ("raised", "a lost connection" if lost else f"{type(error).__name__}: {error}")
    if not under_torchrun():
        return found
    everywhere: list[Any] = [None] * the_ranks()
    try:
        torch.distributed.all_gather_object(everywhere, found)
    except (RuntimeError, ValueError):  # another rank has ended, or there is no group
        return found if found[0] != "result" else ("raised", "a lost connection")
    return "result", everywhere


def _wait(ranks: Sequence[_Rank], limit: float) -> None:
    """Wait until all ranks have ended; shorter after one has failed."""
    running = {rank.process: rank for rank in ranks}
    poll = select.poll()
    for process in running:
        poll.register(process, select.POLLIN)
    end = time.monotonic() + limit
    while running and (left := end - time.monotonic()) > 0:
        for process, _ in poll.poll(left * 1000):
            poll.unregister(process)
            rank = running.pop(process)
            rank.reap()
            if rank.failed:
                end = min(end, time.monotonic() + GRACE)


def _results(outcomes: Sequence[Any], size: int) -> list[Any]:
    first = 0
    if under_torchrun() and outcomes[0][0] == "result":
        outcomes = outcomes[0][1]
    elif under_torchrun():
        first = this_process()  # the outcome of this process only
    bad = [(rank, *outcome) for rank, outcome in enumerate(outcomes, first) if outcome[0] != "result"]
    bad.sort(key=lambda one: one[2] == "a lost connection")
    if not bad:
        return [value for _, value in outcomes]
    for _, kind, text in bad:
        if kind == "unable":  # no fault of the implementation
            raise RuntimeError(f"ranks cannot be forked from a process that has trained: {text}")
    wrong = next((f"rank {rank}: {text[0]}" for rank, kind, text in bad if kind == "mismatch"), "")
    verbs = {"mismatch": "saw", "raised": "raised", "hung": "hung in", "ended": "ended:"}
    texts = [
        f"rank {rank} of {size} {verbs[kind]} {text[1] if kind == 'mismatch' else text}"
        for rank, kind, text in bad
    ]
    raise Mismatch(wrong or f"all {size} ranks to end", "; ".join(texts))
