"""Turn the first signal that would end a run into KeyboardInterrupt, and ignore later ones."""

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first signal; ignore later ones while the partial result is written."""
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
