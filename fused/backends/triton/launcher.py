"""Launches with less Python than Triton's: the caller says what determines the compiled code."""

from collections.abc import Callable, Hashable
from typing import Any

from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

#: The compiled code by kernel, key, driver and device, with the constants in the order of the kernel.
_COMPILED: dict[Hashable, tuple[Any, tuple[Any, ...]]] = {}


def start(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    key: Hashable,
    constants: Callable[[], dict[str, Any]],
) -> None:
    """Launch a kernel, which Triton compiles at the first launch with this key.

    Args:
        kernel: a function of Triton; anything else, such as one that is interpreted, is launched as usual.
        programs: their number.
        arguments: tensors, and integers that are not specialized.
        key: determines the constants, and dtype and alignment to 16 bytes of each tensor.
        constants: returns them by name, with the options of the launch.
    """
    if type(kernel) is not JITFunction:
        kernel[(programs,)](*arguments, **constants())
        return
    active = driver.active
    device = active.get_current_device()
    wide = [index for index, one in enumerate(arguments) if type(one) is int and one >= 1 << 31]
    found = (kernel, key, active, device, *wide)
    known = _COMPILED.get(found)
    if known is None:
        given = constants()
        compiled = kernel[(programs,)](*arguments, **given)
        _COMPILED[found] = compiled, tuple(given[name] for name in kernel.arg_names[len(arguments) :])
        return
    compiled, rest = known
    if knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:  # of a profiler
        compiled[programs, 1, 1](*arguments, *rest)
        return
    stream = active.get_current_stream(device)
    of_code = (compiled.function, compiled.packed_metadata, None, None, None)
    compiled.run(programs, 1, 1, stream, *of_code, *arguments, *rest)
