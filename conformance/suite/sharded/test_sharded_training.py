"""Training on shards: weights and state as in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    error_of,
    expect,
    expect_bits,
    expect_close,
    expect_equal,
)
from keyedopt.conformance.suite.support.device import on_host, the_device, zeros
from keyedopt.conformance.suite.support.ranks import on_each_rank
from keyedopt.conformance.suite.support.replicas import Outer, ScriptedManager
from keyedopt.conformance.suite.support.sharded import (
    PLACEMENTS,
    distributed,
    gathered,
    local_parts,
    rank,
    size,
    table,
)

pytestmark = pytest.mark.on_ranks

#: The algorithms that are stepped with dense gradients.
DENSE = (
    *("SGD", "Adagrad", "Adam", "RowWiseAdagrad", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB"),
    "LarsSGD",
    "Ftrl",
)
Build = Callable[[dict[str, Any]], Any]


def compare(build: Build, exact: bool, rows: int, placement: str, steps: int = 3, columns: int = 4) -> None:
    """Expect the same weights and state from a DTensor and from a plain table."""
    weights = {"one": table(rows, columns)}
    if rows == 5:
        weights["two"] = table(rows, columns, seed=1)
    plain = {key: torch.nn.Parameter(value.clone()) for key, value in weights.items()}
    spread = {key: torch.nn.Parameter(distributed(value, placement)) for key, value in weights.items()}
    one, many = build(plain), build(spread)
    for step in range(steps):
        for key in weights:
            plain[key].grad = table(rows, columns, seed=7 + step)
            spread[key].grad = distributed(table(rows, columns, seed=7 + step), placement)
        one.step()
        many.step()
    what = f"{rows} rows and {columns} columns by {placement}"
    for key in weights:
        expect_like(gathered(spread[key]), on_host(plain[key]), exact, f"{key}, {what}")
    saved, wanted = (
        {key: entry for key, entry in each.state_dict()["state"].items() if entry} for each in (many, one)
    )
    expect_equal(sorted(map(str, saved)), sorted(map(str, wanted)), "keys of the state")
    for key, entry in wanted.items():
        for name, value in entry.items():
            if isinstance(value, torch.Tensor) and value.shape == weights["one"].shape:
                expect_like(gathered(saved[key][name]), on_host(value), exact, f"state {name}, {what}")


def expect_like(seen: torch.Tensor, wanted: torch.Tensor, exact: bool, what: str) -> None:
    """Expect the same bits, or an error of sums in another order in each step.

    An algorithm may round an element by its place in a shard: torch's fused kernels round the last elements
    of a tensor, fewer than a vector, otherwise than the rest.
    """
    if exact:
        expect_bits(seen, wanted, what)
        return
    error = float((seen - wanted).abs().max()) if len(seen) else 0.0
    largest = float(wanted.abs().max()) if len(seen) else 0.0
    expect(error <= 32 * torch.finfo(seen.dtype).eps * largest, f"{what} as in one process", error)


@pytest.mark.clause("SHARD-011", "SHARD-012")
@pytest.mark.needs("{algorithm}.step", "{algorithm}.dtensor")
@pytest.mark.parametrize("algorithm", DENSE)
@on_each_rank
def test_algorithm(impl: Any, algorithm: str) -> None:
    """An algorithm trains DTensors as plain tables, with uneven, empty and globally empty shards."""

    def build(params: dict[str, Any]) -> Any:
        return getattr(impl, algorithm)(list(params.values()), lr=0.1)

    for placement in PLACEMENTS:
        compare(build, False, 5, placement, steps=2)
    for rows in (1, 0):
        compare(build, False, rows, "row", steps=2)
    compare(build, False, 5, "column", steps=1, columns=1)  # the other ranks have none


def wrapped(impl: Any, wrapping: str, params: dict[str, Any]) -> Any:
    """Return Adam with state by key inside a wrapper."""
    optimizer = impl.KeyedOptimizerWrapper(params, lambda given: torch.optim.Adam(given, lr=0.1))
    if wrapping == "combined":
        halves = [
            impl.KeyedOptimizerWrapper({key: param}, lambda given: torch.optim.Adam(given, lr=0.1))
            for key, param in params.items()
        ]
        return impl.CombinedOptimizer([(f"o{one}", half) for one, half in enumerate(halves)])
    if wrapping == "warmup":
        stage = impl.WarmupStage(impl.WarmupPolicy.LINEAR, max_iters=5, value=0.1)
        return impl.WarmupOptimizer(optimizer, [stage], lr=0.5)
    if wrapping == "semi_sync":
        outer = impl.KeyedOptimizerWrapper(params, Outer)
        return impl.SemisyncOptimizer(list(params.values()), optimizer, outer, num_local_steps=2)
    if wrapping == "fault_tolerance":
        return impl.FaultTolerantOptimizer(ScriptedManager([True, False, True, True]), optimizer)
    return optimizer


NAMES = {
    "keyed": "KeyedOptimizerWrapper",
    "combined": "CombinedOptimizer",
    "warmup": "WarmupOptimizer",
    "semi_sync": "SemisyncOptimizer",
    "fault_tolerance": "FaultTolerantOptimizer",
}


@pytest.mark.clause("SHARD-013")
@pytest.mark.needs("{name}", "KeyedOptimizerWrapper")
@pytest.mark.parametrize(("wrapping", "name"), NAMES.items(), ids=NAMES)
@on_each_rank
def test_wrapping(impl: Any, wrapping: str, name: str) -> None:
    """A wrapper trains and saves DTensors as plain tables."""
    for placement in PLACEMENTS:
        compare(lambda params: wrapped(impl, wrapping, params), True, 5, placement, steps=4)


@pytest.mark.clause("SHARD-013")
@pytest.mark.needs("FaultTolerantOptimizer")
@on_each_rank
def test_fault_tolerance_of_torch(impl: Any) -> None:
    """A fault-tolerant optimizer around torch's own trains and saves DTensors as plain tables."""

    def build(params: dict[str, Any]) -> Any:
        adam = torch.optim.Adam(params.values(), lr=0.1)
        return impl.FaultTolerantOptimizer(ScriptedManager([True, False, True]), adam)

    for placement in PLACEMENTS:
        compare(build, True, 5, placement)


@pytest.mark.clause("SHARD-013")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", ["AccumulateSGD", "AccumulateAdagrad", "AccumulateAdam"])
@on_each_rank
def test_accumulation(impl: Any, algorithm: str) -> None:
    """Windows of micro-batches over DTensors equal those over plain tables."""
    options = {"lr": 0.1, "use_accumulate": True, "accumulate_step": 2}

    def build(params: dict[str, Any]) -> Any:
        return getattr(impl, algorithm)(list(params.values()), **options)

    for placement in PLACEMENTS:
        compare(build, False, 5, placement, steps=5)


@pytest.mark.clause("SHARD-014")
@pytest.mark.needs("KeyedOptimizerWrapper")
@on_each_rank
def test_init_state(impl: Any) -> None:
    """init_state makes state like the parameters' shards, changes no value, and steps continue from zero."""
    for placement in PLACEMENTS:
        param: Any = torch.nn.Parameter(distributed(table(5), placement))
        optimizer = impl.KeyedOptimizerWrapper({"p": param}, lambda given: torch.optim.Adam(given, lr=0.1))
        optimizer.init_state()
        expect_bits(gathered(param), table(5), "parameter")
        entry = optimizer.state_dict()["state"]["p"]
        for name in ("exp_avg", "exp_avg_sq"):
            expect_equal(entry[name].placements, param.placements, f"placements of {name}")
            expect_equal([part.shape for part in local_parts(entry[name])], [param.to_local().shape], name)
            expect(not gathered(entry[name]).any(), "zeros", gathered(entry[name]))


@pytest.mark.clause("SHARD-015")
@pytest.mark.needs("GradientClippingOptimizer")
@pytest.mark.parametrize("kind", ["FSDP2", "DistributedDataParallel"])
@on_each_rank
def test_data_parallel(impl: Any, kind: str) -> None:
    """With parameters of FSDP2 and DistributedDataParallel, clipped training equals one process."""

    def model() -> torch.nn.Module:
        torch.manual_seed(3)
        layers = torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 1)
        return torch.nn.Sequential(*layers).to(the_device())

    def optimizer_of(module: torch.nn.Module) -> Any:
        params = dict(module.named_parameters())
        inner = impl.KeyedOptimizerWrapper(params, lambda given: torch.optim.Adam(given, lr=0.1))
        return impl.GradientClippingOptimizer(inner, impl.GradientClipping.NORM, 0.25)

    one, many = model(), model()
    if kind == "FSDP2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        runner: Any = fully_shard(many, mesh=init_device_mesh(the_device().type, (size(),)))
    else:
        runner = torch.nn.parallel.DistributedDataParallel(many)
    single, sharded = optimizer_of(one), optimizer_of(many)
    for step in range(3):
        batches = [table(4, 3, seed=20 + step + 5 * each) for each in range(size())]
        sharded.zero_grad()
        single.zero_grad()
        runner(batches[rank()]).square().mean().backward()
        torch.stack([one(batch).square().mean() for batch in batches]).mean().backward()
        sharded.step()
        single.step()
        norm = gathered(sharded.last_total_grad_norm)
        expect_close(norm.float(), float(single.last_total_grad_norm), "norm", ulps=64)
    for (name, seen), wanted in zip(many.named_parameters(), one.parameters(), strict=True):
        error = float((gathered(seen) - on_host(wanted)).abs().max())
        expect(error < 1e-5, f"{name} within 1e-5", error)


@pytest.mark.clause("SHARD-016")
@pytest.mark.needs("KeyedOptimizer")
@on_each_rank
def test_sharded_tensors(impl: Any) -> None:
    """State in ShardedTensors, unevenly by rows, is saved as it is and loaded in place, shard by shard."""

    def state_of(seed: int) -> Any:
        from torch.distributed._shard.sharded_tensor import init_from_local_shards
        from torch.distributed._shard.sharded_tensor.shard import Shard

        bounds = [0, *(5 * (each + 1) // size() for each in range(size()))]
        mine = table(5, seed=seed)[bounds[rank()] : bounds[rank() + 1]].clone()
        shards = [Shard.from_tensor_and_offsets(mine, [bounds[rank()], 0], rank())] if len(mine) else []
        return init_from_local_shards(shards, 5, 4)

    live, given = state_of(1), state_of(2)
    param = torch.nn.Parameter(zeros(2))
    optimizer = impl.KeyedOptimizer({"t": param}, {param: {"sum": live}}, [{"params": [param]}])
    expect(optimizer.state_dict()["state"]["t"]["sum"] is live, "the live tensor", "another one")
    tensors = [shard.tensor for shard in live.local_shards()]
    optimizer.load_state_dict({"state": {"t": {"sum": given}}})
    for seen, before, wanted in zip(live.local_shards(), tensors, given.local_shards(), strict=True):
        expect(seen.tensor is before, "the same local tensor", "another one")
        expect_bits(seen.tensor, wanted.tensor, "shard")
    other = state_of(3)
    bad = {"state": {"t": {"sum": zeros(3) if rank() == size() - 1 else other}}}
    error = error_of(lambda: optimizer.load_state_dict(bad))
    expect(error.startswith("ValueError"), "a ValueError on each rank", error or "no error")
    for seen, wanted in zip(live.local_shards(), given.local_shards(), strict=True):
        expect_bits(seen.tensor, wanted.tensor, "shard after a load that a rank refused")
