"""How workers report to the runner: in files of one folder, so that a crash loses nothing.

======================  ======================================================================
``collected.json``      the head of every case: its name, clauses, device, dtype
``claimed``             one byte for each case, in the order of collection, that a worker runs or ran
``running-PID``         the case that a worker runs: its head, its inputs and, after a crash, the stack;
                        empty between cases
``records-PID.jsonl``   the cases that a worker has finished, one per line
======================  ======================================================================
"""

import contextlib
import faulthandler
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from keyedopt.conformance.results.untrusted import clean

#: What is known of a case before it runs: name, clauses, device, dtype.
Head = dict[str, Any]


class Writer:
    """The side of the worker.

    Args:
        folder: the folder of the files.
        limit: seconds after which the process ends itself in a case; 0 if a runner watches it.
    """

    def __init__(self, folder: Path, limit: float = 0.0) -> None:
        self.folder = folder
        self._limit = limit
        self._pid = os.getpid()
        self._running: IO[str] = (folder / f"running-{self._pid}").open("a", encoding="utf-8")
        self._claimed = os.open(folder / "claimed", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._records = (folder / f"records-{self._pid}.jsonl").open("a", encoding="utf-8")

    def collected(self, heads: Mapping[str, Head]) -> None:
        """Report which cases there are: a case without a record is an error."""
        scratch = self.folder / f"collecting-{self._pid}"
        scratch.write_text(json.dumps(heads), encoding="utf-8")
        scratch.replace(self.folder / "collected.json")

    def claim(self) -> int:
        """Take the next case that no worker has taken; return its number, also after the last case.

        Appending to a file is atomic: the position afterwards tells which byte is this worker's.
        """
        os.write(self._claimed, b".")
        return os.lseek(self._claimed, 0, os.SEEK_CUR) - 1

    @contextlib.contextmanager
    def running(self, head: Head) -> Iterator[None]:
        """Note which case runs, for the record of a crash; end the process if it takes too long."""
        self._note(head)
        faulthandler.enable(file=self._running, all_threads=False)
        if self._limit:  # a thread in C that needs no interpreter lock: it ends a hanging extension too
            faulthandler.dump_traceback_later(self._limit, exit=True, file=self._running)
        try:
            yield
        finally:
            if os.getpid() != self._pid:
                os._exit(0)  # a fork that the case made of the worker
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()
        self._running.truncate(0)

    def inputs(self, inputs: Mapping[str, Any]) -> None:
        """Note the inputs of the case before it runs."""
        self._note({"inputs": inputs})

    def _note(self, what: Mapping[str, Any]) -> None:
        self._running.write(json.dumps(what) + "\n")
        self._running.flush()

    def add(self, record: Mapping[str, Any]) -> None:
        """Write the record of a finished case."""
        self._records.write(json.dumps(record) + "\n")
        self._records.flush()


def collected(folder: Path) -> dict[str, Head]:
    """Return the head of each case by name; empty before the first worker has reported."""
    with contextlib.suppress(FileNotFoundError):
        heads: dict[str, Head] = json.loads((folder / "collected.json").read_text(encoding="utf-8"))
        return heads
    return {}


def claimed(folder: Path) -> int:
    """Return how many cases workers have taken, or more if they have looked for another one in vain."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / "claimed").stat().st_size
    return 0


class Reader:
    """The side of the runner, for one worker."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._records = folder / f"records-{pid}.jsonl"
        self._running = folder / f"running-{pid}"
        self._position = 0

    def new(self) -> list[dict[str, Any]]:
        """Return the records since the last call. An incomplete line is returned when it is complete."""
        if not self._records.exists():
            return []
        with self._records.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._position += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def running(self) -> bytes | None:
        """Return the head of the running case as JSON, or None."""
        with contextlib.suppress(FileNotFoundError):
            return self._running.read_bytes().partition(b"\n")[0] or None
        return None

    def crash(self, seen: str) -> dict[str, Any] | None:
        """Return the record of the case in which the worker ended, or None if it ended outside a case."""
        head = self.running()
        if head is None:
            return None
        rest = self._running.read_text(encoding="utf-8", errors="replace").splitlines()[1:]
        inputs: dict[str, Any] = {}
        for line in rest:
            if line.startswith('{"inputs"'):
                with contextlib.suppress(json.JSONDecodeError):
                    inputs = json.loads(line)["inputs"]
        trace = "\n".join(line for line in rest if not line.startswith('{"inputs"'))
        if any(line.startswith("Timeout (") for line in rest):
            seen = "timeout: it did not end within the time limit"
        return {
            **json.loads(head),
            "outcome": "error",
            "inputs": inputs,
            "expected": "the case to end",
            "seen": seen,
            "trace": clean(trace, 8000),
        }
