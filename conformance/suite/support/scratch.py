"""Temporary folders that are removed also if a run is killed: by the next run."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def scratch_folder(name: str = "") -> Iterator[Path]:
    """Yield a temporary folder, and remove those of earlier runs that were killed.

    A folder has a file that is locked while one of its processes, or a fork of one, lives.

    Args:
        name: of a folder that several processes share; each removes it.
    """
    parent = Path(tempfile.gettempdir())
    for lock in parent.glob("keyedopt-*/lock"):
        with contextlib.suppress(OSError), lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while that run goes on
            shutil.rmtree(lock.parent, ignore_errors=True)
    folder = parent / f"keyedopt-{name}" if name else Path(tempfile.mkdtemp(prefix="keyedopt-"))
    folder.mkdir(mode=0o700, exist_ok=True)
    own = folder / f".lock-{os.getpid()}"
    try:
        with own.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            own.rename(folder / "lock")  # nobody sees the file before it is locked
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
