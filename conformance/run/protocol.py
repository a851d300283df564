"""How workers report to the runner: in messages over a channel that the runner opened.

A worker gets one end of a socket before it imports the target. A message that cannot be read, or is out of
order, means that somebody other than the worker wrote it, such as a library that writes to every descriptor:
the running case is an error, and no case counts until the next one has started.

==================  ============================================================================
message             meaning
==================  ============================================================================
``collected``       the head of every case: its name, clauses, device, dtype
``start``           the name of the case that begins
``inputs``          the inputs of the case, before it runs
``end``             the record of the case, without its clauses and inputs
==================  ============================================================================

Two things are in files of a folder. ``claimed`` has a dot at the number of each case that a worker has taken,
then the time at which the first worker's last case was taken. ``stack-PID`` is the stack of a worker
that crashed. Who writes to these can only cause errors. Mutants, which are trusted, report into a file
``records-PID.jsonl``.
"""

import contextlib
import faulthandler
import fcntl
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from keyedopt.conformance.results.untrusted import clean

#: What is known of a case before it runs: name, clauses, device, dtype.
Head = dict[str, Any]
#: The byte of a case that a worker has taken, and the bytes of the time at which the first worker took one.
_TAKEN, _TIME = b".", 8
#: Seconds after which another worker takes the next case of the first worker.
_LONG_AGO = 3.0
#: The exit status of a process whose channel the target has closed.
CLOSED = 79
#: The exit status of a worker on whose device nothing can run any more.
DEVICE_LOST = 78
#: What is said of a case during which a message was not the worker's.
FORGED = "tampered: a message came that the worker did not write, or out of order"


def encoder() -> Callable[[Any], str]:
    """Return a function that encodes as `json.dumps` does, of parts in C that cannot be replaced later."""

    def refuse(value: Any) -> Any:
        raise TypeError(f"a {type(value).__name__} is not JSON data")

    module: Any = json.encoder
    parts = (None, refuse, module.encode_basestring_ascii, None, ": ", ", ", False, False, True)
    encode, join = module.c_make_encoder(*parts), "".join
    return lambda value: join(encode(value, 0))


def sender(channel: int) -> Callable[[Mapping[str, Any]], None]:
    """Return the function that sends a message over a channel."""
    end, encode = socket.socket(fileno=channel), encoder()

    def send(message: Mapping[str, Any]) -> None:
        try:
            end.sendall(encode(message).encode() + b"\n")
        except OSError:  # the target has closed the descriptor, and perhaps those of the output too
            os._exit(CLOSED)

    return send


def _file_sender(path: Path) -> Callable[[Mapping[str, Any]], None]:
    file = path.open("a", encoding="utf-8")

    def send(message: Mapping[str, Any]) -> None:
        file.write(json.dumps(message) + "\n")
        file.flush()

    return send


class Writer:
    """The side of the worker.

    Args:
        folder: the folder of the files.
        limit: seconds after which the process ends itself in a case; 0 if a runner watches it.
        channel: the descriptor of the worker's end of a `Channel`; None for a file.
    """

    def __init__(self, folder: Path, limit: float = 0.0, channel: int | None = None) -> None:
        self._limit, self._pid = limit, os.getpid()
        self._send = (
            _file_sender(folder / f"records-{self._pid}.jsonl") if channel is None else sender(channel)
        )
        self._stack: IO[str] = (folder / f"stack-{self._pid}").open("a", encoding="utf-8")
        self._claimed = os.open(folder / "claimed", os.O_RDWR | os.O_CREAT, 0o600)
        self._first: bool | None = None  # unknown before the first case

    def collected(self, heads: Mapping[str, Head]) -> None:
        """Report which cases there are: a case without a record is an error."""
        self._send({"collected": heads})

    def claim(self, of_first: int, count: int) -> int:
        """Take the next case that no worker has taken; return its number, or `count` if there is none.

        The first worker takes the cases that start ranks, because it keeps its ranks for the next such case,
        and those that compile, because what torch imports for one serves all. Another worker takes one only
        if no other case is left, or if the last one was taken long ago, for example because its ranks are in
        a deadlock; and not after its own cases have started threads of autograd, which a fork cannot have.

        Args:
            of_first: the number of cases that the first worker takes; they are the first ones.
            count: the number of all cases.
        """
        if self._first is None:
            self._first = self._is_first()
        fcntl.lockf(self._claimed, fcntl.LOCK_EX, 1, 0)
        try:
            taken = os.pread(self._claimed, count, 0).ljust(count, b"\0")
            last = struct.unpack("d", os.pread(self._claimed, _TIME, count).ljust(_TIME, b"\0"))[0]
            early, other = taken.find(b"\0", 0, of_first), taken.find(b"\0", of_first)
            helps = other < 0 or time.monotonic() - last > _LONG_AGO
            if early >= 0 and (self._first or (helps and not _has_autograd_threads())):
                other = early
                os.pwrite(self._claimed, struct.pack("d", time.monotonic()), count)
            if other >= 0:
                os.pwrite(self._claimed, _TAKEN, other)
            return other if other >= 0 else count
        finally:
            fcntl.lockf(self._claimed, fcntl.LOCK_UN, 1, 0)

    def _is_first(self) -> bool:
        """Whether no other running process was the first one. The kernel ends this lock with the process."""
        try:
            fcntl.lockf(self._claimed, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1)
        except OSError:
            return False
        return True

    @contextlib.contextmanager
    def running(self, head: Head) -> Iterator[None]:
        """Note which case runs, for the record of a crash; end the process if it takes too long."""
        self._send({"start": head})
        faulthandler.enable(file=self._stack, all_threads=False)
        if self._limit:  # a thread in C that needs no interpreter lock: it ends a hanging extension too
            faulthandler.dump_traceback_later(self._limit, exit=True, file=self._stack)
        try:
            yield
        finally:
            if os.getpid() != self._pid:
                os._exit(0)  # a fork that the case made of the worker
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()

    def inputs(self, inputs: Mapping[str, Any]) -> None:
        """Note the inputs of the case before it runs."""
        self._send({"inputs": inputs})

    def add(self, record: Mapping[str, Any]) -> None:
        """Write the record of a finished case, without the parts that are known of it."""
        if os.getpid() == self._pid:
            self._send({"end": {name: record[name] for name in record if name not in ("clauses", "inputs")}})


def _has_autograd_threads() -> bool:
    with contextlib.suppress(FileNotFoundError):  # a thread has just ended
        return any("autograd" in name.read_text() for name in Path("/proc/self/task").glob("*/comm"))
    return True


def claimed(folder: Path, count: int) -> int:
    """Return how many of `count` cases workers have taken."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / "claimed").read_bytes()[:count].count(_TAKEN)
    return 0


def release(folder: Path, number: int) -> None:
    """Let a worker take a case once more."""
    with (folder / "claimed").open("r+b") as file:
        os.pwrite(file.fileno(), b"\0", number)


class Channel:
    """The runner's end of a channel, and the worker's until it is given away."""

    def __init__(self) -> None:
        self._mine, self.theirs = socket.socketpair()
        self._mine.setblocking(False)
        self._mine.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        self.theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._rest = b""

    def messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages since the last call.

        Raises:
            ValueError: a message is not an object of JSON, so the process did not write it.
        """
        while True:
            try:
                data = self._mine.recv(1 << 20)
            except (BlockingIOError, ConnectionError):
                return
            if not data:
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                message = None
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                if not isinstance(message, dict):
                    raise ValueError(FORGED)
                yield message

    def close(self) -> None:
        """Close the runner's end."""
        self._mine.close()


def file_messages(folder: Path, pid: int) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that reads the messages of a process that has ended from its file."""
    path = folder / f"records-{pid}.jsonl"

    def messages() -> list[dict[str, Any]]:
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    return messages


class Reader:
    """The side of the runner, for one worker.

    Args:
        messages: returns the messages since the last call.
        stack: the file with the stack of a crash.
    """

    def __init__(self, messages: Callable[[], Iterator[dict[str, Any]] | list[dict[str, Any]]], stack: Path):
        self._messages, self._stack = messages, stack
        self._head: Head | None = None  # of the running case
        self._inputs: dict[str, Any] = {}
        self._ended: dict[str, Any] | None = None  # the last record, which counts when nothing follows it
        self._names: set[str] = set()  # of the cases that have started
        self.collected: dict[str, Head] = {}
        self.started = 0  # how many cases have begun
        self.forged = False

    def new(self, last: bool = False) -> list[dict[str, Any]]:
        """Return the records since the last call; the very last one when the worker has ended."""
        found: list[dict[str, Any]] = []
        try:
            for message in () if self.forged else self._messages():
                found += self._take(message)
        except (ValueError, KeyError, TypeError, AttributeError):  # not what a worker writes
            self.forged = True
            self._head, self._ended = self._head or self._ended, None
        if last and self._ended is not None and not self.forged:
            found.append(self._ended)
            self._ended = None
        return found

    def _take(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Take a message; return the record that counts now.

        Raises:
            ValueError: the message is out of order; or another error of a message without its parts.
        """
        ((kind, content),) = message.items()
        before, found = self._ended, []
        if kind == "collected" and not self.started:
            self.collected = self.collected or content
        elif kind == "start" and self._head is None and content["case"] not in self._names:
            found = [before] if before is not None else []
            self._head, self._inputs, self._ended = content, {}, None
            self._names.add(content["case"])
            self.started += 1
        elif kind == "inputs" and self._head is not None:
            self._inputs = content
        elif kind == "end" and self._head is not None and content["case"] == self._head["case"]:
            self._ended = {**content, "clauses": self._head["clauses"], "inputs": self._inputs}
            self._head = None
        else:
            raise ValueError(FORGED)
        return found

    def running(self) -> int | None:
        """Return the number of the running case, or None between cases."""
        return self.started if self._head is not None else None

    def crash(self, seen: str) -> dict[str, Any] | None:
        """Return the record of the case in which the worker ended, or None if it ended outside a case."""
        if self._head is None:
            return None
        trace = ""
        with contextlib.suppress(OSError):
            trace = self._stack.read_text(encoding="utf-8", errors="replace")
        if "Timeout (" in trace:
            seen = "timeout: it did not end within the time limit"
        return {
            **{name: self._head.get(name) for name in ("case", "clauses", "device", "dtype")},
            "outcome": "error",
            "inputs": self._inputs,
            "expected": "the case to end",
            "seen": FORGED if self.forged else seen,
            "trace": clean(trace, 8000),
        }
