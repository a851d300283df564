"""What a rank sends: recorded for up to 1,000 ranks, which one process simulates; and bounded for tables."""

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keyedopt.conformance.suite.support.assertions import error_of, expect, expect_equal
from keyedopt.conformance.suite.support.embedding import collection, jagged
from keyedopt.conformance.suite.support.ranks import on_each_rank
from keyedopt.conformance.suite.support.sharded import everyone, process_group, rank

#: The numbers of ranks and of parameters.
WORLDS, PARAMETERS = (10, 100, 1000), (1, 100)
#: The width of replicated tables.
WIDTH = 8


@pytest.mark.clause("SHARD-029")
@pytest.mark.cpu_only("its process group sends nothing")
@pytest.mark.needs("GradientClippingOptimizer", "KeyedOptimizerWrapper")
def test_traffic(impl: Any) -> dict[str, Any]:
    """Count the messages and bytes that a rank sends to clip and to load sharded parameters."""
    found: dict[str, Any] = {}
    for ranks, count, at in simulations():
        optimizer = sharded(impl, ranks, count)
        load = functools.partial(optimizer.load_state_dict, optimizer.state_dict())
        for name, call in (("clip", optimizer.step), ("load", load)):
            with Traffic() as sent:
                problem = error_of(call)
            found.setdefault(name, {})[at] = problem or summed(sent.sizes)
    return found


@pytest.mark.clause("SHARD-029")
@pytest.mark.cpu_only("its process group sends nothing")
@pytest.mark.needs("EmbeddingBagCollection.process_group", "SGD")
def test_traffic_of_replicated_tables(impl: Any) -> dict[str, Any]:
    """Count the messages and bytes that a rank sends to update replicated tables by a row of each."""
    sent = {
        at: summed(sent_for_update(impl, everyone(), count, rows=100, batch=[0]))
        for _, count, at in simulations()
    }
    return {"exchange": sent}


def simulations() -> Iterator[tuple[int, int, str]]:
    """Simulate each number of ranks; yield it with each number of parameters, and the name of both.

    This process is the first rank, and the others send what it sends.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    for ranks in WORLDS:
        with process_group("fake", ranks, FakeStore()):
            for count in PARAMETERS:
                yield ranks, count, f"{ranks} ranks, {count} parameters"


def summed(sizes: list[int]) -> dict[str, int]:
    """Return the number of messages, and of all of their bytes."""
    return {"messages": len(sizes), "bytes": sum(sizes)}


@pytest.mark.clause("SHARD-017")
@pytest.mark.on_ranks
@pytest.mark.needs("EmbeddingBagCollection.process_group", "SGD")
@on_each_rank
def test_bytes_are_of_rows(impl: Any) -> None:
    """The update of a replicated table sends the rows that ranks look up, whatever the size of the table."""
    few, more = list(range(10)), list(range(rank(), 30 + rank()))
    small, large = (sum(sent_for_update(impl, everyone(), 2, rows, more)) for rows in (100, 10_000))
    expect_equal(large, small, "bytes for a table of 10,000 rows, and of 100")
    less = sum(sent_for_update(impl, everyone(), 2, 10_000, few))
    expect(large <= 3 * less, f"at most {3 * less} bytes for 30 rows, as 10 rows take {less}", large)
    for number, size in ((10, less), (30, large)):
        bound = 512 + 2 * number * (WIDTH * 4 + 16)
        expect(size <= bound, f"at most {bound} bytes for {number} rows of two tables", size)


def sent_for_update(impl: Any, group: Any, count: int, rows: int, batch: list[int]) -> list[int]:
    """Return the bytes of each message of the update of replicated tables by rows of one batch.

    Args:
        impl: the implementation.
        group: the ranks.
        count: the number of tables.
        rows: of each table.
        batch: the rows that this rank looks up in each table.
    """
    tables = [(f"t{number}", rows, WIDTH, [f"f{number}"]) for number in range(count)]
    module = collection(impl, tables=tables, process_group=group)
    outputs = module(jagged({f"f{number}": [batch] for number in range(count)}))
    with Traffic() as sent:
        sum(output.sum() for output in outputs.values()).backward()
    return sent.sizes


def sharded(impl: Any, ranks: int, count: int) -> Any:
    """Return a clipped optimizer of DTensors with one number on each rank, after one step."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh("cpu", torch.arange(ranks))
    params = {}
    for number in range(count):
        param: Any = torch.nn.Parameter(DTensor.from_local(torch.zeros(1), mesh, [Shard(0)]))
        param.grad = DTensor.from_local(torch.ones(1), mesh, [Shard(0)])
        params[f"p{number}"] = param
    keyed = impl.KeyedOptimizerWrapper(params, lambda given: torch.optim.Adagrad(given, lr=0.1))
    optimizer = impl.GradientClippingOptimizer(
        keyed,
        impl.GradientClipping.NORM,
        1.0,
        enable_global_grad_clip=True,
        param_to_pgs={param: [torch.distributed.group.WORLD] for param in params.values()},
    )
    optimizer.step()  # ranks may agree once
    return optimizer


class Traffic(TorchDispatchMode):
    """Notes the bytes that this rank gives to each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in str(func):
            given = [args[1], args[0]]  # of some collectives the outputs come first
            tensors = next(each for each in map(listed, given) if each)
            self.sizes.append(sum(tensor.nbytes for tensor in tensors))
        return func(*args, **(kwargs or {}))


def listed(value: Any) -> list[torch.Tensor]:
    """Return the tensors of an argument."""
    values = value if isinstance(value, list | tuple) else [value]
    return [each for each in values if isinstance(each, torch.Tensor)]
