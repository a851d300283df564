"""A process that runs a module, and ends, with all it started, at the latest with this one.

The code of an implementation runs in such processes alone. They see the folder that keyedopt was started
from, after everything that is installed, and nothing of the settings that pytest would find there.
"""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from keyedopt.conformance.text import one_line


def _environment(folder: Path) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment["PYTHONSAFEPATH"] = "1"  # the present folder shadows no module
    environment["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
    environment.setdefault("OMP_NUM_THREADS", "1")  # a worker a processor; more threads only wait
    return environment


class Process:
    """A module that runs in a process of its own; what it prints goes to a log in ``folder``.

    Args:
        module: what to run, as in ``python -m``.
        arguments: its command line.
        folder: a scratch folder, for the log and what libraries store.
        path: folders from which modules can be imported, besides the usual ones.
    """

    def __init__(self, module: str, arguments: Sequence[str], folder: Path, path: Sequence[str] = ()) -> None:
        # The process holds the read end: when this one is gone, however it ended, reading gives an end.
        read, self._lifeline = os.pipe()
        settings = json.dumps({"lifeline": read, "path": [*path, os.getcwd()]})
        try:
            with (folder / f"{module.rpartition('.')[2]}.log").open("ab") as log:
                self._log, self._start = Path(log.name), log.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, settings, module, *arguments],
                    env=_environment(folder),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(read,),
                    start_new_session=True,  # Ctrl-C reaches this process alone, which stops the others
                )
        except BaseException:
            os.close(self._lifeline)
            raise
        finally:
            os.close(read)
        self.pid = self._process.pid

    def wait(self, seconds: float) -> bool:
        """Wait for the end; return whether it came in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self.ended

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    @property
    def code(self) -> int:
        """The exit status: negative for a signal."""
        return self._process.wait()

    def ending(self) -> str:
        """Say how it ended."""
        if self.code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-self.code).name}"
        return f"exit status {self.code}"

    def last_words(self) -> str:
        """Return the last line that it printed."""
        with self._log.open("rb") as log:
            log.seek(max(self._start, self._log.stat().st_size - 10_000))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return one_line(lines[-1], 300) if lines else "it printed nothing"

    def stop(self) -> None:
        """End it, and everything that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(OSError):
            os.close(self._lifeline)
        self._lifeline = -1


def _end_with_parent(lifeline: int) -> None:
    with contextlib.suppress(OSError):
        os.read(lifeline, 1)
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Run the module that the command line names."""
    settings = json.loads(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=(settings["lifeline"],), daemon=True).start()
    sys.path += settings["path"]
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
