"""What worker processes and the runner tell each other: files in a folder, so that a crash loses nothing.

======================  ======================================================================
``collected.json``      the head of every case: its name, clauses, device, dtype
``claimed-DIGEST``      a worker took this case; no other one will
``running-PID``         the case that a worker runs: its head, its inputs, and, of a crash, the stack
``records-PID.jsonl``   the cases that a worker has run to their end, a line each
======================  ======================================================================
"""

import contextlib
import faulthandler
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from keyedopt.conformance.results.untrusted import clean, plain

#: What a case tells of itself before it runs: name, clauses, device, dtype.
Head = dict[str, Any]


class Writer:
    """The side of a worker.

    Args:
        folder: where the files are.
        limit: seconds that a case may take before the process ends itself, where no runner watches it.
    """

    def __init__(self, folder: Path, limit: float = 0.0) -> None:
        self.folder = folder
        self._limit = limit
        self._pid = os.getpid()
        self._running: IO[str] | None = None
        self._records = (folder / f"records-{self._pid}.jsonl").open("a", encoding="utf-8")

    def collected(self, heads: Mapping[str, Head]) -> None:
        """Say which cases there are: each has to give a record, silence is no pass."""
        scratch = self.folder / f"collecting-{self._pid}"
        scratch.write_text(json.dumps(heads), encoding="utf-8")
        scratch.replace(self.folder / "collected.json")

    def claim(self, case: str) -> bool:
        """Take a case, unless another worker has."""
        digest = hashlib.sha256(case.encode()).hexdigest()[:24]
        try:
            os.close(os.open(self.folder / f"claimed-{digest}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    @contextlib.contextmanager
    def running(self, head: Head) -> Iterator[None]:
        """Note that a case runs, where a crash leaves it, and end the process if it takes too long."""
        path = self.folder / f"running-{self._pid}"
        with path.open("w", encoding="utf-8") as self._running:
            self._note(head)
            faulthandler.enable(file=self._running, all_threads=False)
            if self._limit:  # a thread in C that needs no interpreter lock: it ends a hanging extension too
                faulthandler.dump_traceback_later(self._limit, exit=True, file=self._running)
            try:
                yield
            finally:
                if os.getpid() != self._pid:
                    os._exit(0)  # a copy of the worker, which a case forked and let go on
                faulthandler.cancel_dump_traceback_later()
                faulthandler.disable()
                self._running = None
        path.unlink()

    def inputs(self, inputs: Mapping[str, Any]) -> None:
        """Write down what the case is about to run with."""
        self._note({"inputs": {name: plain(value) for name, value in inputs.items()}})

    def _note(self, what: Mapping[str, Any]) -> None:
        if self._running is not None:
            self._running.write(json.dumps(what) + "\n")
            self._running.flush()

    def add(self, record: Mapping[str, Any]) -> None:
        """Write the record of a case that has ended."""
        self._records.write(json.dumps(record) + "\n")
        self._records.flush()


def collected(folder: Path) -> dict[str, Head]:
    """Return the head of each case by name, or nothing as long as that is not known."""
    with contextlib.suppress(FileNotFoundError):
        heads: dict[str, Head] = json.loads((folder / "collected.json").read_text(encoding="utf-8"))
        return heads
    return {}


def claimed(folder: Path) -> int:
    """Return how many cases a worker has taken."""
    return sum(1 for _ in folder.glob("claimed-*"))


class Reader:
    """The side of the runner, for one worker."""

    def __init__(self, folder: Path, pid: int) -> None:
        self._records = folder / f"records-{pid}.jsonl"
        self._running = folder / f"running-{pid}"
        self._position = 0

    def new(self) -> list[dict[str, Any]]:
        """Return the records that have come since the last call; a line cut short waits for its end."""
        if not self._records.exists():
            return []
        with self._records.open("rb") as file:
            file.seek(self._position)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._position += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def running(self) -> bytes | None:
        """Return what names the case that runs, or None."""
        with contextlib.suppress(FileNotFoundError):
            return self._running.read_bytes().partition(b"\n")[0] or None
        return None

    def crash(self, seen: str) -> dict[str, Any] | None:
        """Return the record of the case that ended its worker, from what it left behind."""
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
