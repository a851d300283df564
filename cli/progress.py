"""Progress on stderr: a bar with an estimate on a terminal, a line now and then in a pipe."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

#: Seconds between two lines in a pipe.
EVERY = 10.0

#: Called with a description, the number of finished steps, and the number of all steps if it is known.
Step = Callable[[str, int, int | None], None]


@contextmanager
def progress(text: str) -> Iterator[Step]:
    """Yield a function that shows the present step; the description is `text` until the first call."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(text, total=None)
        yield lambda now, done, total: bar.update(task, description=now, completed=done, total=total)


def _lines() -> Step:
    began = shown = time.monotonic()

    def step(text: str, done: int, total: int | None) -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown >= EVERY and total:
            shown = now
            known = 10 * done >= total  # before that, one slow step would be an hour
            left = f", about {(now - began) * (total - done) / done:.0f} s left" if known else ""
            sys.stderr.write(f"{text}: {done / total:.0%} after {now - began:.0f} s{left}\n")
            sys.stderr.flush()

    return step
