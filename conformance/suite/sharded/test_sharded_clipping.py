"""Clipping where ranks differ: other parameters, other orders, other shards."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    error_of,
    expect,
    expect_close,
    expect_equal,
    p_norm,
)
from keyedopt.conformance.suite.support.device import the_device
from keyedopt.conformance.suite.support.doubles import clipping
from keyedopt.conformance.suite.support.embedding import collection, jagged
from keyedopt.conformance.suite.support.ranks import on_each_rank, on_ranks
from keyedopt.conformance.suite.support.sharded import (
    PLACEMENTS,
    distributed,
    everyone,
    everywhere,
    gathered,
    local_parts,
    mesh_of,
    rank,
    size,
    table,
)

pytestmark = [
    pytest.mark.on_ranks,
    pytest.mark.needs("GradientClippingOptimizer", "KeyedOptimizerWrapper"),
]

NORMS = (1.0, 2.0, 3.0, math.inf)
BOUND = 0.25


def with_grad(values: torch.Tensor) -> Any:
    """Return a parameter of zeros with a gradient."""
    param: Any = torch.nn.Parameter(torch.zeros_like(values))
    param.grad = values
    return param


def norm_of(gradients: dict[str, Any], p: float = 2.0) -> float:
    """Return the norm of all gradients."""
    return p_norm([one for grad in gradients.values() for one in grad.flatten().tolist()], p)


def expect_clipped(optimizer: Any, params: dict[str, Any], gradients: dict[str, Any], p: float) -> None:
    """Expect one norm of all gradients, and each gradient scaled by it.

    ``gradients`` has all gradients of all ranks, also of parameters that this rank does not have.
    """
    norm = norm_of(gradients, p)
    optimizer.step()
    expect_close(gathered(optimizer.last_total_grad_norm).float(), norm, f"{p:g}-norm", ulps=8)
    for key, param in sorted(params.items()):  # all ranks gather in one order
        wanted = gradients[key] * min(1.0, BOUND / (norm + 1e-6))
        expect_close(gathered(param.grad), wanted, f"clipped {key}", ulps=8)


@pytest.mark.clause("SHARD-001")
@pytest.mark.needs("CombinedOptimizer")
@on_each_rank
def test_rank_without_a_parameter(impl: Any) -> None:
    """A rank without a parameter of param_to_pgs takes part in its norm, also without any parameter."""
    for p in NORMS:
        for only in ("towers", "nothing"):
            gradients = {f"t{one}": table(2, seed=one + 1) for one in range(max(1, size() - 1))}
            params = {key: with_grad(grad.clone()) for key, grad in gradients.items() if key == f"t{rank()}"}
            groups = {param: [everyone()] for param in params.values()}
            if only == "towers":
                gradients["dense"] = table(3, seed=9)
                params["dense"] = with_grad(gradients["dense"].clone())
            options = {"norm_type": p, "enable_global_grad_clip": True, "param_to_pgs": groups}
            if params:
                optimizer, _ = clipping(impl, params, "NORM", BOUND, **options)
            else:
                kind = impl.GradientClipping.NORM
                empty = impl.CombinedOptimizer([])
                optimizer = impl.GradientClippingOptimizer(empty, kind, BOUND, **options)
            for _ in range(2):
                for key, param in params.items():
                    param.grad = gradients[key].clone()
                expect_clipped(optimizer, params, gradients, p)


def clip_on_pairs(impl: Any) -> None:
    """Clip on a mesh of pairs of ranks without and with DTensors."""
    from torch.distributed.tensor import Replicate, Shard

    mesh = mesh_of(torch.arange(size()).reshape(-1, 2 if size() % 2 == 0 else 1))
    kinds = {"both": [Shard(0), Shard(1)], "rows": [Replicate(), Shard(0)], "copies": [Shard(1), Replicate()]}
    for spread in ({}, kinds):
        clip_on_mesh(impl, mesh, spread)


def clip_on_mesh(impl: Any, mesh: Any, kinds: dict[str, Any]) -> None:
    """Clip a tower on the first rank of each row of a mesh, two that one rank has, and DTensors of kinds."""
    from torch.distributed.tensor import distribute_tensor

    gradients = {
        key: table(4, seed=seed)
        for seed, key in enumerate(sorted({*kinds, "first", "last", "plain", "tower"}))
    }
    made: dict[str, Any] = {
        key: distribute_tensor(gradients[key], mesh, placed) for key, placed in kinds.items()
    }
    made["plain"] = gradients["plain"].clone()
    if mesh.get_local_rank(1) == 0:
        made["tower"] = gradients["tower"].clone()
    for key, owner in (("first", 0), ("last", size() - 1)):
        if rank() == owner:
            made[key] = gradients[key].clone()
    params = {key: with_grad(made[key]) for key in sorted(made, reverse=rank() % 2 == 1)}
    both = [mesh.get_group(0), mesh.get_group(1)]
    over = {"tower": [mesh.get_group(1)], "first": both, "last": both}
    groups = {params[key]: over[key] for key in over.keys() & params.keys()}
    options = {"enable_global_grad_clip": True, "param_to_pgs": groups}
    for p in NORMS:
        for key, param in params.items():
            param.grad = made[key].clone()
        optimizer, _ = clipping(impl, params, "NORM", BOUND, norm_type=p, **options)
        optimizer.step()
        norm = norm_of(gradients, p)
        expect_close(gathered(optimizer.last_total_grad_norm).float(), norm, f"{p:g}-norm", ulps=8)
        for key, param in params.items():
            wanted = local_parts(made[key])[0] * min(1.0, BOUND / (norm + 1e-6))
            expect_close(local_parts(param.grad)[0], wanted, f"clipped {key}", ulps=8)


@pytest.mark.clause("SHARD-001", "SHARD-003")
@pytest.mark.on_ranks(2)
def test_norm_on_pairs_of_ranks(impl: Any) -> None:
    """On a mesh of two by two ranks all scale by one norm, also with parameters on some of the ranks."""
    on_ranks(clip_on_pairs, impl, ranks=4)


def clip_on_one_of_a_mesh(impl: Any) -> None:
    """Clip a parameter on rank 0 over a mesh of one column, and over one of pairs."""
    for columns in (1, 2 if size() % 2 == 0 else 1):
        clip_on_one(impl, mesh_of(torch.arange(size()).reshape(-1, columns)))


def clip_on_one(impl: Any, mesh: Any) -> None:
    """Clip a parameter on rank 0 over both dimensions of a mesh, whose groups the others do not all know."""
    params = {"plain": with_grad(table(2, seed=1))}
    if rank() == 0:
        params["first"] = with_grad(table(2, seed=2))
    groups = {params[key]: [mesh.get_group(0), mesh.get_group(1)] for key in params if key == "first"}
    optimizer, _ = clipping(impl, params, "NORM", BOUND, enable_global_grad_clip=True, param_to_pgs=groups)
    errors = everywhere(error_of(optimizer.step))
    if not all(errors):
        expect_equal(errors, [""] * size(), "errors of the ranks, if some have none")
        norm = norm_of({key: table(2, seed=seed) for seed, key in enumerate(("plain", "first"), start=1)})
        expect_close(optimizer.last_total_grad_norm.float(), norm, "norm", ulps=8)


@pytest.mark.clause("SHARD-001")
@pytest.mark.on_ranks(2)
def test_groups_that_some_ranks_do_not_know(impl: Any) -> None:
    """A parameter of one rank over two groups counts on all ranks, or all ranks raise an error."""
    on_ranks(clip_on_one_of_a_mesh, impl, ranks=4)


@pytest.mark.clause("SHARD-002")
@on_each_rank
def test_other_order_of_parameters_and_groups(impl: Any) -> None:
    """Ranks that list parameters and process groups in different orders compute one norm."""
    from torch.distributed.device_mesh import init_device_mesh

    others = [torch.distributed.new_group(list(range(size()))) for _ in range(2)]
    columns = 2 if size() % 2 == 0 else 1
    mesh = init_device_mesh(the_device().type, (size() // columns, columns))
    gradients = {key: table(2, seed=seed) for seed, key in enumerate("abcd")}
    both = [mesh.get_group(0), mesh.get_group(1)]
    groups = dict(zip("abcd", ([others[0]], [others[1]], [everyone()], both), strict=True))
    keys = sorted(gradients, reverse=rank() % 2 == 1)
    params = {key: with_grad(gradients[key].clone()) for key in keys}
    listed = {params[key]: groups[key][:: 1 - 2 * (rank() % 2)] for key in keys}
    optimizer, _ = clipping(impl, params, "NORM", BOUND, enable_global_grad_clip=True, param_to_pgs=listed)
    everything = {f"{key} of {one}": grad for key, grad in gradients.items() for one in range(size())}
    norm = norm_of(everything)
    for _ in range(2):
        for key in keys:
            params[key].grad = gradients[key].clone()
        optimizer.step()
        expect_close(optimizer.last_total_grad_norm.float(), norm, "norm", ulps=8)


@pytest.mark.clause("SHARD-003")
@pytest.mark.parametrize("rows", [5, 1], ids=["uneven", "empty shards"])
@on_each_rank
def test_norm_of_distributed_tensors(impl: Any, rows: int) -> None:
    """DTensors by rows, columns, copies and on a mesh of two dimensions are clipped as in one process."""
    for p in NORMS:
        gradients = {each: table(rows, seed=seed) for seed, each in enumerate(PLACEMENTS)}
        gradients["plain"] = table(2, seed=8)
        order = sorted(gradients, reverse=rank() % 2 == 1)
        params = {}
        made = {each: distributed(gradients[each], each) for each in PLACEMENTS}
        for key in order:
            params[key] = with_grad(made.get(key, gradients[key]).clone())
        optimizer, _ = clipping(impl, params, "NORM", BOUND, norm_type=p)
        expect_clipped(optimizer, params, gradients, p)


@pytest.mark.clause("SHARD-004")
@pytest.mark.parametrize("joined", [False, True])
@on_each_rank
def test_distributed_tensor_on_some_ranks(impl: Any, joined: bool) -> None:
    """Where a DTensor is on some of the ranks only, the others get its norm or an error that names it."""
    inside = list(range(max(1, size() - 1)))
    gradients = {"part": table(3, seed=1), "all": table(3, seed=2)}
    part = distributed(gradients["part"], "row", inside)
    params = {"part": with_grad(part), "all": with_grad(gradients["all"].clone())}
    options = {"enable_global_grad_clip": True, "param_to_pgs": {}} if joined else {}
    norm = norm_of(gradients)

    def step() -> None:
        optimizer, _ = clipping(impl, params, "NORM", BOUND, **options)
        optimizer.step()
        expect_close(gathered(optimizer.last_total_grad_norm).float(), norm, "norm", ulps=8)

    error = error_of(step)
    if error:
        outside = rank() not in inside or joined
        expect(outside and "part" in error, "the norm, or on other ranks an error that names 'part'", error)
    else:
        expect_close(params["all"].grad, gradients["all"] * (BOUND / (norm + 1e-6)), "clipped", ulps=8)


@pytest.mark.clause("SHARD-005")
@pytest.mark.parametrize("kind", ["VALUE", "NONE"])
@on_each_rank
def test_tracked_norm_where_ranks_differ(impl: Any, kind: str) -> None:
    """The tracked norm covers all ranks also with VALUE and NONE, in each step anew."""
    gradients = {"t0": table(2, seed=3), "d": table(5, seed=4)}
    params = {"d": with_grad(distributed(gradients["d"], "row"))}
    if rank() == 0:
        params["t0"] = with_grad(gradients["t0"].clone())
    groups = {params[key]: [everyone()] for key in params if key == "t0"}
    options = {"enable_global_grad_clip": True, "param_to_pgs": groups, "track_grad_norm": True}
    try:
        optimizer, recorder = clipping(impl, params, kind, 0.5, **options)
    except (ValueError, NotImplementedError):
        expect(kind == "VALUE", "VALUE if the kind raises an error", kind)
        return
    for scale in (1.0, 2.0):
        for key, param in params.items():
            param.grad = distributed(gradients[key] * scale, "row") if key == "d" else gradients[key] * scale
        optimizer.step()
        norm = norm_of(gradients) * scale
        expect_close(gathered(optimizer.last_total_grad_norm).float(), norm, "norm", ulps=8)
        seen = dict(zip(params, recorder.received[-1], strict=True))
        wanted = gradients["d"] * scale
        expect_close(gathered(seen["d"]), wanted.clamp(-0.5, 0.5) if kind == "VALUE" else wanted, "gradient")
    norms = everywhere(float(gathered(optimizer.compute_total_grad_norm()[0])))
    expect(len(set(norms)) == 1, "the same norm on all ranks", norms)


@pytest.mark.clause("SHARD-006")
@pytest.mark.needs("EmbeddingBagCollection", "CombinedOptimizer", "SGD")
@on_each_rank
def test_tables_of_other_ranks(impl: Any) -> None:
    """One norm covers embedding tables, each on a rank of its own, and replicated dense parameters."""

    def train(tables: list[int], groups: bool) -> tuple[Any, Any, dict[int, Any]]:
        modules = {one: collection(impl, "SGD", tables=((f"t{one}", 6, 4, ("f",)),)) for one in tables}
        dense = torch.nn.Parameter(table(2, seed=5))
        inside = [(f"t{one}", module.fused_optimizer) for one, module in modules.items()]
        inner = impl.KeyedOptimizerWrapper({"dense": dense}, lambda params: torch.optim.SGD(params, lr=0.5))
        weights = [weight for module in modules.values() for weight in module.parameters()]
        optimizer = impl.GradientClippingOptimizer(
            impl.CombinedOptimizer([*inside, ("dense", inner)]),
            impl.GradientClipping.NORM,
            0.5,
            enable_global_grad_clip=groups,
            param_to_pgs={weight: [everyone()] for weight in weights} if groups else None,
        )
        for step in range(2):
            optimizer.zero_grad()
            loss = (dense * (step + 1)).sum()
            for one, module in modules.items():
                rows = jagged({"f": [[one % 6, 1], [2 + step]]})
                loss = loss + module(rows)["f"].sum() * (one + 1)
            loss.backward()
            optimizer.step()
        return optimizer, dense, {one: next(module.parameters()) for one, module in modules.items()}

    def exact_norm() -> float:
        counts = [Counter([one % 6, 1, 3]) for one in range(size())]  # of the rows in the second step
        tables = [count * (one + 1) for one in range(size()) for count in counts[one].values()] * 4
        return p_norm([*[2.0] * 8, *map(float, tables)])

    optimizer, dense, weights = train([rank()], True)
    other, wanted, all_weights = train(list(range(size())), False)
    norm = other.last_total_grad_norm
    expect_close(norm.float(), exact_norm(), "norm of one process", ulps=8)
    expect_close(optimizer.last_total_grad_norm.float(), norm.float(), "norm", ulps=8)
    expect_close(dense, wanted, "dense parameter", ulps=8)
    expect_close(weights[rank()], all_weights[rank()], "table", ulps=8)
