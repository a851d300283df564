"""Programs and positions beyond 2³¹: kernels run one program of a grid that is far too large to be run.

Triton's interpreter runs it, in a process of its own, of which this file is the script. It computes in the
integers that the compiler would take, so what passes 2³¹ in 32 bits comes out wrong.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton_process import hand_over, outcomes, run_alone


def run_one(
    kernel: Any, program: int, programs: int, tensors: list[torch.Tensor], *rest: Any, **named: Any
) -> None:
    """Run one program of so many, which may touch nothing but the memory of these tensors."""
    import numpy
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    places = [(one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()) for one in tensors]

    def watched(function: Any, mask_at: int) -> Any:
        def access(this: Any, pointers: Any, *more: Any) -> Any:
            live = numpy.broadcast_to(more[mask_at].data, pointers.data.shape)
            for address in pointers.data[live].astype(numpy.uint64).tolist():
                assert any(begin <= address < end for begin, end in places), (
                    f"{kernel.fn.__name__} is outside"
                )
            return function(this, pointers, *more)

        return access

    index, size = builder.set_grid_idx, builder.set_grid_dim
    with ExitStack() as stack:
        for name, value in (
            ("create_masked_load", watched(builder.create_masked_load, 0)),
            ("create_masked_store", watched(builder.create_masked_store, 1)),
            ("set_grid_idx", lambda this, x, y, z: index(this, program, 0, 0)),
            ("set_grid_dim", lambda this, x, y, z: size(this, programs, 1, 1)),
        ):
            stack.enter_context(patch.object(builder, name, value))
        kernel[(1,)](*tensors, *rest, **named)


def case_runs() -> None:
    """Of very many lookups, which torch sorts, a run that begins behind 2³¹ of them."""
    from keyedopt.fused.backends.triton.sort import find_runs

    block = 128
    program, programs = 2**31 // block, (2**32 + 2**30) // block
    size = 2**31 + 2 * block
    keys = torch.empty(size, dtype=torch.int32)
    keys[-2 * block - 1 :] = torch.arange(2 * block + 1) // 3
    starts = torch.empty(size, dtype=torch.uint8)
    counts, ends = (torch.empty(program + 1, dtype=kind) for kind in (torch.int32, torch.int64))
    tensors = [keys, starts, counts, ends, keys]
    run_one(find_runs, program, programs, tensors, programs * block, 0, BLOCK=block, PROBES=4)
    heads = [place for place in range(block) if (place + 1) % 3 == 0]
    assert int(counts[-1]) == len(heads)
    assert starts[2**31 : 2**31 + len(heads)].tolist() == heads
    assert int(ends[-1]) == 2**31 + heads[-1] + 3


def case_counted() -> None:
    """Just so many lookups that their number fits into 32 bits."""
    from keyedopt.fused.backends.triton.collect import count_runs

    n, block = 2**31 - 1, 128
    blocks = -(-n // block)
    keys, starts = torch.empty(n, dtype=torch.int32), torch.empty(n, dtype=torch.uint8)
    middle = n
    for _ in range(32):  # all that a bisection looks at
        middle //= 2
        keys[middle] = 7
    counts, before = torch.zeros(blocks, dtype=torch.int32), torch.zeros(blocks + 1, dtype=torch.int64)
    before[-1] = 5
    tables, firsts = torch.tensor([0]), torch.zeros(2, dtype=torch.int64)
    tensors = [keys, starts, counts, before, tables, firsts]
    run_one(count_runs, 0, 1, tensors, n, n.bit_length(), TABLES=1, BLOCK=block)
    assert firsts.tolist() == [0, 5]


def case_columns() -> None:
    """More columns than 16 bits count, of which the last that begins in time is found."""
    from triton_columns import columns_of

    from keyedopt.fused.backends.triton.device_buffers import MOST, columns_for

    size = columns_for(70_000)
    words = torch.full((size,), torch.iinfo(torch.int64).max)
    words[:70_000] = 3 * torch.arange(70_000)
    asked = torch.tensor([0, 2, 3, 3 * 65_536, 3 * 69_999, 10**9, 5, 6])
    found = torch.empty(8, dtype=torch.int32)
    columns_of[(1,)](asked, words, found, SIZE=8, COLUMNS=size)
    assert found.tolist() == [0, 0, 1, 65_536, 69_999, 69_999, 1, 2]
    assert columns_for(MOST) == MOST
    with pytest.raises(ValueError, match="at most 1048576 tables or lookups, not 1048577"):
        columns_for(MOST + 1)


def case_lookups() -> None:
    """So many lookups that the positions of one run do not fit into int32."""
    from keyedopt.fused.backends.triton.lookup_batch import LookupBatch

    none: Any = None  # the number is checked before anything else
    with pytest.raises(ValueError, match="fewer than 2147483648 lookups, not 2147483648: split it"):
        LookupBatch(none, none, none, lookups=1, count=2**31, programs=1, bags=1, steps=0, scaled=False)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    yield "runs", case_runs
    yield "counted", case_counted
    yield "columns", case_columns
    yield "lookups", case_lookups


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_alone(tmp_path_factory, __file__)


@pytest.mark.parametrize("name", [name for name, _ in cases()])
def test_far(found: dict[str, str], name: str) -> None:
    assert not found[name], found[name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    hand_over(outcomes(cases()))
