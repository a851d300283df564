"""The entry point ``keyedopt``: heeds signals from its first line on, and imports the command line then."""

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
    """A standard stream whose reader may go away, as ``head`` does, or whose disk may be full.

    The rest is dropped, so that nothing else is lost.
    """

    #: Why bytes were dropped that somebody wants.
    problem = ""

    def write(self, data: Any) -> int:
        """Write bytes; drop them if nobody reads or no place is left."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.problem = str(error.strerror)
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


def _open_streams() -> _Stream:
    """Make the standard streams, and return that of the output.

    One that is closed would be the number of the next file that is opened.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the smallest free number, which is this one
    output, errors = (_Stream(number, "w", closefd=False) for number in (1, 2))
    sys.stdout = io.TextIOWrapper(io.BufferedWriter(output), line_buffering=os.isatty(1))
    sys.stderr = io.TextIOWrapper(io.BufferedWriter(errors), line_buffering=True)
    return output


def main() -> NoReturn:
    """Run the command line."""
    output = None
    try:
        _Interrupts()
        output = _open_streams()
        from keyedopt.cli.main import main as run

        run()
    except KeyboardInterrupt:
        code: object = 2
        sys.stderr.write("keyedopt: interrupted; nothing more was written\n")
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    if output and output.problem:
        code = 2
        sys.stderr.write(f"keyedopt: the output cannot be written: {output.problem}\n")
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 2 if code else 0)


if __name__ == "__main__":
    main()
