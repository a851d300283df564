"""What an update moves and launches, counted in Triton's interpreter by its loads and stores.

A byte counts once for each kernel that reads it and once for each that writes it: what is read again soon
comes from a cache. This file is the script of the process that counts.
"""

import sys
from collections import defaultdict
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton_oracle import STATES, STEPS, lookup_of
from triton_process import hand_over, run_alone

from keyedopt.fused.backends.interface import Step, Table

pytestmark = pytest.mark.complete

#: Rows of each of two tables, by algorithm, of which only the first few are looked up. Their keys have 24 and
#: 25 bits, and are sorted in three passes, the most there are: of 8 bits, and of 9.
ROWS = {"rowwise": 2**23, "adam": 2**24}
WIDTH, BAGS, POOLING = 16, 256, 32
USED = 6000
LOOKUPS = 2 * BAGS * POOLING
#: Bytes a lookup that FBGEMM moves from indices to sorted runs, at the least.
FBGEMM = 125


# --- in the process that counts -------------------------------------------------------------------


class Counter:
    """Notes the addresses that each kernel reads and writes."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.seen: dict[tuple[str, str, str], list[Any]] = defaultdict(list)

    def install(self) -> None:
        """Listen to the interpreter."""
        from triton.runtime import interpreter

        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__
        atomic = builder.create_atomic_rmw

        def counted_load(this: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self.note("read", pointers, mask)
            return load(this, pointers, mask, *rest)

        def counted_store(this: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.note("write", pointers, mask)
            return store(this, pointers, value, mask, *rest)

        def counted_atomic(this: Any, kind: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.note("read", pointers, mask)
            self.note("write", pointers, mask)
            return atomic(this, kind, pointers, value, mask, *rest)

        def counted_call(this: Any, *args: Any, **named: Any) -> Any:
            self.launches.append(this.fn.__name__)
            with _disable_current_modes():  # the interpreter's own use of torch is no launch
                return call(this, *args, **named)

        builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
        builder.create_atomic_rmw = counted_atomic
        executor.__call__ = counted_call

    def note(self, what: str, pointers: Any, mask: Any) -> None:
        """Keep the addresses of an access, with its size."""
        import numpy

        size = pointers.get_element_ty().primitive_bitwidth // 8
        live = numpy.broadcast_to(mask.data, pointers.data.shape)
        kept = pointers.data[live].astype(numpy.int64).reshape(-1)
        self.seen[(str(len(self.launches)), self.launches[-1], what)].append(
            numpy.stack([kept, numpy.full_like(kept, size)])
        )

    def bytes_in(self, tensors: list[torch.Tensor]) -> dict[str, int]:
        """Return how many different bytes of these tensors each kernel moved, as "kernel read" and so on."""
        return {" ".join(key): sum(sizes) for key, sizes in self._different(tensors, inside=True).items()}

    def bytes_elsewhere(self, tensors: list[torch.Tensor]) -> dict[str, int]:
        """Return how many different bytes each kernel moved of anything else."""
        return {" ".join(key): sum(sizes) for key, sizes in self._different(tensors, inside=False).items()}

    def accesses_in(self, tensors: list[torch.Tensor]) -> dict[str, int]:
        """Return how many bytes of these tensors each kernel moved, each as often as it did."""
        import numpy

        found = {}
        for key, parts in self.seen.items():
            addresses, sizes = numpy.concatenate(parts, 1)
            found[" ".join(key)] = int(sizes[self._inside(addresses, tensors)].sum())
        return found

    def _inside(self, addresses: Any, tensors: list[torch.Tensor]) -> Any:
        import numpy

        inside = numpy.zeros(len(addresses), dtype=bool)
        for one in tensors:
            begin = one.data_ptr()
            inside |= (addresses >= begin) & (addresses < begin + one.numel() * one.element_size())
        return inside

    def _different(self, tensors: list[torch.Tensor], inside: bool) -> dict[tuple[str, str, str], list[int]]:
        import numpy

        found = {}
        for key, parts in self.seen.items():
            pairs = numpy.unique(numpy.concatenate(parts, 1), axis=1)
            chosen = self._inside(pairs[0], tensors)
            found[key] = pairs[1][chosen if inside else ~chosen].tolist()
        return found


class Operators(TorchDispatchMode):
    """Notes which of torch's operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def far_table(rows: int, options: Any) -> Any:
    """Make a table of which only the rows that are used have memory."""
    shapes = [(rows, WIDTH) if kind == "full" else (rows,) for kind in STATES[options["algorithm"]]]
    tensors = [torch.empty(shape) for shape in ((rows, WIDTH), *shapes)]
    for tensor in tensors:
        tensor[:USED] = 1.0
    return Table(tensors[0], tuple(tensors[1:]))


def count(name: str) -> dict[str, Any]:
    """Count an update of two tables by one algorithm."""
    from keyedopt.fused.backends.triton import TritonBackend, device_flags

    counter = Counter()
    counter.install()
    options = STEPS[name]
    tables = [far_table(ROWS[name], options) for _ in range(2)]
    near = torch.empty(USED, WIDTH)
    lookups = [lookup_of(k, near, [POOLING] * BAGS, k, hot=600 * k) for k in (0, 1)]
    backend, step = TritonBackend(), Step(lr=0.1, **options)
    backend.update(tables, lookups, step)
    launches = counter.launches[:]
    grads = [lookup.grad for lookup in lookups if lookup.grad is not None]
    weights = [table.weight for table in tables]
    states = [state for table in tables for state in table.states]
    moved = {
        "weights": counter.accesses_in(weights),
        "states": counter.accesses_in(states),
        "grads": counter.bytes_in(grads),
        "index": counter.bytes_elsewhere([*grads, *weights, *states]),
    }
    # On CUDA the error flag is read only when the host synchronizes anyway.
    with patch.object(device_flags, "send_flag", lambda device: None), Operators() as operators:
        backend.update(tables, lookups, step)
    return {
        **moved,
        "operators": sorted(operators.names),
        "unique": sum(len(set(lookup.values.tolist())) for lookup in lookups),
        "launches": launches,
    }


# --- in the process of pytest ---------------------------------------------------------------------


@pytest.fixture(scope="module", params=ROWS)
def counted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {"name": request.param, **run_alone(tmp_path_factory, __file__, request.param)}


def test_launches(counted: dict[str, Any]) -> None:
    """From indices to updated rows eight, the sort included: three of them are its passes."""
    passes = ["radix_pass"] * 3
    others = ["find_runs", "sum_chunks", "fold_chunks", "update"]
    assert counted["launches"] == ["write_keys", *passes, *others]
    # Of torch's own operators only those run, from the second update on, that launch nothing.
    assert {name.split(".")[1] for name in counted["operators"]} <= {
        *("empty", "new_empty", "detach", "slice", "select", "view"),
    }


def test_a_row_and_its_state_are_read_once_and_written_once(counted: dict[str, Any]) -> None:
    row = WIDTH * 4
    state = {"rowwise": 4, "adam": 2 * row}[counted["name"]]
    for what, size in (("weights", row), ("states", state)):
        moved = {key: number for key, number in counted[what].items() if number}
        expected = counted["unique"] * size
        assert moved == {"8 update read": expected, "8 update write": expected}, what


def test_the_gradient_is_read_once(counted: dict[str, Any]) -> None:
    """By `update` all but the chunks of long runs, which `sum_chunks` reads."""
    whole = 2 * BAGS * WIDTH * 4
    moved = {key: number for key, number in counted["grads"].items() if number}
    assert set(moved) <= {"8 update read", "6 sum_chunks read"}
    assert moved["8 update read"] <= whole


def test_index_traffic_is_at_most_three_fifths_of_fbgemms(counted: dict[str, Any]) -> None:
    """What all kernels move for each lookup besides rows, states and gradients, the sort included."""
    assert sum(counted["index"].values()) / LOOKUPS <= 0.6 * FBGEMM


if __name__ == "__main__":
    hand_over(count(sys.argv[1]))
