"""A model of CUDA's streams for Triton's interpreter: is what two of them do to the same memory in order?

Kernels and operators run at once, one after the other, so results are right whatever the streams; but every
access of memory is noted with the stream of its launch. Streams have vector clocks, which events carry from
one to the other. Two accesses of a word, one of them a write, must be in order by them. Memory belongs to the
stream in which it was made, and who uses it in another one has to say so (`Tensor.record_stream`).
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

WORD = 4
#: Operators that read and write nothing, though they are no views.
UNTOUCHED = ("empty", "empty_like", "new_empty", "lift_fresh")


class Stream:
    """A stream with its clock: how far it knows each of them to be."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clock = {name: 0}

    def record_event(self) -> dict[str, int]:
        return dict(self.clock)

    def wait_event(self, event: dict[str, int]) -> None:
        for name, time in event.items():
            self.clock[name] = max(time, self.clock.get(name, 0))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


class Device(TorchDispatchMode):
    """The CPU as a device with streams; which of them is current is in `now`.

    Args:
        kept: memory that nobody lets go.
        given: memory of the stream that is current at first.

    Attributes:
        launches: of kernels, in order: name and stream.
        wrong: what was not in order.
        captured: whether the current stream is captured.
    """

    def __init__(self, kept: list[torch.Tensor], given: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = Stream("main")
        self.captured = False
        self.launches: list[tuple[str, str]] = []
        self.wrong: list[str] = []
        self._begins: list[int] = []
        self._memory: list[dict[str, Any]] = []
        self._last: dict[int, tuple[str, int, str]] = {}
        self._reads: dict[int, dict[str, tuple[int, str]]] = {}
        for tensor in kept:
            self._memory_of(tensor)["kept"] = True
        for tensor in given:
            self._memory_of(tensor)

    @contextmanager
    def within(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        yield
        self.now = before

    def of(self, kernel: str) -> list[str]:
        """Return the streams in which a kernel was launched."""
        return [stream for name, stream in self.launches if name == kernel]

    def unsaid(self) -> list[str]:
        """Return which memory was used in a stream that its owner was not told of."""
        return [
            f"{one['made']} in {one['stream']}, used in {sorted(one['used'] - one['said'])}"
            for one in self._memory
            if not one["kept"] and one["used"] - one["said"]
        ]

    # --- what is patched

    def __enter__(self) -> Any:
        from triton.runtime import interpreter

        from keyedopt.fused.backends.triton import (
            TritonBackend,
            device_buffers,
            device_flags,
            sort_passes,
            streams,
        )

        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__
        atomic = builder.create_atomic_rmw

        def noted(kind: str, function: Any, mask_at: int) -> Any:
            def access(this: Any, *args: Any) -> Any:
                pointers = args[1] if kind == "both" else args[0]
                self._kernel(kind, pointers, args[mask_at])
                return function(this, *args)

            return access

        def launched(this: Any, *args: Any, **named: Any) -> Any:
            self.launches.append((this.fn.__name__, self.now.name))
            self._tick()
            with _disable_current_modes():
                return call(this, *args, **named)

        self._stack = ExitStack()
        self._clear = [streams._side_stream.cache_clear, device_flags._memory.cache_clear]
        self._clear += [device_buffers._CACHED.clear, sort_passes._WORK.clear]
        for clear in self._clear:
            clear()
        for where, name, value in (
            (builder, "create_masked_load", noted("read", load, 1)),
            (builder, "create_masked_store", noted("write", store, 2)),
            (builder, "create_atomic_rmw", noted("both", atomic, 3)),
            (executor, "__call__", launched),
            *((one, "current_id", lambda device: self.now) for one in (streams, sort_passes)),
            (streams, "stream_of", lambda stream: stream),
            *(
                (one, "capturing", lambda device: self.captured)
                for one in (streams, sort_passes, device_buffers)
            ),
            (torch.cuda, "Stream", lambda device, priority: Stream("side")),
            (torch.cuda, "stream", self.within),
            (torch.Tensor, "record_stream", lambda tensor, stream: self._say(tensor, stream)),
            (device_flags, "send_flag", lambda device: None),
            (TritonBackend, "counts_steps", lambda backend, device: True),
        ):
            self._stack.enter_context(patch.object(where, name, value))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()
        for clear in self._clear:
            clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        with _disable_current_modes():
            self._tick()
            made = _tensors(found)
            for tensor in made:
                self._memory_of(tensor, name)
            if func.is_view or name in UNTOUCHED:
                return found
            changed: list[torch.Tensor] = []
            for place, argument in enumerate(func._schema.arguments):
                given = _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
                writes = argument.alias_info is not None and argument.alias_info.is_write
                changed += given if writes else []
                for tensor in given:
                    self._all_of("write" if writes else "read", tensor, name)
            for tensor in made:
                if not any(tensor is one for one in changed):
                    self._all_of("write", tensor, name)
        return found

    # --- what is noted

    def _tick(self) -> None:
        self.now.clock[self.now.name] = self.now.clock.get(self.now.name, 0) + 1

    def _say(self, tensor: torch.Tensor, stream: Stream) -> None:
        self._memory_of(tensor)["said"].add(stream.name)

    def _memory_of(self, tensor: torch.Tensor, made: str = "given") -> dict[str, Any]:
        storage = tensor.untyped_storage()
        begin = storage.data_ptr()
        place = bisect_right(self._begins, begin)
        if place and self._begins[place - 1] == begin:
            return self._memory[place - 1]
        name = self.now.name
        one = {
            "begin": begin,
            "end": begin + storage.nbytes(),
            "stream": name,
            "said": {name},
            "used": set(),
            "made": f"{made} of {storage.nbytes()} bytes",
            "kept": False,
            "alive": storage,  # or the next one could be in its place
        }
        self._begins.insert(place, begin)
        self._memory.insert(place, one)
        return one

    def _all_of(self, kind: str, tensor: torch.Tensor, name: str) -> None:
        if tensor.numel():
            self._memory_of(tensor, name)["used"].add(self.now.name)
            last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            end = tensor.data_ptr() + (last + 1) * tensor.element_size()
            for word in range(tensor.data_ptr() // WORD, -(-end // WORD)):
                self._word(kind, word, name)

    def _kernel(self, kind: str, pointers: Any, mask: Any) -> None:
        import numpy

        kernel = self.launches[-1][0]
        live = numpy.broadcast_to(mask.data, pointers.data.shape)
        size = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        for address in numpy.unique(pointers.data[live].astype(numpy.int64)).tolist():
            place = bisect_right(self._begins, address) - 1
            one = self._memory[place] if place >= 0 else None
            if one is None or address + size > one["end"]:
                self.wrong.append(f"{kernel} is outside of all memory")
                continue
            one["used"].add(self.now.name)
            for word in range(address // WORD, -(-(address + size) // WORD)):
                if kind != "write":
                    self._word("read", word, kernel)
                if kind != "read":
                    self._word("write", word, kernel)

    def _word(self, kind: str, word: int, who: str) -> None:
        here, clock = self.now.name, self.now.clock
        last = self._last.get(word)
        if last is not None and clock.get(last[0], 0) < last[1]:
            self._say_wrong(kind, who, f"the write of {last[2]} in {last[0]}")
        if kind == "read":
            self._reads.setdefault(word, {})[here] = (clock[here], who)
            return
        for stream, (time, reader) in self._reads.pop(word, {}).items():
            if clock.get(stream, 0) < time:
                self._say_wrong(kind, who, f"the read of {reader} in {stream}")
        self._last[word] = (here, clock[here], who)

    def _say_wrong(self, kind: str, who: str, other: str) -> None:
        found = f"the {kind} of {who} in {self.now.name} does not wait for {other}"
        if found not in self.wrong:
            self.wrong.append(found)


def _tensors(given: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(given) if isinstance(one, torch.Tensor)]
