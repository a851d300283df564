"""Optimizers of torch with options that torch does not have on every device, such as ``fused``."""

import functools
from collections.abc import Callable
from typing import Any

from keyedopt.conformance.suite.support.described import CannotRun
from keyedopt.conformance.suite.support.device import ones, the_device
from keyedopt.conformance.suite.support.inputs import parameter


def torch_factory(cls: Any, **options: Any) -> Callable[[Any], Any]:
    """Return a function that makes an optimizer of torch with these options, of parameters or groups.

    torch itself is asked first: the class takes a step, without the implementation under test.

    Raises:
        CannotRun: torch raises an error for these options on this device, so the case is unsupported.
    """
    param = parameter(3)
    param.grad = ones(3)
    try:
        cls([param], **options).step()
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        told = ", ".join(f"{name}={value}" for name, value in options.items())
        raise CannotRun(f"torch has no {cls.__name__} with {told} on {the_device().type}: {error}") from None
    return functools.partial(cls, **options)
