"""Random programs: operations in a random order that a seed chooses, the same on every machine."""

import random
from collections.abc import Mapping

import torch

from keyedopt.conformance.suite.support.assertions import Mismatch, exactly, expect, unlike

#: The learning rate at first, and those that are set later.
FIRST_RATE, RATES_LATER = 0.25, (0.5, 0.125, 0.0625)
#: The greatest difference, relative to the larger of 1 and the value, after a program.
TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-12}


class Program:
    """Run operations in a random order, and compare after each.

    A subclass has a method for each operation, named like the operation with ``_`` for each space, and one
    before it.

    Args:
        operations: those of the program, and how often each occurs.
        seed: chooses the operations and their arguments.
        dtype: of what is compared.
    """

    def __init__(self, operations: Mapping[str, int], seed: int, dtype: str) -> None:
        self._operations = operations
        self.choose, self.dtype = random.Random(seed), getattr(torch, dtype)
        #: What was done, in words.
        self.done: list[str] = []

    def run(self, count: int) -> None:
        """Run operations; the error of the first one that goes wrong lists all up to it."""
        for _ in range(count):
            (operation,) = self.choose.choices(list(self._operations), list(self._operations.values()))
            self.done.append(operation)
            try:
                getattr(self, "_" + operation.replace(" ", "_"))()
                self.compare()
            except Mismatch as error:
                error.add("after " + "; ".join(self.done))
                raise

    def note(self, more: str) -> None:
        """Add words to what the present operation is called."""
        self.done[-1] += f" {more}"

    def compare(self) -> None:
        """Expect what the operations so far must have left."""
        raise NotImplementedError

    def expect_close(self, seen: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        """Expect values to agree within the tolerance of the program."""
        expect(tuple(seen.shape) == tuple(wanted.shape), f"{what} of shape {tuple(wanted.shape)}", seen.shape)
        have, want = exactly(seen), exactly(wanted)
        tolerance = TOLERANCES[self.dtype]
        wrong = ~((have - want).abs() <= tolerance * want.abs().clamp(min=1))
        if wrong.any():
            raise Mismatch(f"{what} within {tolerance:g}", unlike(have, want, wrong) or f"{have.tolist()}, ")
