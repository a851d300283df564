"""Signals that end a run: the first one interrupts it, so that it can tidy up; none disturbs that."""

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Let the first signal to end interrupt the run, and none disturb the writing of what it has."""
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {number: signal.getsignal(number) for number in signals}
    heeded = [number for number, handler in before.items() if handler is not signal.SIG_IGN]

    def interrupt(*_: object) -> NoReturn:
        for number in heeded:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in heeded:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])
