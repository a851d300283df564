"""Programs: operations in a random order that a seed determines, the same on every machine."""

import random
from collections.abc import Mapping

import torch

from keyedopt.conformance.suite.support.assertions import Mismatch, exactly, expect, unlike

#: The learning rate of a new optimizer, and those that an operation sets.
FIRST_LR, OTHER_LRS = 0.25, (0.5, 0.125, 0.0625)
#: The greatest difference, in units of eps and relative to the larger of 1 and the value: a program has at
#: most 24 steps, and two orders of the roundings of one step differ by a few eps.
TOLERANCE = 24 * 4


class Program:
    """Run operations in a random order, and compare after each.

    A subclass has a method for each operation: ``_step_and_zero_grad`` for "step and zero_grad".

    Args:
        operations: the operations of the program, each with its relative frequency.
        seed: chooses the operations and their arguments.
        dtype: of the tensors that are compared.
    """

    def __init__(self, operations: Mapping[str, int], seed: int, dtype: str) -> None:
        self._operations = operations
        self.choose, self.dtype = random.Random(seed), getattr(torch, dtype)
        #: A description of each operation so far.
        self.done: list[str] = []

    def run(self, count: int) -> None:
        """Run this many operations; the error of one that fails lists all operations up to it."""
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
        """Add words to the description of the present operation."""
        self.done[-1] += f" {more}"

    def compare(self) -> None:
        """Expect the values that the operations so far must give."""
        raise NotImplementedError

    def expect_close(self, seen: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
        """Expect values to agree within the tolerance of the program."""
        if seen.is_cpu and seen.dtype == wanted.dtype and torch.equal(seen, wanted):
            return  # nearly always, and much faster than the rest
        expect(tuple(seen.shape) == tuple(wanted.shape), f"{what} of shape {tuple(wanted.shape)}", seen.shape)
        have, want = exactly(seen), exactly(wanted)
        dtypes = [self.dtype] + [seen.dtype] * seen.is_floating_point()
        tolerance = TOLERANCE * max(torch.finfo(one).eps for one in dtypes)
        wrong = ~((have - want).abs() <= tolerance * want.abs().clamp(min=1))
        if wrong.any():
            seen_text = unlike(have, want, wrong).rstrip("; ") or str(have.tolist())
            raise Mismatch(f"{what} within {tolerance:g}", seen_text)
