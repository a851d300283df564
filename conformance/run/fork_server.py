"""The processes that run the code of an implementation, forked from one that has imported torch.

To import torch takes seconds, and every process needs it: so one imports it, before any code of the
implementation, and each of the others is a copy of that one as it then was. So it is with pytest and
Hypothesis, once there are to be workers. Where a copy would not be as good as a new process, because threads
run or a device is in use, it becomes a new one.
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
import threading
from collections.abc import Iterable
from typing import Any

#: What is imported beforehand: what a step of one of torch's optimizers imports.
IMPORTED = ("torch", "torch._dynamo", "torch.distributed.tensor")
#: Seconds between looks at the processes.
TICK = 0.02


def main() -> None:
    """Serve the process that started this one; in a copy, run the module that it asked for."""
    settings = json.loads(sys.argv[1])
    if "request" not in settings:
        _import(IMPORTED)
        served = _serve(socket.socket(fileno=settings["requests"]))
        if served is None:
            return
        settings["request"], alone = served
        if not alone or _device_in_use():
            os.execv(sys.executable, [sys.executable, "-m", __spec__.name, json.dumps(settings)])
    _end_with(settings["lifeline"])
    request = settings["request"]
    sys.path += settings["path"]
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _import(names: Iterable[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # what needs it says so
            importlib.import_module(name)
    gc.freeze()  # or the garbage collection of each copy would copy the memory that they share


def _end_with(lifeline: int) -> None:
    """End this process, and all it started, when the other end of a pipe is closed, however that came."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            os.read(lifeline, 1)
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def _serve(requests: socket.socket) -> tuple[dict[str, Any], bool] | None:
    """Start a process for each request, and say how it ended.

    Returns:
        In a copy: what it is to run, and whether it is a copy of all that there was. None when no request
        can come any more.
    """
    children: set[int] = set()
    received = b""
    while True:
        ready, _, _ = select.select([requests], [], [], TICK if children else None)
        if ready:
            data = requests.recv(1 << 16)
            if not data:
                return None
            *lines, received = (received + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                _import(request["imports"])
                alone = len(os.listdir("/proc/self/task")) == 1
                pid = os.fork()
                if not pid:
                    requests.close()
                    os.setpgid(0, 0)
                    _write_to(request["log"])
                    return request, alone
                with contextlib.suppress(OSError):  # both do it, or one could be too late
                    os.setpgid(pid, pid)
                children.add(pid)
                _say(requests, {"started": pid})
        for pid in list(children):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                children.remove(pid)
                _say(requests, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _say(requests: socket.socket, message: dict[str, int]) -> None:
    with contextlib.suppress(BrokenPipeError):  # then there is nothing to receive either
        requests.sendall(json.dumps(message).encode() + b"\n")


def _write_to(log: str) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for output in (1, 2):
        os.dup2(descriptor, output)
    os.close(descriptor)


def _device_in_use() -> bool:
    """Return whether torch cannot use its devices in this copy, because the original did."""
    torch = sys.modules.get("torch")
    bad = [getattr(getattr(torch, "_C", None), f"_{kind}_isInBadFork", None) for kind in ("cuda", "xpu")]
    return any(one() for one in bad if one)


if __name__ == "__main__":
    main()
