"""Measuring processes of benchmarks, forked from one process that has imported torch.

A measuring process (`keyedopt.benchmarks.worker`) spends most of its time on importing torch. The warm
process imports no part of keyedopt: each measuring process imports keyedopt from the tree of its build.
"""

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from typing import Any

#: What a measuring process imports beside keyedopt.
IMPORTED = ("torch", "torch._dynamo", "torch.distributed.checkpoint", "numpy", "packaging.requirements")


class Worker:
    """A measuring process, with the used part of the interface of `subprocess.Popen`."""

    def __init__(self, process: int, stdin: int, stdout: int) -> None:
        self._process = process
        self.stdin, self.stdout = os.fdopen(stdin, "w"), os.fdopen(stdout)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)

    def wait(self) -> None:
        select.select([self._process], [], [])


class WarmWorkers:
    """Stands for the module `subprocess` in `keyedopt.benchmarks.build_process`."""

    PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL

    def __init__(self) -> None:
        self._original: subprocess.Popen[bytes] | None = None
        self._asked, self._asks = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def Popen(self, command: list[str], env: dict[str, str], cwd: Any, **streams: Any) -> Worker:  # noqa: N802
        if self._original is None:
            number = self._asked.fileno()
            line = [sys.executable, __file__, str(number)]
            self._original = subprocess.Popen(line, env=env, pass_fds=[number])
            self._asked.close()
        (read, stdin), (stdout, write) = os.pipe(), os.pipe()
        message = {"words": command[3:], "path": env["PYTHONPATH"].split(os.pathsep), "folder": str(cwd)}
        socket.send_fds(self._asks, [json.dumps(message).encode()], [read, write])
        for number in (read, write):
            os.close(number)
        _, (process,), _, _ = socket.recv_fds(self._asks, 1, 1)
        return Worker(process, stdin, stdout)

    def end(self) -> None:
        self._asks.close()
        if self._original is not None:
            self._original.wait()


def _go_on(message: dict[str, Any], read: int, write: int) -> None:
    """Become the measuring process, in a fork of the warm process."""
    for number, stream in ((read, 0), (write, 1), (os.open(os.devnull, os.O_WRONLY), 2)):
        os.dup2(number, stream)
        os.close(number)
    os.chdir(message["folder"])
    sys.path[:1] = message["path"]
    sys.argv[1:] = message["words"]
    runpy.run_module("keyedopt.benchmarks.worker", run_name="__main__", alter_sys=True)


def main() -> None:
    """Fork a measuring process for each request until the requests end."""
    for name in IMPORTED:
        importlib.import_module(name)
    assert not any(name.startswith("keyedopt") for name in sys.modules)
    asked = socket.socket(fileno=int(sys.argv[1]))
    running: set[int] = set()
    while True:
        data, numbers, _, _ = socket.recv_fds(asked, 1 << 16, 2)
        running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
        if not data:
            return
        pid = os.fork()
        if not pid:
            asked.close()
            _go_on(json.loads(data), *numbers)
            return
        running.add(pid)
        process = os.pidfd_open(pid)
        socket.send_fds(asked, [b"."], [process])
        for number in (*numbers, process):
            os.close(number)


if __name__ == "__main__":
    main()
