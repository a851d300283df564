"""Streams of CUDA: memory that is filled in one and used in others, and one for what runs beside the rest."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends.streams import capturing, current

#: What is said of a capture for which there is not everything yet that a graph cannot make.
TOO_SOON = "take a step of the same kind before you capture one in a CUDA graph"
#: In the environment: "0" sorts in the stream of the forward, "1" beside it, however little there is to sort.
OVERLAP = "KEYEDOPT_OVERLAP"
#: So many values at least are sorted beside the forward: less is launched no faster than it is sorted.
FEWEST = 1 << 16


@dataclass(frozen=True)
class Filled:
    """Tensors of a device; of CUDA, also the stream in which they are filled, and the event of when."""

    tensors: tuple[Tensor, ...]
    stream: Any = None
    event: Any = None

    @classmethod
    def by_now(cls, *tensors: Tensor) -> "Filled":
        """Take tensors that are filled by what the current stream was told to do until now."""
        stream = current(tensors[0].device)
        if stream is None or capturing(tensors[0].device):  # events of a graph mean nothing outside of it
            return cls(tensors)
        return cls(tensors, stream, stream.record_event())

    def here(self) -> tuple[Tensor, ...]:
        """Return the tensors for use in the current stream, which waits for them if it is another one.

        A graph that is captured does not wait, nor has to: before, torch waits for all streams.
        """
        if self.stream is None:
            return self.tensors
        device = self.tensors[0].device
        stream = current(device)
        if stream != self.stream and not capturing(device):
            stream.wait_event(self.event)
            for tensor in self.tensors:
                tensor.record_stream(stream)  # or who asks for memory next could be given this
        return self.tensors


@contextmanager
def beside(device: torch.device, count: int, given: Iterable[Tensor]) -> Iterator[None]:
    """Do what is inside in a stream of its own, which begins when the current one is done until now.

    Nobody waits for it but who uses what it has made, see `Filled`; it may also be dropped. What is made
    inside is memory of that stream, so it is free for the next one there in time; of what is given, the owner
    may let go at once, and it stays until it has been read. Only by who writes to it meanwhile are wrong
    numbers read, which the backward refuses to use.

    In the capture of a CUDA graph all stays in the stream that is captured. A graph may end with the forward,
    by when that stream would have to wait for the other anyway; and what another thread does there, which is
    not captured, must not get into the graph.

    Args:
        device: without streams all of this is nothing.
        count: how many values there are to be sorted, see `FEWEST`.
        given: what is read inside.
    """
    now = current(device)
    if now is None or not _pays(count) or capturing(device):
        yield
        return
    side = _side(device)
    side.wait_stream(now)
    for tensor in {one.untyped_storage().data_ptr(): one for one in given}.values():
        tensor.record_stream(side)
    with torch.cuda.stream(side):
        yield


@cache
def _side(device: torch.device) -> Any:
    """Return the stream of its own, of high priority: a forward that fills the device would come first."""
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


def _pays(count: int) -> bool:
    asked = os.environ.get(OVERLAP, "")
    if asked not in ("", "0", "1"):
        raise ValueError(f"{OVERLAP} must be 0 or 1, not {asked!r}")
    return count >= FEWEST if not asked else asked == "1"
