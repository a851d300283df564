"""Start the processes that run the code of an implementation, and end them with this process.

Each is the leader of a process group, which is killed with it. Modules are also imported from the folder that
keyedopt was started in, after everything that is installed; pytest's settings in that folder are ignored.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from keyedopt.conformance.results.errors import KeyedoptError
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.run import family
from keyedopt.conformance.run.protocol import CLOSED
from keyedopt.conformance.suite.support.clock import LOOK, RAISE, Clock

#: Seconds that the import of torch and the collection of the suite may take.
PATIENCE = 180.0
#: What a process did that ended with the status `CLOSED`.
CLOSES = "closed file descriptors of its process"
#: Seconds that the fork server may take to end everything that it started.
GRACE = 5.0


class ProcessError(KeyedoptError):
    """A process cannot be started, or its exit status is unknown; the message says why."""


def _environment(folder: Path) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment["PYTHONSAFEPATH"] = "1"  # the present folder shadows no module
    environment["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    environment["PYTHONUNBUFFERED"] = "1"  # keeps what a target prints, in order, also if it calls `os._exit`
    environment.setdefault("OMP_NUM_THREADS", "1")  # the workers share the processors
    environment.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # CUDA's own check prevents use in forks
    return environment


def start_server(
    settings: Mapping[str, Any], environment: Mapping[str, str], log: IO[bytes], kept: tuple[int, ...]
) -> "subprocess.Popen[bytes]":
    """Start the fork server.

    Args:
        settings: its command line, as JSON.
        environment: its environment and that of its children.
        log: the file for its output.
        kept: the file descriptors that it inherits.
    """
    return subprocess.Popen(
        [sys.executable, "-m", "keyedopt.conformance.run.fork_server", json.dumps(settings)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=kept,
        start_new_session=True,  # Ctrl-C reaches only this process, which stops the others
    )


class Processes:
    """Start processes as forks of `keyedopt.conformance.run.fork_server`.

    Args:
        folder: a scratch folder for logs, records and the files of libraries.
        path: folders that are appended to `sys.path`.
        limit: seconds that the import of torch may take, if these are more than `PATIENCE`.
    """

    def __init__(self, folder: Path, path: Sequence[str] = (), limit: float = 0.0) -> None:
        self.folder, self.patience = folder, max(PATIENCE, limit)
        self._codes: dict[int, int] = {}  # exit statuses
        self._started: list[int] = []  # processes that `start` has not returned yet
        self._received = b""
        self._requests, requests = socket.socketpair()
        # The server ends, with everything that it started, when the other end of its socket is closed.
        settings = {"requests": requests.fileno(), "path": [*path, os.getcwd()]}
        try:
            with (folder / "server.log").open("ab") as log:
                self._server = start_server(settings, _environment(folder), log, (requests.fileno(),))
        except BaseException:
            self._requests.close()
            raise
        finally:
            requests.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._requests.close()
        for number in (signal.SIGTERM, signal.SIGCONT):  # it may have been stopped
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._server.pid, number)
        end = time.monotonic() + GRACE
        while family.state(self._server.pid) not in ("", "Z", "X") and time.monotonic() < end:
            time.sleep(0.005)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()

    def start(self, module: str, arguments: Sequence[str], channel: socket.socket | None = None) -> "Process":
        """Run a module, as ``python -m`` does, with a command line; its output goes to a log.

        If a channel is given, the number of its descriptor follows the arguments.

        Raises:
            ProcessError: no process can be started.
        """
        return self._start(
            {"module": module, "arguments": list(arguments)}, module.rpartition(".")[2], channel
        )

    def collect(self, arguments: Sequence[str]) -> None:
        """Collect the suite with pytest's command line, in the fork server, while other processes run.

        Afterwards only workers can be started.
        """
        self._send({"collect": list(arguments)})

    def declared(self) -> dict[str, Any]:
        """Return the inputs of each collected case by name: ``inputs`` as literals, names of ``drawn`` ones.

        Raises:
            ProcessError: no process can be started, or it did not write them.
        """
        file = self.folder / "declared.json"
        process = self._start({"declare": str(file)}, "worker")
        if process.code != 0 or not file.exists():
            raise ProcessError(f"the cases could not be listed ({process.ending()}): {process.last_words()}")
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found

    def start_worker(self, target: str, channel: socket.socket, limit: float) -> "Process":
        """Run the collected cases on a target, which are reported over a channel.

        Args:
            target: as on the command line.
            channel: the worker's end.
            limit: seconds that a case may take.

        Raises:
            ProcessError: no process can be started.
        """
        request = {"target": target, "folder": str(self.folder), "limit": limit}
        return self._start(request, "worker", channel)

    def _start(self, request: dict[str, Any], name: str, channel: socket.socket | None = None) -> "Process":
        log = self.folder / f"{name}.log"
        log.touch()
        begins = log.stat().st_size
        request |= {"log": str(log), "channel": channel is not None}
        try:
            self._send(request, [channel.fileno()] if channel else [])
        finally:
            if channel:
                channel.close()
        clock, limit = Clock([self._server.pid]), self.patience
        while not self._receive(lambda: bool(self._started), LOOK):
            if clock.reached(limit):
                raise ProcessError(f"torch and the suite were not imported within {limit:g} s{RAISE}")
        return Process(self, self._started.pop(), log, begins)

    def _send(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        data = json.dumps(request).encode() + b"\n"
        try:
            sent = socket.send_fds(self._requests, [data], descriptors)
            self._requests.sendall(data[sent:])
        except OSError:
            raise self._gone() from None

    def code(self, pid: int, seconds: float = 0.0) -> int | None:
        """Wait until a process has ended; return its exit status, or None if it is still running.

        Raises:
            ProcessError: the fork server has ended.
        """
        self._receive(lambda: pid in self._codes, seconds)
        return self._codes.get(pid)

    def _receive(self, enough: Callable[[], bool], seconds: float) -> bool:
        """Receive reports until there are enough; return False if the time is over before."""
        end = time.monotonic() + seconds
        while not enough():
            left = max(0.0, end - time.monotonic())
            if not select.select([self._requests], [], [], min(left, 0.5))[0]:
                if family.state(self._server.pid) == "T":
                    raise ProcessError("the process that starts the others was stopped by the target")
                if left <= 0.5:
                    return False
                continue
            data = b""
            with contextlib.suppress(ConnectionError):
                data = self._requests.recv(1 << 16)
            if not data:
                raise self._gone()
            *lines, self._received = (self._received + data).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "started" in message:
                    self._started.append(message["started"])
                    self._codes.pop(message["started"], None)  # of an earlier process with the same number
                else:
                    self._codes[message["ended"]] = message["code"]
        return True

    def _gone(self) -> ProcessError:
        """Return the error to raise when the fork server has ended."""
        ending, said = _how_ended(self._server.wait()), _last_words(self.folder / "server.log")
        return ProcessError(f"the process that imports torch and starts the others ended ({ending}): {said}")


class Process:
    """A process that `Processes` started."""

    def __init__(self, processes: Processes, pid: int, log: Path, begins: int) -> None:
        self.pid = pid
        self._processes, self._log, self._begins = processes, log, begins

    def wait(self, seconds: float) -> bool:
        """Wait for the end; return whether the process ended in time.

        Raises:
            ProcessError: the fork server has ended.
        """
        return self._processes.code(self.pid, seconds) is not None

    @property
    def ended(self) -> bool:
        """Whether the process has ended.

        Raises:
            ProcessError: the fork server has ended.
        """
        return self.wait(0.0)

    @property
    def code(self) -> int:
        """The exit status: negative for a signal.

        Raises:
            ProcessError: the process does not end, or the fork server has ended.
        """
        seconds = self._processes.patience
        code = self._processes.code(self.pid, seconds)
        if code is None:
            raise ProcessError(f"process {self.pid} does not end within {seconds:g} s{RAISE}")
        return code

    def ending(self) -> str:
        """Return how the process ended: a signal or an exit status."""
        return _how_ended(self.code)

    def last_words(self) -> str:
        """Return the last line that the process printed."""
        return _last_words(self._log, self._begins)

    def stop(self) -> None:
        """Kill the process and everything that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessError):
            self.wait(self._processes.patience)


def _how_ended(code: int) -> str:
    if code == CLOSED:
        return f"it {CLOSES}"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"


def _last_words(path: Path, begins: int = 0) -> str:
    """Return the last line of a log after its first ``begins`` bytes."""
    with path.open("rb") as log:
        log.seek(max(begins, path.stat().st_size - 10_000))
        lines = log.read().decode(errors="replace").strip().splitlines()
    return one_line(lines[-1], 300) if lines else "it printed nothing"
