"""Replicas of tables: identical on all ranks, or refused."""

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
from keyedopt.conformance.suite.support.described import unwrapped
from keyedopt.conformance.suite.support.device import linear, on_host, the_device
from keyedopt.conformance.suite.support.embedding import FUSED_OPTIMIZERS, collection, jagged, tables_of
from keyedopt.conformance.suite.support.in_backward import apply_in_backward
from keyedopt.conformance.suite.support.ranks import on_each_rank
from keyedopt.conformance.suite.support.sharded import (
    everyone,
    everywhere,
    gathered,
    rank,
    size,
    table,
)

pytestmark = pytest.mark.on_ranks

#: The bags of each rank: rows of several ranks, of one rank, and none at all.
BATCHES: tuple[dict[str, Any], ...] = (
    {"f": [[0, 1, 1], [2]], "g": [[], [1, 5]], "h": [[3, 3], [0]]},
    {"f": [[5, 1], []], "g": [[2], [0]], "h": [[], []]},
    {"f": [[1], [3]], "g": [[], []], "h": [[4, 4], [0]]},
    {"f": [[], []], "g": [[], []], "h": [[], []]},
)


def loss_of(outputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a loss whose gradient differs by bag and column."""
    return torch.stack([output.square().sum() + output[:, 0].sum() for output in outputs.values()]).sum()


def all_tables(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return copies of all tables and states of a module, on the CPU."""
    optimizer: Any = module.fused_optimizer
    entries = [entry for _, entry in sorted(optimizer.state_dict()["state"].items())]
    states = [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]
    return [on_host(value) for value in (*module.state_dict().values(), *states)]


def expect_same_on_all_ranks(module: torch.nn.Module) -> None:
    """Expect identical tables and states on all ranks."""
    for each in everywhere(all_tables(module)):
        for seen, wanted in zip(each, all_tables(module), strict=True):
            expect_bits(seen, wanted, "table or state of each rank")


def expect_as_in_one_process(replica: torch.nn.Module, single: torch.nn.Module) -> None:
    """Expect tables and states as those of a module that has trained with the batches of all ranks.

    In at most three steps, sums of at most 4 lookups of each of 4 ranks are rounded in another order: 16
    roundings of half a unit in each step, and as many in what is computed of them.
    """
    for seen, wanted in zip(all_tables(replica), all_tables(single), strict=True):
        unit = torch.finfo(torch.promote_types(seen.dtype, torch.float32)).eps
        error = (
            float((seen.double() - wanted.double()).abs().max()) / max(1.0, float(wanted.abs().max())) / unit
        )
        expect(error <= 48, "a table or state within 48 units in the last place of one process", error)


def expect_tables_of_sgd(replica: torch.nn.Module, single: torch.nn.Module) -> None:
    """Expect each element of tables of SGD within 64 ULP of that of one process.

    Two steps sum at most 4 lookups of each of 4 ranks in another order, and round each of them.
    """
    for seen, wanted in zip(all_tables(replica), all_tables(single), strict=True):
        expect_close(seen, wanted, "table", ulps=64)


@pytest.mark.clause("SHARD-017")
@pytest.mark.needs("EmbeddingBagCollection.process_group", "{algorithm}")
@pytest.mark.parametrize("algorithm", FUSED_OPTIMIZERS)
@on_each_rank
def test_replicated_tables(impl: Any, algorithm: str) -> None:
    """Tables with a process group are identical on all ranks, and train with the mean of all gradients."""
    options = {"lr": 0.01}
    replica = collection(impl, algorithm, options, process_group=everyone())
    single = collection(impl, algorithm, options)
    merged = {key: [bag for batch in BATCHES[: size()] for bag in batch[key]] for key in BATCHES[0]}
    for step in range(3):
        outputs = replica(jagged(BATCHES[(rank() + step) % size()]))
        loss_of(outputs).backward()
        (loss_of(single(jagged(merged))) / size()).backward()
    expect_same_on_all_ranks(replica)
    expect_as_in_one_process(replica, single)


@pytest.mark.clause("SHARD-017")
@pytest.mark.needs("EmbeddingBagCollection.process_group", "{algorithm}")
@pytest.mark.parametrize("algorithm", FUSED_OPTIMIZERS)
@on_each_rank
def test_a_step_without_lookups(impl: Any, algorithm: str) -> None:
    """A step in which no rank looks up a row changes tables and states as it does in one process."""
    replica, single = collection(impl, algorithm, process_group=everyone()), collection(impl, algorithm)
    for batch in (BATCHES[0], BATCHES[3], BATCHES[0]):
        for module in (replica, single):
            loss_of(module(jagged(batch))).backward()
    expect_as_in_one_process(replica, single)


@pytest.mark.clause("SHARD-017")
@pytest.mark.needs("EmbeddingBagCollection.process_group", "SGD")
@on_each_rank
def test_a_group_of_one_of_the_ranks(impl: Any) -> None:
    """A module whose process group has only this rank trains as without a process group."""
    groups = [torch.distributed.new_group([each]) for each in range(size())]
    replica, single = collection(impl, process_group=groups[rank()]), collection(impl)
    for batch in (BATCHES[rank()], BATCHES[0]):
        for module in (replica, single):
            loss_of(module(jagged(batch))).backward()
    expect_tables_of_sgd(replica, single)


@pytest.mark.clause("SHARD-017")
@pytest.mark.needs("EmbeddingBagCollection.process_group", "apply_optimizer_in_backward")
@on_each_rank
def test_optimizers_that_were_set_in_another_order(impl: Any) -> None:
    """Tables of one width train as in one process, whatever the order in which their optimizers were set."""
    sizes = [("t", 6, 4, ("f",)), ("u", 6, 4, ("g",))]
    replica = collection(impl, None, tables=sizes, process_group=everyone())
    single = collection(impl, None, tables=sizes)
    for module in (replica, single):
        tables = tables_of(module)
        for name, rate in (("u", 0.5), ("t", 0.25)):
            apply_in_backward(impl, torch.optim.SGD, [tables[name]], {"lr": rate})
        for _ in range(2):
            loss_of(module(jagged({name: BATCHES[0][name] for name in "fg"}))).backward()
    expect_tables_of_sgd(replica, single)


@pytest.mark.clause("SHARD-017")
@pytest.mark.needs("EmbeddingBagCollection.process_group", "SGD")
@on_each_rank
def test_mean_of_ranks_that_reach_other_tables(impl: Any) -> None:
    """The mean is over all ranks, also for a table that only some of them reach."""
    replica, single = collection(impl, process_group=everyone()), collection(impl)
    for step in range(2):
        chosen = ["h" if each % 2 == step else "f" for each in range(size())]
        loss_of({"": replica(jagged(BATCHES[0]))[chosen[rank()]]}).backward()
        outputs = single(jagged(BATCHES[0]))
        losses = [loss_of({"": outputs[name]}) for name in chosen]
        torch.stack(losses).mean().backward()
    expect_tables_of_sgd(replica, single)


@pytest.mark.clause("SHARD-018")
@pytest.mark.needs("EmbeddingBagCollection.process_group", "Adam")
@on_each_rank
def test_ranks_that_reach_other_tables(impl: Any) -> None:
    """Replicas are updated alike if ranks reach different tables, or if clipping defers the updates."""
    replica = collection(impl, "Adam", process_group=everyone())
    for step in range(2):
        outputs = replica(jagged(BATCHES[0]))
        chosen = {key: value for key, value in outputs.items() if (key == "h") == (rank() % 2 == step)}
        loss_of(chosen).backward()
        expect_same_on_all_ranks(replica)
    dense = torch.nn.Parameter(table(2))
    inner = impl.KeyedOptimizerWrapper({"dense": dense}, lambda params: torch.optim.SGD(params, lr=0.5))
    both = impl.CombinedOptimizer([("tables", replica.fused_optimizer), ("dense", inner)])
    optimizer = impl.GradientClippingOptimizer(both, impl.GradientClipping.NORM, 0.5)
    (loss_of(replica(jagged(BATCHES[rank()]))) + dense.sum()).backward()
    optimizer.step()
    expect_same_on_all_ranks(replica)
    norms = everywhere(float(optimizer.last_total_grad_norm))
    expect_equal(len(set(norms)), 1, "number of different norms")


@pytest.mark.clause("SHARD-018")
@pytest.mark.needs("EmbeddingBagCollection.process_group", "SGD")
@on_each_rank
def test_ranks_that_reach_tables_of_another_dtype(impl: Any) -> None:
    """Replicas stay identical if no table of a dtype is in the loss of a rank, or if a rank has no rows."""
    dtypes = {"f": torch.float32, "g": torch.float64}
    configs = [
        impl.EmbeddingBagConfig(
            num_embeddings=6, embedding_dim=4, name=f"t{key}", feature_names=[key], data_type=dtype
        )
        for key, dtype in dtypes.items()
    ]
    replica = impl.EmbeddingBagCollection(
        configs, *unwrapped(impl.SGD, {"lr": 0.1}), device=the_device(), process_group=everyone()
    )
    before = all_tables(replica)
    for step in range(3):
        outputs = replica(jagged({key: BATCHES[rank() if step else 3][key] for key in dtypes}))
        loss_of({"f": outputs["f"]} if (rank() + step) % 2 else outputs).backward()
        expect_same_on_all_ranks(replica)
    for seen, old in zip(all_tables(replica), before, strict=True):
        expect(not torch.equal(seen, old), "an update of each table", "none")


@pytest.mark.clause("SHARD-018")
@pytest.mark.needs("EmbeddingBagCollection.process_group", "SGD")
@on_each_rank
def test_replicas_begin_alike(impl: Any) -> None:
    """Replicas begin with the rows of one rank, although each rank has drawn its own."""
    torch.manual_seed(rank())
    config = impl.EmbeddingBagConfig(num_embeddings=6, embedding_dim=4, name="t", feature_names=["f"])
    module = impl.EmbeddingBagCollection(
        [config], *unwrapped(impl.SGD, {"lr": 0.1}), device=the_device(), process_group=everyone()
    )
    expect_same_on_all_ranks(module)


@pytest.mark.clause("SHARD-019")
@pytest.mark.needs("EmbeddingBagCollection", "Adagrad")
@pytest.mark.parametrize(
    "group",
    [False, pytest.param(True, marks=pytest.mark.needs("EmbeddingBagCollection.process_group"))],
)
@on_each_rank
def test_tables_in_data_parallel(impl: Any, group: bool) -> None:
    """In DistributedDataParallel tables stay identical, or the forward pass raises before any has changed."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            options = {"process_group": everyone()} if group else {}
            self.tables = collection(impl, "Adagrad", **options)
            self.top = linear(8, 1)

        def forward(self, features: Any) -> torch.Tensor:
            outputs = self.tables(features)
            return torch.as_tensor(self.top(outputs["h"]).sum() + loss_of(outputs))

    torch.manual_seed(0)
    model = Model()
    before = all_tables(model.tables)
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    if group:
        names = [name for name, _ in model.named_parameters() if name.startswith("tables.")]
        parallel._set_params_and_buffers_to_ignore_for_model(model, names)
    runner = parallel(model)

    def train() -> None:
        for step in range(3):
            runner(jagged(BATCHES[(rank() + step) % size()])).backward()

    error = error_of(train)
    if error:
        expect(not group, "training", error)
        for seen, wanted in zip(all_tables(model.tables), before, strict=True):
            expect_bits(seen, wanted, "table after an error")
        return
    expect(not error, "training", error)
    expect_same_on_all_ranks(model.tables)


@pytest.mark.clause("SHARD-020")
@pytest.mark.needs("apply_optimizer_in_backward")
@pytest.mark.parametrize("order", ["before", "after"])
@on_each_rank
def test_in_backward_in_data_parallel(impl: Any, order: str) -> None:
    """DistributedDataParallel keeps replicas with such optimizers identical, or an error is raised."""
    torch.manual_seed(0)
    layer = linear(4, 2)
    before = [on_host(param) for param in layer.parameters()]

    def apply() -> None:
        impl.apply_optimizer_in_backward(torch.optim.Adagrad, layer.parameters(), {"lr": 0.1})

    def train() -> None:
        if order == "before":
            apply()
        runner = torch.nn.parallel.DistributedDataParallel(layer)
        if order == "after":
            apply()
        for step in range(3):
            runner(table(3, seed=step + 5 * rank())).square().sum().backward()

    error = error_of(train)
    seen = [on_host(param) for param in layer.parameters()]
    for each in everywhere(seen):
        for one, wanted in zip(each, before if error else seen, strict=True):
            expect_bits(one, wanted, f"parameter on each rank after {error or 'training'}")


@pytest.mark.clause("SHARD-020")
@pytest.mark.needs("apply_optimizer_in_backward")
@on_each_rank
def test_in_backward_with_fsdp(impl: Any) -> None:
    """Optimizers in the backward pass step the shards of FSDP2 with the reduced gradients."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    many, one = linear(4, 5), linear(4, 5)
    one.load_state_dict(many.state_dict())
    fully_shard(many, mesh=init_device_mesh(the_device().type, (size(),)))
    for layer in (many, one):
        impl.apply_optimizer_in_backward(torch.optim.Adagrad, layer.parameters(), {"lr": 0.1})
    for step in range(3):
        batches = [table(3, seed=step + 5 * each) for each in range(size())]
        many(batches[rank()]).square().sum().backward()
        torch.stack([one(batch).square().sum() for batch in batches]).mean().backward()
    for seen, wanted in zip(many.parameters(), one.parameters(), strict=True):
        expect_close(gathered(seen), wanted, "parameter", ulps=64)
