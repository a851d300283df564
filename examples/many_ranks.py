"""Train a small DLRM under DistributedModelParallel, and resume it on other numbers of ranks.

Two ranks train: torchrec shards the tables, keyedopt clips by one norm of all gradients and warms up. Every
second step they write a checkpoint. Then one rank is killed in the middle of a step. One rank resumes from
the last checkpoint, then three ranks resume from a later one. The losses are those without a kill.

Needs torchrec. It starts its ranks; with torchrun, call `train` on each rank.
"""

import multiprocessing
import os
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoints
from torch import distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from keyedopt.fused import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)

FEATURES = ("user", "item", "shop")  # sharded by rows, on one rank, replicated
EVERY = 2  # steps between checkpoints
BATCH = 12  # examples of a step, over all ranks


def build() -> tuple[torch.nn.Module, Any]:
    """Return the sharded model, and one optimizer for all of it."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(num_embeddings=60, embedding_dim=16, name=name, feature_names=[name])
        for name in FEATURES
    ]
    model = DLRM(EmbeddingBagCollection(tables), 8, [32, 16], [32, 1])
    bags = model.sparse_arch.embedding_bag_collection
    fused = [bags.embedding_bags[name].weight for name in FEATURES[:2]]
    apply_optimizer_in_backward(RowWiseAdagrad, fused, {"lr": 0.05})
    sharder = EmbeddingBagCollectionSharder()
    how = {"user": row_wise(), "item": table_wise(rank=dist.get_world_size() - 1), "shop": data_parallel()}
    shards = construct_module_sharding_plan(bags, how, sharder, device_type="cpu")
    plan = ShardingPlan({"sparse_arch.embedding_bag_collection": shards})
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    parallel = DistributedModelParallel(model, env, torch.device("cpu"), plan, [sharder])
    inside = dict(parallel.named_parameters())
    tower = {name: param for name, param in inside.items() if not hasattr(param, "_in_backward_optimizers")}
    tower = {name: param for name, param in tower.items() if "embedding_bags" not in name or "shop" in name}
    keyed = KeyedOptimizerWrapper(tower, lambda params: torch.optim.Adam(params, lr=0.01))
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=4, value=0.1)]
    warmup = WarmupOptimizer(keyed, stages, lr=0.01)
    clipped = GradientClippingOptimizer(warmup, GradientClipping.NORM, max_gradient=0.5)
    optimizer = CombinedOptimizer([("tables", parallel.fused_optimizer), ("tower", clipped)])
    optimizer.init_state()
    return parallel, optimizer


def batch(step: int) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """Return the part of this rank of the dense and sparse input and the labels of a step."""
    draw = torch.Generator().manual_seed(step)
    dense = torch.rand(BATCH, 8, generator=draw)
    rows = torch.randint(0, 60, (len(FEATURES), BATCH), generator=draw)
    part = slice(dist.get_rank(), None, dist.get_world_size())
    mine = rows[:, part]
    lengths = torch.ones(mine.numel(), dtype=torch.int64)
    sparse = KeyedJaggedTensor(list(FEATURES), mine.flatten().contiguous(), lengths=lengths)
    return dense[part].contiguous(), sparse, dense[part, :1]


def train(folder: Path, last: int, kill_in: int | None = None) -> list[float]:
    """Resume from the newest complete checkpoint, train up to a step, and return the loss of each step."""
    model, optimizer = build()
    done = [int(path.parent.name) for path in folder.glob("*/.metadata")]  # written last, by rename
    first = max(done, default=0)
    if done:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        checkpoints.load(saved, checkpoint_id=folder / str(first))
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])  # on all ranks, or on none
    losses = []
    for step in range(first, last):
        dense, sparse, labels = batch(step)
        optimizer.zero_grad()
        loss = (model(dense, sparse) - labels).square().mean()
        loss.backward()
        if step == kill_in and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(float(mean))
        if (step + 1) % EVERY == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            checkpoints.save(saved, checkpoint_id=folder / str(step + 1))
    return losses


def rank(number: int, size: int, store: str, results: Any, arguments: Any) -> None:
    """Run `train` on one rank."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=number, world_size=size)
    results.put(train(*arguments))


def run(size: int, *arguments: Any) -> list[float]:
    """Train on some ranks; return the losses, or an empty list if a rank has died."""
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=rank, args=(number, size, f"{folder}/store", results, arguments))
            for number in range(size)
        ]
        for each in ranks:
            each.start()
        while any(each.is_alive() for each in ranks) and all(not each.exitcode for each in ranks):
            ranks[0].join(0.05)
        for each in ranks:  # those that wait for a rank that has died
            each.kill()
            each.join()
        return [] if any(each.exitcode for each in ranks) else results.get()


def main() -> None:
    """Train without an interruption, then with one, and compare the losses."""
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        wanted = run(2, Path(one), 8)
        assert len(wanted) == 8
        assert run(2, Path(other), 8, 3) == [], "a rank was killed in step 3"
        seen = run(1, Path(other), 6)  # from the checkpoint of step 2
        torch.testing.assert_close(seen, wanted[2:6], rtol=1e-4, atol=1e-5)
        seen = run(3, Path(other), 8)  # from the checkpoint of step 6
        torch.testing.assert_close(seen, wanted[6:], rtol=1e-4, atol=1e-5)
        print(
            f"losses {[round(loss, 4) for loss in wanted]}: resumed on 1 and on 3 ranks, healed after a kill"
        )


if __name__ == "__main__":
    main()
