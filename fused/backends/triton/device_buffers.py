"""Arguments of kernels in buffers of int64, copied to the device without synchronizing."""

import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import cache

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Step
from keyedopt.fused.backends.streams import capturing, on_cuda
from keyedopt.fused.backends.triton.layout import NEVER, STEP_FIELDS
from keyedopt.fused.backends.triton.streams import TOO_SOON, StreamTensors

#: Buffers that are used again stay on the device.
_CACHED: OrderedDict[tuple[torch.device, Hashable], tuple[Tensor, StreamTensors]] = OrderedDict()
MAX_CACHED = 512
#: Memory that CUDA graphs read at every replay, and pinned memory for it, which cannot be allocated in a
#: capture.
_CAPTURED: list[tuple[Tensor, StreamTensors]] = []
_ARENA: list[Tensor] = []
ARENA_SIZE = 1 << 18
#: The largest number of columns: the largest block of Triton.
MOST = 1 << 20


@cache
def columns_for(count: int) -> int:
    """Return the number of columns of a buffer for `count` tables or lookups: a power of two.

    Raises:
        ValueError: they are more than `MOST`.
    """
    if count > MOST:
        raise ValueError(f"one call takes at most {MOST} tables or lookups, not {count}")
    return 1 << max(count - 1, 0).bit_length()


def pack_rows(rows: Sequence[Sequence[int]], begins: Sequence[int] = (0,), least: int = 1) -> list[int]:
    """Return rows one after the other, padded to a power of two: rows `begins` with `NEVER`, others with 0.

    Args:
        rows: of one length.
        begins: the indices of rows with begins of columns.
        least: the least number of columns, a power of two.

    >>> pack_rows([[0, 5, 9], [1, 2, 3]])[4:]
    [1, 2, 3, 0]
    """
    columns = max(least, columns_for(len(rows[0])))
    numbers: list[int] = []
    for index, row in enumerate(rows):
        numbers += [*row, *[NEVER if index in begins else 0] * (columns - len(row))]
    return numbers


def to_device(
    numbers: Sequence[int], device: torch.device, check: Callable[[], None] | None = None
) -> Tensor:
    """Return the numbers as an int64 tensor on the device, see `known_on_device`."""
    numbers = tuple(numbers)
    return known_on_device(numbers, device, lambda: numbers, check)


def known_on_device(
    key: Hashable,
    device: torch.device,
    numbers: Callable[[], Sequence[int]],
    check: Callable[[], None] | None = None,
) -> Tensor:
    """Return numbers as an int64 tensor on the device.

    The copy is from pinned memory, which does not synchronize. torch's allocator of pinned memory records an
    event for the copy, so the memory may be freed before the copy has ended. Memory that a CUDA graph uses is
    never freed, because the copy in the graph reads the pinned memory at every replay.

    Args:
        key: equal only for equal numbers.
        device: the target.
        numbers: returns what is copied, unless it is in the cache.
        check: is called if the numbers are not in the cache.

    Raises:
        RuntimeError: a CUDA graph is captured, and no step was done before, or the pinned memory is used up.
    """
    place = (device, key)
    captured = capturing(device)
    known = _CACHED.pop(place, None)  # in one operation: another thread may drop it
    if known is not None:
        _CACHED[place] = known  # as the latest
        if captured:
            _CAPTURED.append(known)
        (kept,) = known[1].on_current_stream()
        return kept
    if check is not None:
        check()
    host = torch.tensor(numbers(), dtype=torch.int64)
    if captured:
        part = _part_of_arena(host)
        copied = part.to(device, non_blocking=True)
        _CAPTURED.append((part, StreamTensors((copied,))))
        return copied
    if on_cuda(device):
        host = host.pin_memory()
        if not _ARENA:
            _ARENA.append(torch.empty(ARENA_SIZE, dtype=torch.int64, pin_memory=True))
    copied = host.to(device, non_blocking=True)
    _CACHED[place] = host, StreamTensors.record(copied)
    while len(_CACHED) > MAX_CACHED:
        _CACHED.popitem(last=False)
    return copied


def _part_of_arena(host: Tensor) -> Tensor:
    """Copy numbers to the free part of the pinned memory, for a graph."""
    if not _ARENA:
        raise RuntimeError(TOO_SOON)
    free = _ARENA[0]
    if len(host) > len(free):
        raise RuntimeError(
            f"too many steps were captured in CUDA graphs: all {ARENA_SIZE} numbers of pinned memory are used"
        )
    part = free[: len(host)]
    _ARENA[0] = free[len(host) :]
    part.copy_(host)
    return part


def bits(number: float) -> int:
    """Return the bits of a float64 as an int64."""
    number_bits: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return number_bits


def step_buffer(step: Step, device: torch.device) -> list[int]:
    """Return the buffer of a step, with 0 for a learning rate or count whose tensor kernels read."""

    def known(value: float | Tensor) -> float:
        return 0.0 if isinstance(value, Tensor) and value.device == device else float(value)

    beta1, beta2 = step.betas
    numbers = {
        "lr": known(step.lr),
        "count": known(step.count),
        "eps": step.eps,
        "beta1": beta1,
        "beta2": beta2,
        "rest1": 1 - beta1,
        "rest2": 1 - beta2,
        "log1": math.log(beta1) if beta1 else -math.inf,
        "log2": math.log(beta2) if beta2 else -math.inf,
        "weight_decay": step.weight_decay,
        "momentum": step.momentum,
        "undamped": 1 - step.dampening,
        "eta": step.eta,
        "lr_decay": step.lr_decay,
        "max_norm": 0.0 if step.max_norm is None else step.max_norm,
        "first": float(step.first),
        "nesterov": float(step.nesterov),
    }
    seed = 0 if step.seed is None else step.seed & (2**63 - 1)
    return [bits(numbers[name]) for name in STEP_FIELDS[:-1]] + [seed]


def alignment(addresses: Sequence[int], most: int) -> int:
    """Return the largest power of two, up to `most`, that divides all of these; `most` for none.

    >>> alignment([48, 32], 16), alignment([36], 16)
    (16, 4)
    """
    common = math.gcd(most, *addresses)
    return common & -common
