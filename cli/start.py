"""The entry point ``keyedopt``: heeds signals from its first line on, and imports the command line then."""

import contextlib
import io
import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

#: Seconds between attempts to interrupt an import, and their number. An import may swallow an interrupt.
AGAIN, ATTEMPTS = 0.05, 100
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Stream(io.FileIO):
    """A standard stream whose reader may go away, as ``head`` does: the rest is dropped."""

    def write(self, data: Any) -> int:
        """Write bytes; drop them if nobody reads."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


class _Interrupts:
    """Raises KeyboardInterrupt at the first signal; not in an import, which might catch it."""

    def __init__(self) -> None:
        self._left = ATTEMPTS
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup and shells in the background set it
                signal.signal(number, self._heed)

    def _heed(self, number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, self._heed)
        while frame is not None and self._left:
            if frame.f_code.co_filename.startswith("<frozen importlib"):
                self._left -= 1
                signal.setitimer(signal.ITIMER_REAL, AGAIN)
                return
            frame = frame.f_back
        raise KeyboardInterrupt


def _open_streams() -> None:
    """Make the standard streams; one that is closed would be the number of the next file that is opened."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the smallest free number, which is this one
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = io.BufferedWriter(_Stream(number, "w", closefd=False))
        setattr(sys, name, io.TextIOWrapper(stream, line_buffering=number == 2 or os.isatty(number)))


def main() -> NoReturn:
    """Run the command line."""
    try:
        _Interrupts()
        _open_streams()
        from keyedopt.cli.main import main as run

        run()
    except KeyboardInterrupt:
        code: object = 2
        sys.stderr.write("keyedopt: interrupted; nothing more was written\n")
    except SystemExit as end:
        code = end.code
    try:
        sys.stdout.flush()
    except OSError as error:
        code = 2
        with contextlib.suppress(OSError):  # which may be as full
            sys.stderr.write(f"keyedopt: the output cannot be written: {error.strerror}\n")
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 2 if code else 0)


if __name__ == "__main__":
    main()
