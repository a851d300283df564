"""Feeds the functions of `keyedopt.fused.bulk` random tensors, good and bad ones, for a number of seconds.

To be run with an extension that is built with sanitizers, see run.sh. What it checks itself: a call with a
bad tensor is refused and writes nothing, a good one is done, and what it says is what torch says.

``python fuzz_bulk.py EXTENSION SECONDS [SEED]``
"""

import importlib.util
import random
import sys
import time
from typing import Any

import torch
from torch import Tensor

SETS = ("", "plain", "avx2", "avx512")


def extension(path: str) -> Any:
    """Load it by where it is, whatever is installed."""
    spec = importlib.util.spec_from_file_location("keyedopt.fused.bulk._bulk", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Fuzz:
    """Random calls; `bad` tensors are those that only torch takes."""

    def __init__(self, native: Any, seed: int) -> None:
        self.native, self.draw = native, random.Random(seed)
        torch.manual_seed(seed)

    def shape(self) -> list[int]:
        """Return sizes, of which one may be 0."""
        most = self.draw.choice([2, 9, 70, 200])
        return [self.draw.randint(0, most) for _ in range(self.draw.randint(0, 2))]

    def good(self, shape: list[int]) -> Tensor:
        """Return contiguous float32 that begins anywhere in its memory, which ends with it."""
        count, before = int(torch.Size(shape).numel()), self.draw.randint(0, 15)
        return torch.rand(before + count)[before:].view(shape)

    def bad(self, shape: list[int]) -> Any:
        """Return what is no such tensor, or of another shape."""
        like = self.good(shape)
        return self.draw.choice(
            [
                like.double(),
                like.half(),
                like.to("meta"),
                self.good([*shape, 2])[..., 0] if like.numel() > 1 else None,
                self.good([1]).expand(2, *shape, 3),
                self.good([*shape, 1]),
                like.to_sparse() if like.ndim else 3,
                None,
                "text",
            ]
        )

    def step(self) -> None:
        """Take a dense step of some parameters."""
        algorithm, momentum = self.draw.randint(0, 2), self.draw.choice([0.0, 0.9])
        states = (1 if momentum else 0, 1, 2)[algorithm]
        flags = [self.draw.random() < 0.5 for _ in range(4)]
        options = (algorithm, *flags, 0.5, 2.0, 0.1, 0.9, 0.99, 1e-8, 0.1, momentum, 0.0, 0.1)
        shapes = [self.shape() for _ in range(self.draw.randint(0, 6))]
        columns = [[self.good(shape) for shape in shapes] for _ in range(2 + states)]
        counts: Any = [torch.zeros(()) for _ in shapes] if self.draw.random() < 0.5 else 1.0
        spoiled = bool(shapes) and self.draw.random() < 0.5
        if spoiled:
            at = self.draw.randrange(len(shapes))
            self.draw.choice(columns)[at] = self.bad(shapes[at])
        before = [one.clone() for column in columns for one in column if isinstance(one, Tensor)]
        group = (options, columns[0], columns[1], columns[2:], counts)
        done = self.native.step([group], self.draw.randint(1, 4), self.draw.choice(SETS[:2]))
        assert done is not spoiled, "a step"
        after = [one for column in columns for one in column if isinstance(one, Tensor)]
        if spoiled:
            assert all(same(one, other) for one, other in zip(before, after, strict=True)), "a refused step"
            assert not isinstance(counts, list) or not any(counts), "a count of a refused step"
        elif isinstance(counts, list):
            assert all(float(count) == 1.0 for count in counts), "a count"

    def squares(self) -> None:
        """Sum squares."""
        given: list[Any] = [self.good(self.shape()) for _ in range(self.draw.randint(0, 6))]
        exact = sum(float(one.double().square().sum()) for one in given)
        odd = self.draw.random() < 0.3
        if odd:
            given.append(self.draw.choice([None, torch.ones(3).double(), torch.ones(4)[::2], 3]))
        total = self.native.square_sum(given, self.draw.randint(1, 4), self.draw.choice(SETS[:2]))
        assert (total is None) if odd else abs(total - exact) <= 1e-5 * exact, "a sum of squares"

    def copy(self) -> None:
        """Copy tensors, some of which may share memory."""
        memory = torch.rand(4000)

        def part() -> Tensor:
            begin = self.draw.randrange(3990)
            return memory[begin : begin + self.draw.randint(0, 9)]

        live = [part() for _ in range(self.draw.randint(0, 12))]
        new = [one.clone() if self.draw.random() < 0.9 else part() for one in live]
        before, wanted = memory.clone(), [one.clone() for one in new]
        if self.native.copy(live, new, lambda tensors: None):
            assert all(map(same, live, wanted)), "a copy"
        else:
            assert same(memory, before), "a refused copy"

    def rows(self) -> None:
        """Look for rows outside, and describe tables for the kernels."""
        rows, count = self.draw.choice([1, 7, 1 << 40]), self.draw.randint(0, 3000)
        indices = torch.randint(rows, (1, count))
        bad = self.draw.choice([-1, rows, -(2**63), 2**63 - 1])
        if count and self.draw.random() < 0.5:
            indices[0, self.draw.randrange(count)] = bad
            assert self.native.outside(indices, (rows,)) == (rows, bad), "a bad row"
        else:
            assert self.native.outside(indices, (rows,)) is None, "good rows"
        shape = self.shape()
        usual = bool(shape) and bool(torch.Size(shape).numel())
        values = self.good([count, *shape[1:]])
        odd = self.draw.random() < 0.5
        state = self.bad(shape) if odd else self.good(shape)
        found = self.native.listed([self.good(shape)], [[state]], [indices], [values])
        # A state needs as many numbers as the parameter, whatever its shape.
        fits = isinstance(state, Tensor) and state.dtype is torch.float32 and state.device.type == "cpu"
        if not odd or not fits:
            assert (found is not None) is (usual and not odd), "a table"


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, as far as that can be asked."""
    return one.is_meta or one.is_sparse or torch.equal(one, other)


def main() -> None:
    """Call all functions until the time is over."""
    native, seconds = extension(sys.argv[1]), float(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    end, calls = time.monotonic() + seconds, 0
    while not calls or time.monotonic() < end:
        fuzz = Fuzz(native, seed + calls)
        try:
            for call in (fuzz.step, fuzz.squares, fuzz.copy, fuzz.rows):
                call()
        except AssertionError as wrong:
            sys.exit(f"seed {seed + calls}: {wrong}")
        calls += 1
    print(f"{4 * calls} calls, all good")


if __name__ == "__main__":
    main()
