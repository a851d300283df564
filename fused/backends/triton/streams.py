"""Memory that is filled in one stream of CUDA and used in others."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Filled:
    """A tensor; of CUDA, also the stream in which it is filled, and the event of when it is."""

    tensor: Tensor
    stream: Any = None
    event: Any = None

    @classmethod
    def by_now(cls, tensor: Tensor) -> "Filled":
        """Take a tensor that is filled by what the current stream was told to do until now."""
        if tensor.device.type != "cuda":
            return cls(tensor)
        stream = torch.cuda.current_stream(tensor.device)
        return cls(tensor, stream, stream.record_event())

    def here(self) -> Tensor:
        """Return the tensor for use in the current stream, which waits for it if it is another one.

        A graph that is captured does not wait, nor has to: before, torch waits for all streams.
        """
        if self.stream is None:
            return self.tensor
        stream = torch.cuda.current_stream(self.tensor.device)
        if stream != self.stream and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(self.event)
            self.tensor.record_stream(stream)  # or who asks for memory next could be given this
        return self.tensor
