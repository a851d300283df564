"""The processes of torchrun: where they meet before a case, and the exit code that they all return."""

import datetime
import os
import sys
import time
from typing import Any

import torch

from keyedopt.conformance.suite.support.clock import RAISE

#: Seconds that a process waits for the others before a case, or the time limit of a case if that is longer;
#: the time limit of a case is longer by these.
PATIENCE = 60.0
#: Seconds that a process waits for the others to import the target, or to end.
LONG_PATIENCE = 900.0
#: Where processes meet last.
END = "end"


def under_torchrun() -> bool:
    """Return whether torchrun has started this process, or the process that started it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def processes() -> int:
    """Return how many processes torchrun has started."""
    return int(os.environ["WORLD_SIZE"])


def this_process() -> int:
    """Return the number of this process among those of torchrun."""
    return int(os.environ["RANK"])


def store(seconds: float) -> Any:
    """Return the store of all processes of torchrun, which its agent serves.

    Args:
        seconds: how long a call may wait.
    """
    distributed: Any = torch.distributed
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    limit = datetime.timedelta(seconds=seconds)
    served = distributed.TCPStore(address, port, processes(), False, limit)
    return distributed.PrefixStore(f"keyedopt/{os.environ['TORCHELASTIC_RESTART_COUNT']}", served)


def meet(place: str, seconds: float, said: str = "") -> str:
    """Wait until all processes have come to a place; return who did not come, or an empty string.

    Args:
        place: a name that no other meeting has.
        seconds: how long to wait for the others.
        said: what this process tells the others there.
    """
    common, end = store(max(seconds, PATIENCE)), time.monotonic() + seconds  # a busy machine connects late
    common.set(f"{place}/{this_process()}", said)
    absent = list(range(processes()))
    while True:
        # Before those that came are read: a process that ends in time has come.
        ended = [rank for rank in absent if common.check([f"{END}/{rank}"])]
        absent = [rank for rank in absent if not common.check([f"{place}/{rank}"])]
        never = [rank for rank in absent if rank in ended]
        if not absent:
            return ""
        if never or time.monotonic() > end:
            how, more = f"did not come within {seconds:g} s", RAISE
            if never:
                how, more = "has ended before", ""
            return f"rank {(never or absent)[0]} of torchrun {how}: see its messages{more}"
        time.sleep(0.01)


def largest_code(code: int, limit: float = 0.0) -> int:
    """Return the largest of the exit codes of all processes; say so, and return 2, if a process does not end.

    Args:
        code: of this process.
        limit: seconds to wait for the others, if more than `LONG_PATIENCE`.
    """
    if absent := meet(END, max(LONG_PATIENCE, limit), str(code)):
        sys.stderr.write(f"keyedopt: {absent}\n")
        return 2
    common = store(LONG_PATIENCE)
    return max(int(common.get(f"{END}/{rank}")) for rank in range(processes()))
