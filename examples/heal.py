"""Train a small DLRM in two replica groups of torchft; one is killed in a step, returns and heals.

Each group has a replica of the model. torchft's manager averages the gradients of the groups and decides
whether a step counts. The killed group returns with another initialization, and gets weights, state and
schedule from the group that went on, without a checkpoint. In the end both have the same bits.

Needs torchrec and torchft. Each group is one process here; `many_ranks.py` shards a model over ranks.
"""

import multiprocessing
import os
import signal
import warnings
from datetime import timedelta
from typing import Any

import torch
from torch import distributed as dist
from torchft import Manager, ProcessGroupGloo
from torchft._torchft import LighthouseServer
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM

from keyedopt.fused import (
    FaultTolerantOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)

FEATURES = ("user", "item")
KILLED_IN, TOGETHER = 3, 4  # the step of the kill, and steps of both groups after the return
LIMIT = timedelta(seconds=30)


def build(seed: int) -> tuple[torch.nn.Module, Any]:
    """Return a model, and its optimizer: clipped and warmed up."""
    torch.manual_seed(seed)
    tables = [
        EmbeddingBagConfig(num_embeddings=60, embedding_dim=16, name=name, feature_names=[name])
        for name in FEATURES
    ]
    model = DLRM(EmbeddingBagCollection(tables), 8, [32, 16], [32, 1])
    params = dict(model.named_parameters())
    keyed = KeyedOptimizerWrapper(params, lambda given: torch.optim.Adam(given, lr=0.01))
    clipped = GradientClippingOptimizer(keyed, GradientClipping.NORM, max_gradient=0.5)
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=20, value=0.1)]
    optimizer = WarmupOptimizer(clipped, stages, lr=0.01)
    optimizer.init_state()  # so that a group that returns loads in place
    return model, optimizer


def loss_of(model: torch.nn.Module, group: int, step: int) -> torch.Tensor:
    """Return the loss of the examples of a group in a step."""
    draw = torch.Generator().manual_seed(100 * group + step)
    dense = torch.rand(6, 8, generator=draw)
    rows = torch.randint(0, 60, (6 * len(FEATURES),), generator=draw)
    sparse = KeyedJaggedTensor(list(FEATURES), rows, lengths=torch.ones(len(rows), dtype=torch.int64))
    return (model(dense, sparse) - dense[:, :1]).square().mean()


def contents(model: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """Return the weights, the state and the learning rate as lists of numbers."""
    found = {name: value.tolist() for name, value in model.state_dict().items()}
    for key, entry in optimizer.state_dict()["state"].items():
        found |= {f"{key}.{name}": torch.as_tensor(value).tolist() for name, value in entry.items()}
    return found | {"lr": optimizer.param_groups[0]["lr"]}


def train(group: int, seed: int, lighthouse: str, killed: bool, returned: Any, results: Any) -> None:
    """Train until both groups have taken some steps together after one has returned."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    model, optimizer = build(seed)

    def load(saved: dict[str, Any]) -> None:
        model.load_state_dict(saved["model"])
        fault_tolerant.load_state_dict(saved["optimizer"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=2)),
        min_replica_size=1,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        load_state_dict=load,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        replica_id=f"group_{group}",
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        connect_timeout=LIMIT,
    )
    fault_tolerant = FaultTolerantOptimizer(manager, optimizer)
    together = 0
    while together < TOGETHER:
        fault_tolerant.zero_grad()  # starts a quorum
        loss_of(model, group, manager.current_step()).backward()
        manager.wait_quorum()
        step = manager.current_step()
        if killed and step >= KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        for param in model.parameters():
            manager.allreduce(param.grad).wait()
        fault_tolerant.step()  # if the manager commits; otherwise nothing changes
        committed = manager.current_step() == step + 1
        together += committed and returned.is_set() and manager.num_participants() == 2
    results.put((manager.current_step(), contents(model, optimizer)))


def serve(address: Any) -> None:
    """Run the lighthouse, through which the groups find each other."""
    server = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=10_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=500,
    )
    address.put(f"http://127.0.0.1:{server.address().rpartition(':')[2]}")
    signal.pause()


def main() -> None:
    """Train two groups, kill one, let it return, and compare them."""
    context = multiprocessing.get_context("fork")
    address, results, returned = context.SimpleQueue(), context.Queue(), context.Event()
    running: list[Any] = []

    def start(target: Any, *arguments: Any) -> Any:
        running.append(context.Process(target=target, args=arguments))
        running[-1].start()
        return running[-1]

    try:
        start(serve, address)
        lighthouse = address.get()
        start(train, 0, 0, lighthouse, False, returned, results)
        victim = start(train, 1, 0, lighthouse, True, returned, results)
        victim.join(60)
        assert victim.exitcode == -signal.SIGKILL, "a group was killed in a step"
        returned.set()
        start(train, 1, 1, lighthouse, False, returned, results)  # from other weights
        (step, seen), (other_step, other) = (results.get(timeout=60) for _ in range(2))
    finally:
        for process in running:
            process.kill()
            process.join()
    assert step == other_step
    assert seen == other, "both groups have the same weights, state and schedule"
    print(f"killed in step {KILLED_IN}, healed: the same bits in both groups after step {step}")


if __name__ == "__main__":
    main()
