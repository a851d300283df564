"""Words for kernels, put on the device without waiting for it."""

import math
import struct
from collections import OrderedDict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from keyedopt.fused.backends.interface import Step
from keyedopt.fused.backends.streams import capturing
from keyedopt.fused.backends.triton.layout import NEVER, STEP_WORDS
from keyedopt.fused.backends.triton.streams import TOO_SOON, Filled

#: Words that are the same step after step stay on the device.
_KEPT: OrderedDict[tuple[torch.device, tuple[int, ...]], tuple[Tensor, Filled]] = OrderedDict()
KEEP = 512
#: What CUDA graphs read, at every replay; and pinned memory for it, since none is to be had in a capture.
_CAPTURED: list[tuple[Tensor, Filled]] = []
_ARENA: list[Tensor] = []
ARENA_WORDS = 1 << 18
#: Columns that kernels look through; no block of Triton's has more numbers.
MOST = 1 << 20


def columns_for(count: int) -> int:
    """Return how many columns words have for so many tables or lookups: a power of two.

    Raises:
        ValueError: they are more than `MOST`.
    """
    if count > MOST:
        raise ValueError(f"one call takes at most {MOST} tables or lookups, not {count}")
    return 1 << max(count - 1, 0).bit_length()


def table(rows: Sequence[Sequence[int]], begins: Sequence[int] = (0,)) -> list[int]:
    """Put rows of words one after the other; of the columns too many, the rows `begins` are `NEVER`.

    >>> table([[0, 5, 9], [1, 2, 3]])[4:]
    [1, 2, 3, 0]
    """
    columns = columns_for(len(rows[0]))
    words: list[int] = []
    for index, row in enumerate(rows):
        words += [*row, *[NEVER if index in begins else 0] * (columns - len(row))]
    return words


def on_device(words: Sequence[int], device: torch.device, check: Callable[[], None] | None = None) -> Tensor:
    """Return the words as an int64 tensor on the device.

    They are copied from pinned memory, which does not wait for the device. What a CUDA graph uses is kept for
    good, for the copy in the graph reads the pinned memory again at every replay.

    Args:
        words: what is copied, unless it has been of late.
        device: to which.
        check: is called before words are used that have not been of late.

    Raises:
        RuntimeError: in the capture of a CUDA graph, without a step before it or after very many captures.
    """
    key = (device, tuple(words))
    captured = capturing(device)
    known = _KEPT.pop(key, None)  # at once, for another thread may be about to drop it
    if known is not None:
        _KEPT[key] = known  # as the latest
        if captured:
            _CAPTURED.append(known)
        (kept,) = known[1].here()
        return kept
    if check is not None:
        check()
    host = torch.tensor(words, dtype=torch.int64)
    if captured:
        part = _part_of_arena(host)
        copied = part.to(device, non_blocking=True)
        _CAPTURED.append((part, Filled((copied,))))
        return copied
    if device.type == "cuda":
        host = host.pin_memory()
        if not _ARENA:
            _ARENA.append(torch.empty(ARENA_WORDS, dtype=torch.int64, pin_memory=True))
    copied = host.to(device, non_blocking=True)
    _KEPT[key] = host, Filled.by_now(copied)
    while len(_KEPT) > KEEP:
        _KEPT.popitem(last=False)
    return copied


def _part_of_arena(host: Tensor) -> Tensor:
    """Put words into the part of the arena that is still free, for a graph to copy."""
    if not _ARENA:
        raise RuntimeError(TOO_SOON)
    free = _ARENA[0]
    if len(host) > len(free):
        raise RuntimeError(f"too many steps were captured in CUDA graphs: {ARENA_WORDS} words are used up")
    part = free[: len(host)]
    _ARENA[0] = free[len(host) :]
    part.copy_(host)
    return part


def bits(number: float) -> int:
    """Return the bits of a float64 as an int64."""
    word: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return word


def step_words(step: Step, device: torch.device) -> list[int]:
    """Return the words of a step; a rate or count that is on the device is 0 there, for kernels read it."""

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
    return [bits(numbers[name]) for name in STEP_WORDS[:-1]] + [seed]


def alignment(addresses: Sequence[int], most: int) -> int:
    """Return the largest power of two, up to `most`, that divides all of these; `most` for none.

    >>> alignment([48, 32], 16), alignment([36], 16)
    (16, 4)
    """
    common = math.gcd(most, *addresses)
    return common & -common
