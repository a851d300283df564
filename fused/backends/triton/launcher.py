"""Launches with less Python than Triton's: the caller says what determines the compiled code."""

from collections.abc import Callable, Hashable
from typing import Any

from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

#: What launches the compiled code, by kernel, key, driver and device; with the constants in their order.
_COMPILED: dict[Hashable, tuple[Any, ...]] = {}


def start(
    kernel: Any,
    programs: int,
    tensors: tuple[Any, ...],
    numbers: tuple[int, ...],
    key: Hashable,
    constants: Callable[[], dict[str, Any]],
) -> None:
    """Launch a kernel, which Triton compiles at the first launch with this key.

    The first launch loads code, which CUDA refuses in a capture: a step of the same kind has to come before.
    Code is kept by device, and launched on the current stream of the current device, which callers choose
    with `streams.as_current`; in a backward pass autograd makes the stream of the forward pass current. The
    benchmarks, the checks and the comparison of kernels have about 200 compiled kernels for one architecture;
    Triton 3.6 takes 1.2 seconds of one core for each.

    Args:
        kernel: a function of Triton; anything else, such as one that is interpreted, is launched as usual.
        programs: their number.
        tensors: the first arguments.
        numbers: the other arguments, which are not specialized.
        key: determines the constants, and dtype and alignment to 16 bytes of each tensor.
        constants: returns them by name, with the options of the launch.
    """
    if type(kernel) is not JITFunction:
        kernel[(programs,)](*tensors, *numbers, **constants())
        return
    active = driver.active
    device = active.get_current_device()
    wide = tuple([one >= 1 << 31 for one in numbers]) if numbers and max(numbers) >= 1 << 31 else ()
    known = _COMPILED.get((kernel.hash, key, active, device, wide))  # there is no hash before a launch
    if known is None:
        given = constants()
        compiled = kernel[(programs,)](*tensors, *numbers, **given)
        rest = tuple(given[name] for name in kernel.arg_names[len(tensors) + len(numbers) :])
        of_code = (compiled.function, compiled.packed_metadata, None, None, None)
        _COMPILED[kernel.hash, key, active, device, wide] = compiled, compiled.run, of_code, rest
        return
    compiled, run, of_code, rest = known
    runtime = knobs.runtime
    if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:  # of a profiler
        compiled[programs, 1, 1](*tensors, *numbers, *rest)
        return
    run(programs, 1, 1, active.get_current_stream(device), *of_code, *tensors, *numbers, *rest)
