"""torchrec's DistributedModelParallel trains tables whose optimizer is keyedopt's, with FBGEMM's kernels."""

import socket

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing

from keyedopt import fused, reference
from keyedopt.fused import sharded_tables

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [reference, fused])
ROWS, WIDTH, BATCH, STEPS = 40, 8, 4, 4
FEATURES = ("a", "b", "c")


def bags_of(torchrec, features=FEATURES, data_type=None):
    more = {} if data_type is None else {"data_type": data_type}
    return torchrec.EmbeddingBagCollection(
        [
            torchrec.EmbeddingBagConfig(
                num_embeddings=ROWS, embedding_dim=WIDTH, name=f"t_{name}", feature_names=[name], **more
            )
            for name in features
        ],
        device=torch.device("cpu"),
    )


def translated(torchrec, kind, options, device, apply=fused.apply_optimizer_in_backward, data_type=None):
    bags = bags_of(torchrec, ("a",), data_type)
    apply(kind, bags.parameters(), options)
    fused.use_fbgemm_kernels(bags, device)
    (weight,) = bags.parameters()
    (kind,), (options,) = weight._optimizer_classes, weight._optimizer_kwargs
    return kind, options


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("name", "given", "device", "wanted"),
    [
        ("SGD", {"lr": 0.5}, "cpu", {"lr": 0.5}),
        ("SGD", {}, "cpu", {"lr": 0.01}),
        ("Adagrad", {"lr": 0.5, "eps": 0.25}, "cpu", {"lr": 0.5, "eps": 0.25}),
        ("RowWiseAdagrad", {}, "cpu", {"lr": 0.01, "eps": 1e-8}),
        ("RowWiseAdagrad", {"max_norm": 0.5}, "cuda", {"lr": 0.01, "eps": 1e-8, "max_norm": 0.5}),
        ("Adam", {"betas": (0.5, 0.75)}, "cuda", {"lr": 0.01, "eps": 1e-8, "beta1": 0.5, "beta2": 0.75}),
        (
            "Adam",
            {"weight_decay": 0.25, "decay": "decoupled"},
            "cuda",
            {"lr": 0.01, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.25},
        ),
        (
            "PartialRowWiseAdam",
            {"lr": 0.5},
            "cuda",
            {"lr": 0.5, "eps": 1e-8, "beta1": 0.9, "beta2": 0.999},
        ),
    ],
)
def test_arguments_are_translated(torchrec, implementation, name, given, device, wanted):
    kind, options = translated(torchrec, getattr(implementation, name), given, device)
    assert kind is getattr(torchrec.optim, name)
    assert options == wanted


@pytest.mark.parametrize(("decay", "mode"), [("l2", "L2"), ("decoupled", "DECOUPLE")])
def test_weight_decay_of_row_wise_adagrad_selects_the_mode(torchrec, decay, mode):
    _, options = translated(torchrec, fused.RowWiseAdagrad, {"weight_decay": 0.5, "decay": decay}, "cuda")
    assert (options["weight_decay"], options["weight_decay_mode"].name) == (0.5, mode)


def test_tables_in_half_precision_are_rounded_to_nearest(torchrec):
    half = torchrec.modules.embedding_configs.DataType.FP16
    assert translated(torchrec, fused.SGD, {}, "cuda", data_type=half)[1]["stochastic_rounding"] is False


def test_torchrecs_function_may_attach_the_optimizer(torchrec):
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    with pytest.warns(DeprecationWarning, match="deprecated"):
        kind, _ = translated(torchrec, fused.RowWiseAdagrad, {}, "cpu", apply_optimizer_in_backward)
    assert kind is torchrec.optim.RowWiseAdagrad


def emb_opt_type(torchrec, kind):
    from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

    return optimizer_type_to_emb_opt_type(kind)


@pytest.mark.parametrize("cuda", [False, True])
def test_arguments_are_translated_when_torchrec_asks_for_the_optimizer_of_fbgemm(torchrec, cuda, monkeypatch):
    wanted = emb_opt_type(torchrec, torchrec.optim.RowWiseAdagrad)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    bags = bags_of(torchrec, ("a",))
    fused.apply_optimizer_in_backward(fused.RowWiseAdagrad, bags.parameters(), {"lr": 0.5})
    (weight,) = bags.parameters()
    (given,) = weight._optimizer_kwargs
    assert given == {"lr": 0.5}
    assert "eps" not in given
    assert "optimizer" in given
    assert given == {"lr": 0.5, "eps": 1e-8, "optimizer": wanted}


@pytest.mark.parametrize(
    ("name", "given", "cuda", "text"),
    [
        ("Adam", {}, False, "not adam"),
        ("Adam", {}, True, "on the CPU"),  # FBGEMM has Adam on CUDA, but torchrec does not say the device
        ("Ftrl", {}, True, "not ftrl"),
        ("RowWiseAdagrad", {"max_norm": 0.5}, True, "ignores max_norm"),
    ],
)
def test_the_error_names_the_call_for_one_device(torchrec, name, given, cuda, text, monkeypatch):
    emb_opt_type(torchrec, torchrec.optim.SGD)  # imports torchrec's part for many ranks
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    bags = bags_of(torchrec, ("a",))
    fused.apply_optimizer_in_backward(getattr(fused, name), bags.parameters(), given)
    (weight,) = bags.parameters()
    with pytest.raises(ValueError, match=text) as raised:
        _ = "optimizer" in weight._optimizer_kwargs[0]
    assert "use_fbgemm_kernels(model, device)" in str(raised.value)
    assert weight._optimizer_kwargs == [given]


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("name", "given", "device", "text"),
    [
        ("Adam", {}, "cpu", "not adam"),
        ("LAMB", {}, "cuda", "row of zeros"),
        ("LarsSGD", {}, "cuda", "row of zeros"),
        ("SparseAdam", {}, "cuda", "sparse_adam"),
        ("AccumulateSGD", {"use_accumulate": True, "accumulate_step": 2}, "cpu", "without accumulation"),
        ("SGD", {"momentum": 0.5}, "cpu", "momentum"),
        ("SGD", {"weight_decay": 0.5}, "cuda", "ignores weight decay"),
        ("RowWiseAdagrad", {"weight_decay": 0.5}, "cpu", "ignores weight decay"),
        ("RowWiseAdagrad", {"max_norm": 0.5}, "cpu", "ignores max_norm"),
        ("RowWiseAdagrad", {"lr_decay": 0.5}, "cuda", "lr_decay=0.5"),
        ("RowWiseAdagrad", {"initial_accumulator_value": 0.5}, "cuda", "initial_accumulator_value=0.5"),
        ("RowWiseAdagrad", {"rows": "nonzero"}, "cuda", "rows="),
        ("Adagrad", {"maximize": True}, "cuda", "maximize=True"),
        ("Adagrad", {"error_if_nonfinite": True}, "cuda", "error_if_nonfinite=True"),
        ("Adagrad", {"eps": 0.0}, "cuda", "eps"),
        ("Adam", {"weight_decay": 0.5}, "cuda", "decoupled"),
        ("PartialRowWiseAdam", {"bias_correction": "per_row"}, "cuda", "bias_correction"),
        ("Adam", {"eps_placement": "before_bias_correction"}, "cuda", "eps_placement"),
    ],
)
def test_what_fbgemm_lacks_raises_and_changes_nothing(torchrec, implementation, name, given, device, text):
    kind = getattr(implementation, name)
    bags = bags_of(torchrec, ("a", "b"))
    first, second = bags.parameters()
    implementation.apply_optimizer_in_backward(implementation.SGD, [first], {"lr": 0.5})
    implementation.apply_optimizer_in_backward(kind, [second], given)
    with pytest.raises(ValueError, match=text) as raised:
        fused.use_fbgemm_kernels(bags, device)
    assert "embedding_bags.t_b.weight" in str(raised.value)
    assert [one._optimizer_classes for one in (first, second)] == [[implementation.SGD], [kind]]
    assert [one._optimizer_kwargs for one in (first, second)] == [[{"lr": 0.5}], [given]]


def test_a_derived_class_and_two_optimizers_raise(torchrec):
    class RowWiseAdagrad(fused.RowWiseAdagrad):
        pass

    with pytest.raises(ValueError, match="only keyedopt's own classes"):
        translated(torchrec, RowWiseAdagrad, {}, "cpu")
    bags = bags_of(torchrec, ("a",))
    for _ in range(2):
        fused.apply_optimizer_in_backward(fused.SGD, bags.parameters(), {})
    with pytest.raises(ValueError, match="2 optimizers"):
        fused.use_fbgemm_kernels(bags, "cpu")


def test_classes_of_torch_and_dense_parameters_stay(torchrec):
    model = torch.nn.ModuleList([bags_of(torchrec, ("a",)), torch.nn.Linear(2, 2)])
    fused.apply_optimizer_in_backward(torch.optim.Adagrad, model[0].parameters(), {"lr": 0.5})
    fused.use_fbgemm_kernels(model, "cpu")
    (weight,) = model[0].parameters()
    assert (weight._optimizer_classes, weight._optimizer_kwargs) == ([torch.optim.Adagrad], [{"lr": 0.5}])


class Model(torch.nn.Module):
    """Tables, and a dense layer over their outputs."""

    def __init__(self, tables):
        super().__init__()
        self.tables = tables
        self.over = torch.nn.Linear(len(FEATURES) * WIDTH, 1)

    def forward(self, features):
        return self.over(self.tables(features).values())


def batch(torchrec, step, rank):
    draw = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (len(FEATURES) * BATCH,), generator=draw)
    values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=draw)
    return torchrec.KeyedJaggedTensor(list(FEATURES), values, lengths=lengths)


def train(torchrec, model, tables, rank):
    """Train with warmup and clipping; return the learning rates and losses of all steps."""
    dense = {name: param for name, param in model.named_parameters() if "tables" not in name}
    clipped = fused.GradientClippingOptimizer(
        fused.KeyedOptimizerWrapper(dense, lambda params: fused.SGD(params, lr=0.5)),
        clipping=fused.GradientClipping.VALUE,
        max_gradient=0.25,
    )
    optimizer = fused.WarmupOptimizer(
        fused.CombinedOptimizer([("tables", tables), ("dense", clipped)]),
        [fused.WarmupStage(fused.WarmupPolicy.LINEAR, max_iters=3, value=0.25)],
        lr=0.5,
    )
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(batch(torchrec, step, rank)).square().mean()
        loss.backward()
        optimizer.step()
        found.append([*(group["lr"] for group in optimizer.param_groups), loss.item()])
    return found


def plan_of(model, sharding):
    """Return the plan of torchrec's planner, or, as that shards no rows on the CPU, one that shards rows."""
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingPlan

    sharder = EmbeddingBagCollectionSharder()
    if sharding == "row_wise":
        rows = {f"t_{name}": row_wise() for name in FEATURES}
        part = construct_module_sharding_plan(model.tables, rows, sharder, device_type="cpu")
        return ShardingPlan({"tables": part})
    constraints = {f"t_{name}": ParameterConstraints(sharding_types=[sharding]) for name in FEATURES}
    topology = Topology(world_size=2, compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    return planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)


def shard_and_train(rank, port, queue):
    import torchrec
    from torchrec.distributed import DistributedModelParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    results, ran, update = [], [], sharded_tables.TableKernels._update

    def noted(kernels, *given):
        ran.append(kernels._backend.name)
        update(kernels, *given)

    sharded_tables.TableKernels._update = noted
    for kind, options, sharding in (
        (fused.RowWiseAdagrad, {}, "table_wise"),
        (torchrec.optim.RowWiseAdagrad, {"eps": 1e-8}, "table_wise"),
        (fused.Adagrad, {}, "row_wise"),
        (torch.optim.Adagrad, {"eps": 1e-8}, "row_wise"),
        (fused.RowWiseAdagrad, {}, "table_wise without the call"),
        (fused.RowWiseAdagrad, {}, "table_wise with keyedopt's kernels"),
        (fused.Adagrad, {}, "row_wise with keyedopt's kernels"),
    ):
        torch.manual_seed(0)
        model = Model(bags_of(torchrec))
        fused.apply_optimizer_in_backward(kind, model.tables.parameters(), options | {"lr": 0.5})
        sharding, _, otherwise = sharding.partition(" ")
        if not otherwise.startswith("without"):
            fused.use_fbgemm_kernels(model, "cpu")
        plan = plan_of(model, sharding)
        kinds = {(one.sharding_type, one.compute_kernel) for one in plan.plan["tables"].values()}
        sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan)
        if otherwise.startswith("with keyedopt"):
            fused.use_keyedopt_kernels(sharded, "native")
        results.append((kinds, train(torchrec, sharded, sharded.fused_optimizer, rank), saved(sharded)))
    queue.put((rank, (results, ran)))
    dist.barrier()
    dist.destroy_process_group()


def saved(sharded):
    """Return the Euclidean norm of what this rank saves under each key: weights and states of its shards."""
    states = sharded.fused_optimizer.state_dict()["state"]
    entries = sharded.state_dict() | {key: one for state in states.values() for key, one in state.items()}
    found = {}
    for key, value in entries.items():
        shards = value.local_shards() if hasattr(value, "local_shards") else None
        parts = [value] if shards is None else [shard.tensor for shard in shards]
        found[key] = [part.double().norm().item() for part in parts]
    return found


@pytest.mark.complete
def test_two_ranks_train_as_with_torchrecs_classes(torchrec):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    ranks = [context.Process(target=shard_and_train, args=(rank, port, queue)) for rank in range(2)]
    for one in ranks:
        one.start()
    try:
        found = dict(queue.get(timeout=120) for _ in ranks)
    finally:
        for one in ranks:
            one.join(30)
            one.kill()
    for rank in range(2):
        results, ran = found[rank]
        assert ran == ["native"] * 2 * STEPS
        by_table, by_row = {("table_wise", "fused")}, {("row_wise", "fused")}
        plans = [by_table, by_table, by_row, by_row, by_table, by_table, by_row]
        assert [kinds for kinds, _, _ in results] == plans
        ours, theirs, ours_row_wise, theirs_row_wise, uncalled, *kernels = (
            losses for _, losses, _ in results
        )
        assert ours == theirs == uncalled
        assert ours_row_wise == theirs_row_wise
        assert [step[0] for step in ours] == pytest.approx([0.25, 0.375, 0.5, 0.5])
        for losses, wanted in zip(kernels, (ours, ours_row_wise), strict=True):
            assert losses == [pytest.approx(step, rel=1e-5) for step in wanted]
        for place, like in ((5, 0), (6, 2)):
            norms, wanted = results[place][2], results[like][2]
            assert norms == {key: pytest.approx(other, rel=1e-5) for key, other in wanted.items()}
