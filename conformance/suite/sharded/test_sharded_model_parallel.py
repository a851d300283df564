"""Models that torchrec's DistributedModelParallel shards: training and checkpoints as in one process."""

import importlib
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect, expect_bits
from keyedopt.conformance.suite.support.described import CannotRun
from keyedopt.conformance.suite.support.device import linear, on_host, the_device
from keyedopt.conformance.suite.support.ranks import common_folder, on_ranks, the_ranks
from keyedopt.conformance.suite.support.sharded import everyone, everywhere, rank, size

pytestmark = [
    pytest.mark.on_ranks,
    pytest.mark.needs("KeyedOptimizerWrapper", "CombinedOptimizer"),
]

#: How torchrec shards each table.
PLAN = {
    "one": "table_wise",
    "two": "row_wise",
    "three": "column_wise",
    "four": "data_parallel",
}
#: The same tables, sharded otherwise; the state of a data-parallel table has other keys.
OTHER_PLAN = {**PLAN, "one": "column_wise", "two": "table_wise", "three": "row_wise"}
ROWS, WIDTH, BATCH = 7, 8, 12


def need_torchrec() -> None:
    """Import torchrec in the process that forks the ranks, or make the case unsupported."""
    try:
        importlib.import_module("torchrec.distributed.model_parallel")
        importlib.import_module("torch.distributed.optim")  # else each rank compiles its scripts in a step
    except ImportError as error:
        raise CannotRun(f"torchrec cannot be imported: {error}") from None


class Model(torch.nn.Module):
    """A linear layer on pooled rows."""

    def __init__(self, tables: Any, others: Any = None) -> None:
        super().__init__()
        self.tables, self.others = tables, others
        modules = [module for module in (tables, others) if module is not None]
        width = WIDTH * sum(len(module.embedding_bags) for module in modules)
        self.top = linear(width, 1)
        set_weights(self)

    def forward(self, features: Any) -> Any:
        """Return a number for each example."""
        pooled = [self.tables(features).values()]
        if self.others is not None:
            pooled.append(self.others(features).values())
        return self.top(torch.cat(pooled, 1))


@torch.no_grad()
def set_weights(model: torch.nn.Module) -> None:
    """Set fixed weights: torchrec draws those of shards anew."""
    for name, value in model.state_dict().items():
        short = name.removeprefix("module.").removesuffix(".weight").rpartition(".")[2]
        draw = torch.Generator().manual_seed(sum(short.encode()))
        whole = torch.rand(tuple(value.size()), generator=draw) - 0.5
        for _, offsets, part in pieces(value):
            part.copy_(part_at(whole, offsets, part))


def part_at(whole: torch.Tensor, offsets: Any, part: torch.Tensor) -> torch.Tensor:
    """Return the view of a tensor where a part of it belongs."""
    return whole[tuple(slice(at, at + n) for at, n in zip(offsets, part.shape, strict=True))]


def embedding_module(kind: Any, config: Any, names: Any, *arguments: Any, **options: Any) -> Any:
    """Return an embedding module with these tables."""
    configs = [
        config(num_embeddings=ROWS, embedding_dim=WIDTH, name=name, feature_names=[name]) for name in names
    ]
    return kind(configs, *arguments, device=the_device(), **options)


def torchrec_tables(names: Any) -> Any:
    """Return torchrec's embedding module with these tables."""
    import torchrec

    return embedding_module(torchrec.EmbeddingBagCollection, torchrec.EmbeddingBagConfig, names)


def in_parallel(model: Model, plan: Mapping[str, str], ignored: Any = ()) -> Any:
    """Return the model, sharded; Adagrad updates the sharded tables in the backward pass."""
    from torchrec.distributed import sharding_plan
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    bags = model.tables.embedding_bags
    weights = [bags[name].weight for name, how in plan.items() if how != "data_parallel"]
    apply_optimizer_in_backward(torch.optim.Adagrad, weights, {"lr": 0.1, "eps": 1e-8})
    where: dict[str, Any] = {
        "table_wise": {"rank": size() - 1},
        "column_wise": {"ranks": list(range(min(2, size())))},
    }
    shards = {name: getattr(sharding_plan, how)(**where.get(how, {})) for name, how in plan.items()}
    sharder = EmbeddingBagCollectionSharder()
    placed = sharding_plan.construct_module_sharding_plan(
        model.tables, shards, sharder, local_size=size(), world_size=size(), device_type=the_device().type
    )
    parallel = DistributedModelParallel(
        model,
        ShardingEnv.from_process_group(everyone()),
        the_device(),
        ShardingPlan({"tables": placed}),
        [sharder],
        data_parallel_wrapper=DefaultDataParallelWrapper(params_to_ignore=list(ignored)),
    )
    set_weights(parallel)
    return parallel


def batch_of(step: int, names: Any, whole: bool) -> Any:
    """Return the examples of a step for these features, or the part of this rank."""
    from torchrec import KeyedJaggedTensor

    rows = torch.randint(0, ROWS, (len(PLAN), BATCH, 2), generator=torch.Generator().manual_seed(step))
    mine = rows[[list(PLAN).index(name) for name in names]]
    mine = mine if whole else mine[:, rank() :: size()]
    lengths = torch.full((mine.shape[0] * mine.shape[1],), 2)
    return KeyedJaggedTensor(list(names), mine.flatten(), lengths=lengths).to(the_device())


def keyed_adagrad(impl: Any, params: Mapping[str, Any]) -> Any:
    """Return Adagrad with state by key."""
    return impl.KeyedOptimizerWrapper(params, lambda given: torch.optim.Adagrad(given, lr=0.1, eps=1e-8))


def scheduled(impl: Any, model: Any, plan: Mapping[str, str]) -> Any:
    """Return one warmup over the tables of a sharded model and its clipped tower."""
    tower = {
        name: param
        for name, param in model.named_parameters()
        if "embedding_bags" not in name or plan[name.split(".")[-2]] == "data_parallel"
    }
    clipped = impl.GradientClippingOptimizer(keyed_adagrad(impl, tower), impl.GradientClipping.NORM, 0.05)
    both = impl.CombinedOptimizer([("tables", model.fused_optimizer), ("tower", clipped)])
    both.init_state()
    stage = impl.WarmupStage(impl.WarmupPolicy.LINEAR, max_iters=4, value=0.25)
    return impl.WarmupOptimizer(both, [stage], lr=0.1)


def trained_alone(steps: int) -> dict[str, torch.Tensor]:
    """Return the contents of the same model that torch has trained in one process."""
    model = Model(torchrec_tables(PLAN))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-8)
    tower = [param for name, param in model.named_parameters() if "tables" not in name or "four" in name]
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * (0.25 + 0.75 * step / 4)
        optimizer.zero_grad()
        model(batch_of(step, PLAN, whole=True)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(tower, 0.05)
        optimizer.step()
    found = {name.removesuffix(".weight"): param.detach() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        if name.endswith(".weight"):
            found[f"state of {name.split('.')[-2]}"] = optimizer.state[param]["sum"]
    return {name.rpartition(".")[2]: on_host(value) for name, value in found.items()}


def train_model(model: Any, optimizer: Any, steps: Any, names: Any, whole: bool = False) -> None:
    """Take steps; all ranks together have the examples of one process."""
    for step in steps:
        optimizer.zero_grad()
        model(batch_of(step, names, whole)).square().mean().backward()
        optimizer.step()


def assembled(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Return whole weights and accumulated squares, by the name of the table or layer."""
    named = {name.removesuffix(".weight"): value for name, value in model.state_dict().items()}
    for key, entry in optimizer.state_dict()["state"].items():
        for value in entry.values():
            if len(value.shape) == 2:
                named[f"state of {key.split('.')[-2]}"] = value
    mine = {
        name.rpartition(".")[2]: [(*where, on_host(part)) for *where, part in pieces(value)]
        for name, value in named.items()
    }
    found: dict[str, torch.Tensor] = {}
    for each in everywhere(mine) if torch.distributed.is_initialized() else [mine]:
        for name, parts in each.items():
            for shape, offsets, part in parts:
                whole = found.setdefault(name, torch.full(shape, torch.nan))
                part_at(whole, offsets, part).copy_(part)
    return found


def pieces(value: Any) -> list[tuple[Any, Any, torch.Tensor]]:
    """Return the whole shape, offsets and values of the parts of a tensor that are on this rank."""
    if hasattr(value, "local_shards"):
        return [
            (tuple(value.size()), tuple(shard.metadata.shard_offsets), shard.tensor.detach())
            for shard in value.local_shards()
        ]
    return [(tuple(value.shape), (0,) * value.dim(), value.detach())]


def expect_as_alone(seen: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    """Expect the numbers of one process, whose sums have another order."""
    expect(seen.keys() == wanted.keys(), f"{what}: {sorted(wanted)}", sorted(seen))
    for name, value in wanted.items():
        error = float((seen[name] - value).abs().max())
        expect(error <= 2e-5, f"{what}: {name} within 2e-5", error)


def save_model(folder: str, model: Any, optimizer: Any) -> None:
    """Write a checkpoint."""
    from torch.distributed.checkpoint import state_dict_saver

    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state_dict_saver.save(saved, checkpoint_id=folder)


def load_model(folder: str, model: Any, optimizer: Any) -> None:
    """Load a checkpoint in place."""
    from torch.distributed.checkpoint import state_dict_loader

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state_dict_loader.load(saved, checkpoint_id=folder)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])


def parallel_model(impl: Any, plan: Mapping[str, str]) -> tuple[Any, Any]:
    """Return a sharded model and its optimizer."""
    model = in_parallel(Model(torchrec_tables(plan)), plan)
    return model, scheduled(impl, model, plan)


@pytest.mark.clause("SHARD-025")
@pytest.mark.needs("GradientClippingOptimizer", "WarmupOptimizer")
def test_model_parallel(impl: Any) -> None:
    """Optimizers around a model that torchrec shards in four ways train as in one process."""
    need_torchrec()

    def body() -> Any:
        model, optimizer = parallel_model(impl, PLAN)
        train_model(model, optimizer, range(4), PLAN)
        return assembled(model, optimizer)

    wanted = on_ranks(trained_alone, 4, ranks=1)[0]
    for seen in on_ranks(body):
        expect_as_alone(seen, wanted, "after 4 steps")


@pytest.mark.clause("SHARD-026")
@pytest.mark.on_ranks(1)
@pytest.mark.needs("GradientClippingOptimizer", "WarmupOptimizer")
def test_another_sharding_plan(impl: Any) -> None:
    """A checkpoint of a model that torchrec shards resumes on other ranks with another plan."""
    need_torchrec()

    def start(folder: str) -> None:
        model, optimizer = parallel_model(impl, PLAN)
        train_model(model, optimizer, range(2), PLAN)
        save_model(folder, model, optimizer)

    def resume(folder: str) -> Any:
        model, optimizer = parallel_model(impl, OTHER_PLAN)
        load_model(folder, model, optimizer)
        train_model(model, optimizer, range(2, 4), PLAN)
        return assembled(model, optimizer)

    wanted, others = on_ranks(trained_alone, 4, ranks=1)[0], the_ranks() - 1 or 2
    with common_folder() as folder:
        on_ranks(start, folder)
        for seen in on_ranks(resume, folder, ranks=others):
            expect_as_alone(seen, wanted, f"resumed on {others} ranks after 2 steps, after 4 steps")


@pytest.mark.clause("SHARD-027")
@pytest.mark.needs(
    "EmbeddingBagCollection.process_group", "EmbeddingBagCollection.state_dict", "GradientClippingOptimizer"
)
def test_own_tables_in_a_sharded_model(impl: Any) -> None:
    """Replicated tables of an implementation train in a sharded model as in one process, clipped jointly."""
    need_torchrec()
    plan, own = {"two": "row_wise"}, ("four",)

    def build(parallel: bool) -> Any:
        options = {"process_group": everyone()} if parallel else {}
        kind, config = impl.EmbeddingBagCollection, impl.EmbeddingBagConfig
        others = embedding_module(kind, config, own, torch.optim.Adagrad, {"lr": 0.1}, **options)
        model: Any = Model(torchrec_tables(plan), others)
        names = [name for name, _ in model.named_parameters() if name.startswith("others.")]
        return (in_parallel(model, plan, ignored=names) if parallel else model), others

    def trained(parallel: bool) -> Any:
        model, others = build(parallel)
        top = {name: param for name, param in model.named_parameters() if name.startswith("top.")}
        rows = {name: param for name, param in model.named_parameters() if name.startswith("tables.")}

        joint = impl.CombinedOptimizer([("own", others.fused_optimizer), ("top", keyed_adagrad(impl, top))])
        clipped = impl.GradientClippingOptimizer(joint, impl.GradientClipping.NORM, 0.05)
        tables = model.fused_optimizer if parallel else keyed_adagrad(impl, rows)
        optimizer = impl.CombinedOptimizer([("tables", tables), ("clipped", clipped)])
        train_model(model, optimizer, range(3), (*plan, *own), whole=not parallel)
        found = assembled(model, optimizer)
        for each in everywhere(others.state_dict()):
            for seen, wanted in zip(each.values(), others.state_dict().values(), strict=True):
                expect_bits(seen, wanted, "replicated table on each rank")
        return found

    wanted = on_ranks(trained, False, ranks=1)[0]
    for seen in on_ranks(trained, True):
        expect_as_alone(seen, wanted, "after 3 steps")


@pytest.mark.clause("SHARD-028")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.state_dict")
def test_checkpoints_of_torchrec(impl: Any) -> None:
    """Tables and state move from torchrec's sharded module into an implementation's and back."""
    need_torchrec()
    names = [name for name, how in PLAN.items() if how != "data_parallel"]
    plan = {name: PLAN[name] for name in names}

    def sharded() -> tuple[Any, Any]:
        model = in_parallel(Model(torchrec_tables(names)), plan)
        return model, model.fused_optimizer

    def own() -> tuple[Any, Any]:
        kind, config = impl.EmbeddingBagCollection, impl.EmbeddingBagConfig
        model = Model(embedding_module(kind, config, names, torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-8}))
        return model, impl.CombinedOptimizer([("tables.embedding_bags", model.tables.fused_optimizer)])

    def run(build: Any, source: str, target: str, steps: Any) -> Any:
        model, optimizer = build()
        if source:
            load_model(source, model, optimizer)
        train_model(model, optimizer, steps, names, whole=build is own)
        if target:
            save_model(target, model, optimizer)
        return assembled(model, optimizer)

    with common_folder() as folder:
        first, second = f"{folder}/1", f"{folder}/2"
        wanted = without_top(on_ranks(run, own, "", "", range(6), ranks=1)[0])
        on_ranks(run, sharded, "", first, range(2))
        on_ranks(run, own, first, second, range(2, 4), ranks=1)
        for seen in on_ranks(run, sharded, second, "", range(4, 6)):
            expect_as_alone(without_top(seen), wanted, "after 6 steps, 2 of them of the implementation")


def without_top(contents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tables and their state."""
    return {key: value for key, value in contents.items() if "top" not in key}
