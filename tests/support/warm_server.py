"""One process that imports torch and the suite for all runs of a pytest worker.

Each run starts a fork server (`keyedopt.conformance.run.fork_server`), whose imports take seconds. In these
tests the fork server of each run is itself a fork of one warm process. Tests that change the environment, and
the tests of the processes and of the command line, start a new fork server, as users do.
"""

import contextlib
import importlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from keyedopt.conformance.run import case_sources, fork_server, processes

#: The variable that differs between runs; it is read after the fork.
OWN = "HYPOTHESIS_STORAGE_DIRECTORY"


class Server:
    """The fork server of a run, with the used part of the interface of `subprocess.Popen`."""

    def __init__(self, told: int) -> None:
        self._told = os.fdopen(told, "r")
        self.pid = int(self._told.readline())

    def wait(self) -> int:
        if not self._told.closed:
            with self._told:
                self._code = int(self._told.readline())
        return self._code


class Warm:
    """Replaces `keyedopt.conformance.run.processes.start_server`."""

    def __init__(self) -> None:
        self.start_new = processes.start_server
        self._environment = _shared(processes._environment(Path()))
        self._original: subprocess.Popen[bytes] | None = None
        self._asked, self._asks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def start(
        self,
        settings: Mapping[str, Any],
        environment: Mapping[str, str],
        log: IO[bytes],
        kept: tuple[int, ...],
    ) -> "Server | subprocess.Popen[bytes]":
        if _shared(environment) != self._environment:
            return self.start_new(settings, environment, log, kept)
        if self._original is None:
            number = self._asked.fileno()
            self._original = subprocess.Popen(
                [sys.executable, __file__, str(number)],
                env=self._environment,
                pass_fds=[number],
                start_new_session=True,
            )
            self._asked.close()
        told, tell = os.pipe()
        message = {"settings": settings, "folder": os.getcwd(), OWN: environment[OWN]}
        socket.send_fds(self._asks, [json.dumps(message).encode()], [*kept, log.fileno(), tell])
        os.close(tell)
        return Server(told)

    def end(self) -> None:
        self._asks.close()
        if self._original is not None:
            try:
                self._original.wait(10)
            except subprocess.TimeoutExpired:  # another process holds its channel open
                self._original.kill()
                self._original.wait()


def _shared(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name != OWN}


def _go_on(message: dict[str, Any], numbers: list[int]) -> None:
    """Become the fork server of a run, in a fork of the warm process."""
    os.setsid()
    requests, log, tell = numbers
    os.write(tell, b"%d\n" % os.getpid())
    os.close(tell)
    for output in (1, 2):
        os.dup2(log, output)
    os.close(log)
    os.chdir(message["folder"])
    os.environ[OWN] = message[OWN]
    sys.argv[1:] = [json.dumps({**message["settings"], "requests": requests})]
    fork_server.main()


def main() -> None:
    """Fork a fork server for each request until the requests end; report how each ended."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in (*fork_server.IMPORTED, "keyedopt.conformance.run.engine", *case_sources.modules()):
        importlib.import_module(name)
    asked = socket.socket(fileno=int(sys.argv[1]))
    tells: dict[int, int] = {}
    while True:
        if select.select([asked], [], [], fork_server.TICK if tells else None)[0]:
            data, numbers, _, _ = socket.recv_fds(asked, 1 << 20, 4)
            if not data:
                return
            pid = os.fork()
            if not pid:
                for number in (asked.detach(), *tells.values()):
                    os.close(number)
                _go_on(json.loads(data), numbers)
                return
            *others, tells[pid] = numbers
            for number in others:
                os.close(number)
        for pid in list(tells):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(BrokenPipeError):
                    os.write(tells[pid], b"%d\n" % os.waitstatus_to_exitcode(status))
                os.close(tells.pop(pid))


if __name__ == "__main__":
    main()
