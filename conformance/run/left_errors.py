"""The error that a case leaves to later cases on a device that runs asynchronously."""

from keyedopt.conformance.suite.support.device import synchronize
from keyedopt.conformance.suite.support.late_errors import pending_error
from keyedopt.conformance.targets.implementation import Surface


def error_left(surface: Surface) -> Exception | None:
    """Synchronize the device, and return the error that the next case would get; None if there is none.

    If the case has made an embedding module, a new one looks up valid features, which raises the pending
    error of an invalid lookup. The next case does not get that error then.
    """
    return _synchronization_error() or pending_error(surface)


def works() -> bool:
    """Return whether the device can be synchronized; CUDA cannot after a kernel has failed an assertion."""
    return _synchronization_error() is None


def _synchronization_error() -> Exception | None:
    try:
        synchronize()
    except Exception as error:
        return error
    return None
