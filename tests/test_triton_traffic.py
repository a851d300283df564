"""What an update moves and launches, counted in Triton's interpreter by its loads and stores.

A byte counts once for each kernel that reads it and once for each that writes it: what is read again soon
comes from a cache. This file is the script of the process that counts.
"""

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from test_triton_interpreter import require_triton
from triton_oracle import STEPS, lookup_of, tables_of

from keyedopt.fused.backends.interface import Step

ROWS, WIDTH, BAGS, POOLING = 3000, 32, 128, 8
LOOKUPS = 2 * BAGS * POOLING
#: Launches of `torch.sort` on CUDA, by its source (nothing was measured): the positions 0, 1, …, then CUB's
#: radix sort: a histogram, its sums, and a pass for each 8 bits of the key.
SORT_LAUNCHES = {"int16": 3 + 2, "int32": 3 + 4}
#: Bytes that it moves for each key: writes positions of 8 bytes, reads keys for the histogram, and reads and
#: writes keys and positions in each pass.
SORT_BYTES = {"int16": 8 + 2 + 2 * 2 * (2 + 8), "int32": 8 + 4 + 4 * 2 * (4 + 8)}


# --- in the process that counts -------------------------------------------------------------------


class Counter:
    """Notes the addresses that each kernel reads and writes."""

    def __init__(self) -> None:
        self.launches: list[str] = []
        self.seen: dict[tuple[str, str], list[Any]] = defaultdict(list)

    def install(self) -> None:
        """Listen to the interpreter."""
        from triton.runtime import interpreter

        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__

        def counted_load(this: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self.note("read", pointers, mask)
            return load(this, pointers, mask, *rest)

        def counted_store(this: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
            self.note("write", pointers, mask)
            return store(this, pointers, value, mask, *rest)

        def counted_call(this: Any, *args: Any, **named: Any) -> Any:
            self.launches.append(this.fn.__name__)
            return call(this, *args, **named)

        builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
        executor.__call__ = counted_call

    def note(self, what: str, pointers: Any, mask: Any) -> None:
        """Keep the addresses of an access, with its size."""
        import numpy

        size = pointers.get_element_ty().primitive_bitwidth // 8
        live = numpy.broadcast_to(mask.data, pointers.data.shape)
        kept = pointers.data[live].astype(numpy.int64).reshape(-1)
        self.seen[(self.launches[-1], what)].append(numpy.stack([kept, numpy.full_like(kept, size)]))

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

    def _different(self, tensors: list[torch.Tensor], inside: bool) -> dict[tuple[str, str], list[int]]:
        import numpy

        found = {}
        for key, parts in self.seen.items():
            pairs = numpy.unique(numpy.concatenate(parts, 1), axis=1)
            chosen = self._inside(pairs[0], tensors)
            found[key] = pairs[1][chosen if inside else ~chosen].tolist()
        return found


def count(name: str) -> dict[str, Any]:
    """Count an update of two tables by one algorithm."""
    from keyedopt.fused.backends.triton import TritonBackend

    counter = Counter()
    counter.install()
    options = STEPS[name]
    tables = tables_of([(ROWS, WIDTH)] * 2, options, torch.float32)
    lookups = [lookup_of(k, tables[k].weight, [POOLING] * BAGS, k, hot=600 * k) for k in (0, 1)]
    TritonBackend().update(tables, lookups, Step(lr=0.1, **options))
    grads = [lookup.grad for lookup in lookups if lookup.grad is not None]
    weights = [table.weight for table in tables]
    states = [state for table in tables for state in table.states]
    return {
        "unique": sum(len(set(lookup.values.tolist())) for lookup in lookups),
        "launches": counter.launches,
        "weights": counter.accesses_in(weights),
        "states": counter.accesses_in(states),
        "grads": counter.bytes_in(grads),
        "index": counter.bytes_elsewhere([*grads, *weights, *states]),
    }


# --- in the process of pytest ---------------------------------------------------------------------


@pytest.fixture(scope="module", params=["rowwise", "adam"])
def counted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    require_triton()
    output = tmp_path_factory.mktemp("triton") / "counted.json"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, request.param, str(output)]
    subprocess.run(command, check=True, env=environment, timeout=300)
    return {"name": request.param, **json.loads(output.read_text())}


def test_own_launches(counted: dict[str, Any]) -> None:
    """Five of our own; the sort of torch adds its own, see SORT_LAUNCHES."""
    assert counted["launches"] == ["write_keys", "find_runs", "sum_chunks", "join_chunks", "update"]


def test_a_row_and_its_state_are_read_once_and_written_once(counted: dict[str, Any]) -> None:
    row = WIDTH * 4
    state = {"rowwise": 4, "adam": 2 * row}[counted["name"]]
    for what, size in (("weights", row), ("states", state)):
        moved = {key: number for key, number in counted[what].items() if number}
        expected = counted["unique"] * size
        assert moved == {"update read": expected, "update write": expected}, what


def test_the_gradient_is_read_once(counted: dict[str, Any]) -> None:
    """By `update` all but the chunks of long runs, which `sum_chunks` and `join_chunks` read."""
    whole = 2 * BAGS * WIDTH * 4
    moved = {key: number for key, number in counted["grads"].items() if number}
    assert set(moved) <= {"update read", "sum_chunks read", "join_chunks read"}
    assert moved["update read"] <= whole


def test_index_traffic(counted: dict[str, Any]) -> None:
    """What our own kernels move for each lookup besides rows, states and gradients."""
    assert sum(counted["index"].values()) / LOOKUPS <= 50


@pytest.mark.xfail(strict=True, reason="torch.sort carries positions of 8 bytes through every pass")
def test_index_traffic_with_the_sort_is_at_most_three_fifths_of_fbgemms(counted: dict[str, Any]) -> None:
    wider = 3 * 2  # keys of 4 bytes, not of 2 as here, are written once and read twice
    assert sum(counted["index"].values()) / LOOKUPS + wider + SORT_BYTES["int32"] <= 0.6 * 125


@pytest.mark.xfail(strict=True, reason="torch.sort makes more launches than are left for it")
def test_launches_with_the_sort_are_at_most_eight(counted: dict[str, Any]) -> None:
    assert len(counted["launches"]) + SORT_LAUNCHES["int32"] <= 8


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(count(sys.argv[1])))
