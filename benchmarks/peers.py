"""Peers that do a task by their own API, as their documentation recommends.

Preparation is not timed: TBE gets its indices as one tensor, which is its input format.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from keyedopt.benchmarks.tasks import NotOffered, Task, dense, make, tables
from keyedopt.benchmarks.tasks.base import (
    BOUND,
    CLASSES,
    EPS,
    RATE,
    Rows,
    as_given,
    fill,
    flat,
    need,
    options_of,
)
from keyedopt.benchmarks.tasks.keyed import concatenated, keyed_jagged_tensor
from keyedopt.benchmarks.tasks.tables import training_job
from keyedopt.benchmarks.timing import Job
from keyedopt.benchmarks.workloads import Dense, Lookups, Workload

#: torch's optimizers for sparse gradients, by optimizer.
TORCH = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "SparseAdam"}
#: TBE's names of optimizers, by device.
EVERYWHERE = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
}
TBE = {
    "cpu": EVERYWHERE,
    "cuda": EVERYWHERE
    | {
        "adam": "ADAM",
        "partial_rowwise_adam": "PARTIAL_ROWWISE_ADAM",
        "lamb": "LAMB",
        "partial_rowwise_lamb": "PARTIAL_ROWWISE_LAMB",
        "lars_sgd": "LARS_SGD",
    },
}


def with_torch(surface: Any, task: Task, work: Workload, device: str) -> Job:
    """Return a job of torch: ``EmbeddingBag(sparse=True)`` and an optimizer, or ``clip_grad_norm_``."""
    if task.name == "clip-adam" and isinstance(work, Dense):
        return _clip_adam(work, device)
    if not (task.part and isinstance(work, Lookups)):
        return make(surface, task, work, device)
    if task.optimizer not in TORCH:
        raise NotOffered(f"no {CLASSES[task.optimizer]}")
    (optimizer_class,) = need(surface, TORCH[task.optimizer])
    tables = [torch.empty(rows, work.dim, device=device) for rows in work.heights]
    bags = [nn.EmbeddingBag(len(table), work.dim, mode="sum", sparse=True, _weight=table) for table in tables]
    weights = [bag.weight for bag in bags]
    for weight in weights:
        fill(weight)
    optimizer = optimizer_class(weights, **options_of(task.optimizer))
    values = [part.to(device) for part in work.values()]
    starts = [work.offsets(number)[:-1].to(device) for number in range(work.tables)]
    gradients = [part.to(device) for part in work.gradients()]

    def forward() -> list[Tensor]:
        return [bag(part, start) for bag, part, start in zip(bags, values, starts, strict=True)]

    def backward(outputs: list[Tensor]) -> None:
        torch.autograd.backward(outputs, gradients)
        optimizer.step()
        optimizer.zero_grad()

    return training_job(task, forward, backward, Rows(work, weights, device), device)


def _clip_adam(work: Dense, device: str) -> Job:
    params, restore = dense.parameters_of(work, device)
    optimizer = torch.optim.Adam(params, lr=RATE, eps=EPS, fused=True)

    def run() -> None:
        nn.utils.clip_grad_norm_(params, BOUND)
        optimizer.step()

    return Job(run=run, results=lambda: {"weights": flat(params)}, prepare=restore)


def with_fbgemm(surface: Any, task: Task, work: Workload, device: str) -> Job:
    """Return a job of FBGEMM's table-batched embeddings."""
    kind = torch.device(device).type
    if not (task.part and isinstance(work, Lookups)):
        raise NotOffered("tables only")
    if task.optimizer not in TBE[kind]:
        raise NotOffered(f"no {CLASSES[task.optimizer]} on {kind}")
    need(surface, "EmbeddingBagCollection")  # raises if FBGEMM is missing
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    place = EmbeddingLocation.DEVICE if kind == "cuda" else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if kind == "cuda" else ComputeDevice.CPU
    options = options_of(task.optimizer)
    options["learning_rate"] = options.pop("lr")
    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, work.dim, place, compute) for rows in work.heights],
        optimizer=getattr(EmbOptimType, TBE[kind][task.optimizer]),
        stochastic_rounding=False,
        device=torch.device(device),
        **options,
    )
    weights = tbe.split_embedding_weights()
    for weight in weights:
        fill(weight)
    values = torch.cat(work.values()).to(device)
    offsets = concatenated([work.offsets(number) for number in range(work.tables)]).to(device)
    gradients = [part.to(device) for part in work.gradients()]
    if task.joined:
        gradients = [torch.cat(gradients, 1)]

    def forward() -> list[Tensor]:
        pooled = tbe(values, offsets)
        return [pooled] if task.joined else list(torch.split(pooled, work.dim, 1))

    def backward(pooled: list[Tensor]) -> None:
        torch.autograd.backward(pooled, gradients)

    return training_job(task, forward, backward, Rows(work, weights, device), device)


#: Peers that use one thread of a CPU, however many torch has: FBGEMM's wheel for the CPU has no OpenMP.
ONE_THREAD = ("fbgemm",)


class TorchrecTables(tables.Tables):
    """torchrec's ``FusedEmbeddingBagCollection``, which contains FBGEMM.

    Lookups are a ``KeyedJaggedTensor``, its input format, made before the timed part.

    Raises:
        NotOffered: the optimizer is missing on the device, or unpooled lookups are asked for.
    """

    def __init__(
        self,
        surface: Any,
        work: Lookups,
        device: str,
        optimizer: str,
        options: Mapping[str, Any],
        pooled: bool = True,
        joined: bool = False,
    ) -> None:
        try:
            from torchrec.modules.embedding_configs import EmbeddingBagConfig
            from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
        except ImportError as error:
            raise NotOffered(f"no torchrec: {error}") from error
        # The first lookup makes torch warn about a call inside torchrec.
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        known = {name: getattr(torch.optim, name) for name in ("SGD", "Adagrad", "Adam")}
        known["RowWiseAdagrad"] = getattr(surface, "RowWiseAdagrad", None)
        kind = torch.device(device).type
        if known.get(optimizer) is None or (optimizer == "Adam" and kind == "cpu"):
            raise NotOffered(f"no {optimizer} on {kind}")
        if not pooled:
            raise NotOffered("no FusedEmbeddingBagCollection without pooling")
        lookups = list(tables.lookups_of(work, device))
        names = [f"f{number}" for number in range(len(lookups))]
        configs = [
            EmbeddingBagConfig(
                num_embeddings=rows, embedding_dim=work.dim, name=f"t{number}", feature_names=[names[number]]
            )
            for number, (rows, _, _) in enumerate(lookups)
        ]
        self.module = FusedEmbeddingBagCollection(
            configs, *as_given(known[optimizer], options), device=torch.device(device)
        )
        kept = self.module.state_dict()
        weights = [kept[f"embedding_bags.t{number}.weight"] for number in range(len(lookups))]
        for weight in weights:
            fill(weight)
        self.rows = Rows(work, weights, device)
        self.optimizer = self.module.fused_optimizer()
        self._joined, self._features = joined, keyed_jagged_tensor(lookups)
        gradients = [part.to(device) for part in work.gradients()]
        self._gradients = [torch.cat(gradients, 1)] if joined else gradients

    def forward(self) -> list[Tensor]:
        """Return the pooled output of each feature, or the joined one."""
        outputs = self.module(self._features)
        return [outputs.values()] if self._joined else list(outputs.to_dict().values())


def with_torchrec(surface: Any, task: Task, work: Workload, device: str) -> Job:
    """Return a job of torchrec: `TorchrecTables` for tables, the public surface for everything else."""
    return make(tables.OwnTables(surface, TorchrecTables), task, work, device)


#: Peers with jobs of their own; all others do tasks through the public surface.
OWN_WAY: dict[str, Callable[[Any, Task, Workload, str], Job]] = {
    "torch": with_torch,
    "fbgemm": with_fbgemm,
    "torchrec": with_torchrec,
}
