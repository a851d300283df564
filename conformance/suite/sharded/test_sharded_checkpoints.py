"""Checkpoints of torch.distributed.checkpoint: onto other ranks and shards, in place, asynchronous."""

import contextlib
import ctypes
import gc
import os
import re
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import Mismatch, expect, expect_bits
from keyedopt.conformance.suite.support.ranks import common_folder, on_ranks, the_ranks
from keyedopt.conformance.suite.support.sharded import (
    distributed,
    gathered,
    local_parts,
    one_by_one,
    rank,
    size,
    table,
)

pytestmark = [
    pytest.mark.on_ranks,
    pytest.mark.needs("GradientClippingOptimizer", "WarmupOptimizer"),
]

#: How a checkpoint is sharded when it is saved, and when it is loaded.
MOVES = {"row": "column", "column": "row"}


def trained(impl: Any, placement: str, steps: int) -> Any:
    """Return a scheduled and clipped optimizer of two tables and a bias after some steps."""
    params: dict[str, Any] = {f"t{n}": distributed(table(6, seed=n), placement) for n in range(2)}
    params = {key: torch.nn.Parameter(value) for key, value in params.items()}
    params["bias"] = torch.nn.Parameter(table(2, seed=4))
    inner = impl.KeyedOptimizerWrapper(params, one_by_one(torch.optim.Adam, lr=0.1))
    clip = impl.GradientClippingOptimizer(inner, impl.GradientClipping.NORM, 0.5)
    stage = impl.WarmupStage(impl.WarmupPolicy.LINEAR, max_iters=9, value=0.1)
    optimizer = impl.WarmupOptimizer(clip, [stage], lr=0.1)
    optimizer.init_state()
    train_steps(optimizer, range(steps))
    return optimizer


def train_steps(optimizer: Any, steps: Any) -> None:
    """Take steps whose gradients depend on their numbers."""
    for step in steps:
        for number, (key, param) in enumerate(sorted(optimizer.params.items())):
            if hasattr(param, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                values = table(6, seed=10 * step + number)
                param.grad = distribute_tensor(values, param.device_mesh, param.placements)
            elif key == "bias":
                param.grad = table(2, seed=10 * step + number)
        optimizer.step()


def everything(optimizer: Any) -> dict[str, torch.Tensor]:
    """Return all weights and state, whole, by name."""
    found = {key: gathered(param) for key, param in sorted(optimizer.params.items())}
    for key, entry in sorted(optimizer.state_dict()["state"].items()):
        for name, value in sorted(entry.items()):
            if isinstance(value, torch.Tensor):
                found[f"{key}.{name}"] = gathered(value)
    return found


def savable(optimizer: Any) -> dict[str, Any]:
    """Return what a checkpoint has: live weights and live state."""
    params = {key: param.detach() for key, param in optimizer.params.items()}
    return {"model": params, "optimizer": optimizer.state_dict()}


@contextlib.contextmanager
def quiet() -> Iterator[Any]:
    """Import torch.distributed.checkpoint, and ignore its warnings."""
    import torch.distributed.checkpoint as checkpoints

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield checkpoints


def restored(impl: Any, folder: str, placement: str) -> Any:
    """Return an optimizer with a checkpoint, loaded in place into live state."""
    optimizer = trained(impl, placement, 0)
    with quiet() as checkpoints:
        saved = savable(optimizer)
        checkpoints.load(saved, checkpoint_id=folder)
        optimizer.load_state_dict(saved["optimizer"])
    return optimizer


@pytest.mark.clause("SHARD-021")
@pytest.mark.on_ranks(1)
def test_other_ranks_and_placements(impl: Any) -> None:
    """A checkpoint of some ranks resumes on fewer and on more ranks, by rows and by columns, bit by bit."""

    def save(folder: str) -> Any:
        found = []
        for placement in MOVES:
            optimizer = trained(impl, placement, 2)
            with quiet() as checkpoints:
                checkpoints.save(savable(optimizer), checkpoint_id=f"{folder}/{placement}")
            saved = everything(optimizer)
            train_steps(optimizer, range(2, 4))
            found.append((saved, everything(optimizer)))
        return found

    def resume(folder: str) -> Any:
        found = []
        for placement, other in MOVES.items():
            optimizer = restored(impl, f"{folder}/{placement}", other)
            loaded = everything(optimizer)
            train_steps(optimizer, range(2, 4))
            found.append((loaded, everything(optimizer)))
        return found

    with common_folder() as folder:
        wanted = on_ranks(save, folder)[0]
        for ranks in {max(1, the_ranks() - 1), the_ranks() + 1}:
            for found in on_ranks(resume, folder, ranks=ranks):
                for other, seen, pair in zip(MOVES.values(), found, wanted, strict=True):
                    what = f"by {other} on {ranks} ranks"
                    expect_contents(seen[0], pair[0], 0.0, f"{what} after the load")
                    expect_contents(seen[1], pair[1], 1e-6, f"{what} two steps later")


def expect_contents(seen: Any, wanted: Any, error: float, what: str) -> None:
    """Expect weights and state up to an error, or bit by bit if it is 0."""
    expect(seen.keys() == wanted.keys(), f"the keys {sorted(wanted)}", sorted(seen))
    for name, value in wanted.items():
        if error == 0.0:
            expect_bits(seen[name], value, f"{name} {what}")
        near = torch.allclose(seen[name], value, rtol=0, atol=error)
        expect(near, f"{name} {what} within {error} of {value}", seen[name])


@pytest.mark.clause("SHARD-022")
def test_asynchronous_save(impl: Any) -> None:
    """An asynchronous checkpoint has the state of its moment, although training goes on at once."""

    def body(folder: str) -> None:
        optimizer = trained(impl, "row", 2)
        wanted = everything(optimizer)
        with quiet() as checkpoints:
            group = torch.distributed.new_group(backend="gloo")
            running = checkpoints.async_save(savable(optimizer), checkpoint_id=folder, process_group=group)
            train_steps(optimizer, range(2, 5))
            running.result()
        seen = everything(restored(impl, folder, "row"))
        for name, value in wanted.items():
            expect_bits(seen[name], value, f"{name} of the checkpoint")

    with common_folder() as folder:
        on_ranks(body, folder)


@pytest.mark.clause("SHARD-023")
def test_load_in_place(impl: Any) -> None:
    """A load from torch.distributed.checkpoint fills the live tensors, and copies no state."""

    def body(folder: str) -> None:
        optimizer = trained(impl, "row", 1)
        with quiet() as checkpoints:
            checkpoints.save(savable(optimizer), checkpoint_id=folder)
            train_steps(optimizer, range(1, 3))
            saved = savable(optimizer)
            before = addresses(optimizer)
            checkpoints.load(saved, checkpoint_id=folder)
            optimizer.load_state_dict(saved["optimizer"])
        expect(addresses(optimizer) == before, "state in the same memory", "other memory")

    with common_folder() as folder:
        on_ranks(body, folder)


@pytest.mark.clause("SHARD-023")
@pytest.mark.cpu_only("it measures the memory of the process")
def test_peak_memory_of_a_load(impl: Any) -> None:
    """A load takes less than half of the memory of a second copy of the state."""

    def body(folder: str) -> None:
        spread = distributed(torch.ones(256 * size(), 1024), "row")  # 1 MB on each rank
        given = [spread.clone() if n < 4 else torch.ones(256, 1024) for n in range(16)]
        params = {f"p{n}": torch.nn.Parameter(value) for n, value in enumerate(given)}
        optimizer = impl.KeyedOptimizerWrapper(params, one_by_one(torch.optim.Adam, lr=0.1))
        optimizer.init_state()
        state = optimizer.state_dict()["state"].values()
        tensors = [value for entry in state for value in entry.values() if isinstance(value, torch.Tensor)]
        total = sum(part.nbytes for value in tensors for part in local_parts(value))

        def load() -> None:
            saved = {"optimizer": optimizer.state_dict()}
            checkpoints.load(saved, checkpoint_id=folder)
            optimizer.load_state_dict(saved["optimizer"])

        with quiet() as checkpoints:
            checkpoints.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder)
            load()  # a library may import modules in its first load
            with PeakMemory() as peak:
                load()
        expect(peak.bytes < total / 2, f"less than half of the {total} bytes of the state", peak.bytes)

    with common_folder() as folder:
        on_ranks(body, folder)


class PeakMemory:
    """Measures by how much the memory of this process grows at most, in bytes."""

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 1 << 16)  # larger blocks are returned when they are freed
        libc.malloc_trim(0)  # those that were freed before
        Path("/proc/self/clear_refs").write_text("5")  # the peak is the present memory
        self.bytes = -self._peak()
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes += self._peak()

    def _peak(self) -> int:
        found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return 1024 * int(found[1]) if found else 0


def addresses(optimizer: Any) -> list[int]:
    """Return where the state is."""
    entries = [entry for _, entry in sorted(optimizer.state_dict()["state"].items())]
    tensors = [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]
    return [part.data_ptr() for value in tensors for part in local_parts(value)]


@pytest.mark.clause("SHARD-024")
def test_killed_writer(impl: Any) -> None:
    """If a rank is killed while it writes a checkpoint, the previous checkpoint still loads, bit by bit."""

    def save(folder: str) -> Any:
        optimizer = trained(impl, "row", 2)
        with quiet() as checkpoints:
            checkpoints.save(savable(optimizer), checkpoint_id=f"{folder}/2")
        return everything(optimizer)

    def die(folder: str) -> None:
        optimizer = trained(impl, "row", 3)
        with quiet() as checkpoints:
            if rank() == the_ranks() - 1:
                writer = checkpoints.FileSystemWriter(f"{folder}/3")
                writer.write_data = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
                checkpoints.save(savable(optimizer), storage_writer=writer)
            checkpoints.save(savable(optimizer), checkpoint_id=f"{folder}/3")

    with common_folder() as folder:
        wanted = on_ranks(save, folder)[0]
        killed = ""
        try:
            on_ranks(die, folder)
        except Mismatch as error:  # on_ranks expects all ranks to end
            killed = str(error)
        ended = "killed by signal 9" in killed or "lost connection" in killed  # as a rank of torchrun sees it
        expect(ended, "a rank that is killed", killed)
        seen = on_ranks(lambda: everything(restored(impl, f"{folder}/2", "row")))[0]
        for name, value in wanted.items():
            expect_bits(seen[name], value, f"{name} of the previous checkpoint")
        expect(not os.path.exists(f"{folder}/3/.metadata"), "no complete checkpoint 3", "its metadata")
