"""The fork server: one process imports torch and collects the suite, and every other process is a fork of it.

Importing torch and collecting the suite takes seconds, and every worker needs both. The fork server does both
once, before any code of the target runs, so a crash of the target cannot reach it. The smoke stage is forked
after the import of torch, workers are forked after the collection; each imports the target itself.

`multiprocessing`'s forkserver is not used, because the tests of hostile targets need what it does not do:

- If a target kills it, every child has exit status 255, as if the child had chosen that, and the next start
  raises a bare EOFError or silently starts another server.
- Its children survive a parent that is killed, and a child is killed without the processes that it started.
- It copies `sys.path` and the main module of the parent into the children, so that a file ``torch.py`` in the
  current folder can shadow torch, and it prints on the parent's terminal.
- It forks although threads run or a device is in use. Here such a fork executes a new interpreter instead.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from keyedopt.conformance.run import family

#: What a step of one of torch's optimizers imports.
IMPORTED = ("torch", "torch._dynamo", "torch.distributed.tensor")
#: Seconds between looks at the children.
TICK = 0.02
#: Objects that are allocated before a worker looks for reference cycles. Python's 700 costs a fifth of a run.
GARBAGE = 50_000
#: The number of the process that is the server.
_SERVER = [0]

Request = dict[str, Any]


def main() -> None:
    """Serve the process that started this one; in a child, carry out the request."""
    settings = json.loads(sys.argv[1])
    if "request" in settings:  # a new interpreter, because a fork was not possible
        _enter(settings)
        _carry_out(settings["request"], lambda: settings["request"])
        return
    family.adopt_orphans()
    family.end_with_parent(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: _end(0))
    gc.disable()  # an import makes no garbage; each child enables it
    import_all(IMPORTED)
    server = _Server(settings)
    _carry_out(None, server.next_request)
    _end(0)


def _end(code: int) -> NoReturn:
    """End the server, and first everything that it started."""
    family.end_children()
    os._exit(code)


def _carry_out(request: Request | None, next_request: Callable[[], Request | None]) -> None:
    """Run a module, or collect the suite and then what is requested next."""
    request = request or next_request()
    if request is None:
        return
    if "module" in request:
        sys.argv = [request["module"], *request["arguments"]]
        if request["channel"] is not None:
            sys.argv.append(str(request["channel"]))
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    else:
        code = _collect(request["collect"], next_request)
        if _SERVER[0] == os.getpid():
            family.end_children()
        os._exit(code)  # without waiting for threads of the target


def _collect(arguments: list[str], next_request: Callable[[], Request | None]) -> int:
    """Collect the suite with pytest, and run it in each worker that is requested; return the exit status."""
    import pytest

    class Collected:
        @pytest.hookimpl(tryfirst=True)
        def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
            if session.testsfailed:
                return None  # a file of the suite cannot be imported: pytest says so
            engine: Any = session.config.pluginmanager.get_plugin("keyedopt-engine")
            engine.prepare(session)
            gc.freeze()  # or the garbage collection of each worker would copy what was collected
            request = next_request()
            if request is None:
                return True
            gc.set_threshold(GARBAGE)
            if "declare" in request:
                engine.declare(session, Path(request["declare"]))
                return True
            run = engine.pytest_runtestloop  # before the target can replace it
            folder, channel = Path(request["folder"]), request["channel"]
            engine.enter_worker(session, request["target"], folder, channel, request["limit"])
            gc.freeze()  # so that cases that collect garbage need not look at all that the target imported
            found: bool = run(session)
            return found

    return int(pytest.main(arguments, [Collected()]))


def import_all(names: Iterable[str]) -> None:
    """Import modules; whoever needs one that is missing reports it."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()  # or the garbage collection of each child would copy the memory that they share


def _enter(settings: dict[str, Any]) -> None:
    """Prepare a child for the code of a target: it ends with the server, and its memory is bounded."""
    gc.enable()
    sys.path += settings["path"]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    family.end_with_parent(signal.SIGKILL)
    family.bound_memory()


class _Server:
    """Receives requests, forks a child for each, and reports how the children ended."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        _SERVER[0] = os.getpid()
        self._socket = socket.socket(fileno=settings["requests"])
        self._children: set[int] = set()
        self._received = b""
        self._channels: list[int] = []  # of requests that are not carried out yet

    def next_request(self) -> Request | None:
        """Return the request of this child; or, in the server, one to collect, or None at the end."""
        while True:
            waiting = b"\n" not in self._received  # or else there is a request from before the collection
            if waiting and select.select([self._socket], [], [], TICK if self._children else None)[0]:
                data, descriptors, _, _ = socket.recv_fds(self._socket, 1 << 16, 8)
                self._channels += descriptors
                if not data:
                    return None
                self._received += data
            while b"\n" in self._received:
                line, _, self._received = self._received.partition(b"\n")
                request: Request = json.loads(line)
                if "collect" in request:
                    self._settings["collect"] = request["collect"]
                    return request
                if self._fork(request):
                    return request
            for pid in list(self._children):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self._children.remove(pid)
                    family.end_children(self._children)  # what it left behind in other sessions
                    self._report({"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _fork(self, request: Request) -> bool:
        """Start a child for a request; return whether this is the child."""
        alone = len(os.listdir("/proc/self/task")) == 1
        request["channel"] = channel = self._channels.pop(0) if request["channel"] else None
        pid = os.fork()
        if pid:
            with contextlib.suppress(OSError):  # both do it, or one could be too late
                os.setpgid(pid, pid)
            if channel is not None:
                os.close(channel)
            self._children.add(pid)
            self._report({"started": pid})
            return False
        self._socket.close()
        os.setpgid(0, 0)
        _write_to(request["log"])
        if not alone or _device_in_use():
            if channel is not None:
                os.set_inheritable(channel, True)
            settings = {**self._settings, "request": {"collect": self._settings.get("collect"), **request}}
            os.execv(
                sys.executable,
                [sys.executable, "-m", "keyedopt.conformance.run.fork_server", json.dumps(settings)],
            )
        _enter(self._settings)
        return True

    def _report(self, message: dict[str, int]) -> None:
        with contextlib.suppress(BrokenPipeError):  # then nobody reads reports
            self._socket.sendall(json.dumps(message).encode() + b"\n")


def _write_to(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for output in (1, 2):
        os.dup2(descriptor, output)
    os.close(descriptor)


def _device_in_use() -> bool:
    """Return whether torch cannot use its devices in this fork, because the server used them."""
    torch = sys.modules.get("torch")
    bad = [getattr(getattr(torch, "_C", None), f"_{kind}_isInBadFork", None) for kind in ("cuda", "xpu")]
    return any(one() for one in bad if one)


if __name__ == "__main__":
    main()
