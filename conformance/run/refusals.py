"""Why a case is unsupported: it cannot run on a device, or an error says what the target does not claim."""

import re
import traceback
from collections.abc import Collection, Sequence

import pytest
import torch

from keyedopt.conformance import spec
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.run.device_seen import of_suite
from keyedopt.conformance.suite.support.ranks import why_no_ranks

#: What Python says of an argument that a function or a class does not take.
_UNKNOWN_ARGUMENT = re.compile(r"([\w.<>]+)\(\) got an unexpected keyword argument '(\w+)'")
#: How an optimizer says that it takes no sparse gradients, such as torch's Adam.
_NO_SPARSE = re.compile(r"(not|n't|cannot)\b.*\bsparse gradient", re.IGNORECASE)


def why_not_on(device: torch.device, item: pytest.Item) -> str:
    """Return why a case cannot run on a device, or an empty string."""
    reasons = [
        f"runs on the CPU only: {mark.args[0]}"
        for mark in item.iter_markers("cpu_only")
        if device.type != "cpu"
    ]
    reasons += [why_no_ranks(device, *mark.args) for mark in item.iter_markers("on_ranks")]
    return next(filter(None, reasons), "")


def unclaimed(error: Exception, needs: Sequence[str], factories: Collection[str] = ()) -> str:
    """Return what an error says that the target does not have, or an empty string.

    Args:
        error: the error that ended a case.
        needs: the names that the case needs.
        factories: the names of functions that the description gives in place of classes.
    """
    return (
        _missing_argument(error, needs, factories) or _sparse_refusal(error, needs) or _refused_option(error)
    )


def _missing_argument(error: Exception, needs: Sequence[str], factories: Collection[str]) -> str:
    """Return the documented argument that a constructor lacks, or an empty string.

    The case called the constructor, or the target passed an option that the case needs on to another one.
    A factory function may replace the class of an algorithm. A missing argument of a method or of any other
    function is a failure.
    """
    told = _UNKNOWN_ARGUMENT.search(str(error)) if isinstance(error, TypeError) else None
    if told is None:
        return ""
    owner, _, method = told[1].rpartition("<locals>.")[2].rpartition(".")
    *_, (last, _) = traceback.walk_tb(error.__traceback__)
    needed = any(name.endswith(f".{told[2]}") for name in needs)
    if method == "__init__":
        excused = needed or of_suite(last)
    else:
        known = method in spec.areas()["algorithms"].names or method in factories
        excused = not owner and (needed or known) and of_suite(last)
    return f"{told[1].removesuffix('.__init__')} has no argument {told[2]}" if excused else ""


def _refused_option(error: Exception) -> str:
    """Return what a constructor says is not supported: a refusal that states itself is no defect."""
    if not isinstance(error, NotImplementedError | ValueError) or "not supported" not in str(error):
        return ""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    by_case = [number for number, frame in enumerate(frames) if of_suite(frame)]
    callee = frames[by_case[-1] + 1 :] if by_case else []
    return one_line(str(error), 200) if callee and callee[0].f_code.co_name == "__init__" else ""


def _sparse_refusal(error: Exception, needs: Sequence[str]) -> str:
    """Return the refusal of an optimizer whose own error says that it takes no sparse gradients."""
    says = isinstance(error, RuntimeError) and _NO_SPARSE.search(str(error)) is not None
    return f"{needs[0]}.sparse: {error}" if says and any(name.endswith(".sparse") for name in needs) else ""
