"""What is done with a workload, and how any implementation of the surface does it.

A task makes a `Job` of an implementation and a workload. Peers whose way of doing it is not the surface's
have makers of their own in `keyedopt.benchmarks.peers`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from keyedopt.benchmarks.timing import Job
from keyedopt.benchmarks.workloads import STATE, Dense, Lookups, SparseGradients, Workload

#: The class of each optimizer of tables, by its name in the surface.
CLASSES = {
    "sgd": "SGD",
    "rowwise_adagrad": "RowWiseAdagrad",
    "adagrad": "Adagrad",
    "adam": "Adam",
    "partial_rowwise_adam": "PartialRowWiseAdam",
    "lamb": "LAMB",
    "partial_rowwise_lamb": "PartialRowWiseLAMB",
    "lars_sgd": "LarsSGD",
}
RATE, EPS, BOUND = 1e-2, 1e-8, 1.0
#: So small that it does not matter on which side of Adam's bias correction it stands: SparseAdam differs.
ADAM_EPS = 1e-12


class NotOffered(Exception):  # noqa: N818 - read as "raises not offered"
    """An implementation has no way to do a task; the message says what it lacks."""


@dataclass(frozen=True)
class Task:
    """What is done with a workload.

    Args:
        name: what ``keyedopt bench --task`` calls it.
        about: what is timed.
        kind: the kind of workload that it takes.
        moved: the bytes that must move, of a workload.
        optimizer: of the tables, where it is about tables.
        apart: whether the forward is left out of the time.
    """

    name: str
    about: str
    kind: str
    moved: Callable[[Any], int]
    optimizer: str = ""
    apart: bool = False


def _training(optimizer: str) -> tuple[Task, Task]:
    return (
        Task(
            name=f"train-{optimizer}",
            about=f"forward, backward and update of pooled tables, {CLASSES[optimizer]}",
            kind="lookups",
            moved=lambda work: work.forward_bytes() + work.backward_bytes(optimizer),
            optimizer=optimizer,
        ),
        Task(
            name=f"backward-{optimizer}",
            about=f"backward and update of pooled tables, {CLASSES[optimizer]}",
            kind="lookups",
            moved=lambda work: work.backward_bytes(optimizer),
            optimizer=optimizer,
            apart=True,
        ),
    )


_LISTED = (
    *(task for optimizer in STATE for task in _training(optimizer)),
    Task("sparse-adam", "SparseAdam.step on sparse gradients", "sparse", SparseGradients.sparse_adam_bytes),
    Task("clip-adam", "clip by norm, then step with Adam", "dense", Dense.clip_adam_bytes),
    Task("state", "state_dict, then load_state_dict of another optimizer", "dense", Dense.state_bytes),
)

#: The tasks by name.
TASKS = {task.name: task for task in _LISTED}


def make(surface: Any, task: Task, work: Workload, device: str) -> Job:
    """Make a job of an implementation's public names.

    Raises:
        NotOffered: it does not have them.
    """
    if isinstance(work, Lookups):
        return tables(surface, task, work, device)
    if isinstance(work, SparseGradients):
        return sparse_adam(surface, work, device)
    return (state if task.name == "state" else clip_adam)(surface, work, device)


def need(surface: Any, *names: str) -> list[Any]:
    """Return public names of an implementation, or say which it lacks."""
    missing = [name for name in names if not surface.has(name)]
    if missing:
        raise NotOffered(f"no {' and no '.join(missing)}")
    return [getattr(surface, name) for name in names]


def fill(weight: Tensor) -> None:
    """Give a table the numbers that it has in every implementation."""
    generator = torch.Generator(weight.device).manual_seed(weight.shape[0])
    with torch.no_grad():
        weight.uniform_(-0.1, 0.1, generator=generator)


def options_of(optimizer: str) -> dict[str, float]:
    """Return the arguments of an optimizer of tables: the rate, and eps where it has one."""
    if optimizer in ("sgd", "lars_sgd"):
        return {"lr": RATE}
    return {"lr": RATE, "eps": EPS if optimizer.endswith("adagrad") else ADAM_EPS}


class Rows:
    """The rows of tables that a workload touches, as copies, for comparison."""

    def __init__(self, work: Lookups | SparseGradients, weights: Sequence[Tensor], device: str) -> None:
        self._rows = [rows.to(device) for rows in work.unique()]
        self._weights = weights

    def __call__(self) -> dict[str, Tensor]:
        """Return them as they are now."""
        pairs = enumerate(zip(self._weights, self._rows, strict=True))
        return {f"table {number}": weight.detach()[rows] for number, (weight, rows) in pairs}


def training_job(task: Task, forward: Callable[[], Any], backward: Callable[[Any], Any], rows: Rows) -> Job:
    """Make a job of a forward and a backward pass; the first of them is timed unless it is to be left out."""
    if not task.apart:
        return Job(run=lambda: backward(forward()), results=rows)
    ready: list[Any] = []
    return Job(run=lambda: backward(ready.pop()), results=rows, prepare=lambda: ready.append(forward()))


def tables(surface: Any, task: Task, work: Lookups, device: str) -> Job:
    """Make a job of an ``EmbeddingBagCollection`` that is updated in its backward pass."""
    names = ("EmbeddingBagCollection", "EmbeddingBagConfig", CLASSES[task.optimizer])
    collection, config, optimizer = need(surface, *names)
    module = collection(
        [
            config(work.rows, work.dim, f"t{number}", feature_names=[f"f{number}"], init_fn=fill)
            for number in range(work.tables)
        ],
        optimizer,
        options_of(task.optimizer),
        device=device,
    )
    weights = list(module.fused_optimizer.params.values())
    offsets = work.offsets().to(device)
    features = {f"f{n}": (values.to(device), offsets) for n, values in enumerate(work.values())}
    gradients = [gradient.to(device) for gradient in work.gradients()]

    def forward() -> list[Tensor]:
        outputs = module(features)
        return [outputs[name] for name in features]

    def backward(outputs: list[Tensor]) -> None:
        torch.autograd.backward(outputs, gradients)

    return training_job(task, forward, backward, Rows(work, weights, device))


def sparse_adam(surface: Any, work: SparseGradients, device: str) -> Job:
    """Make a job of ``SparseAdam.step``."""
    (optimizer_class,) = need(surface, "SparseAdam")
    weights = [nn.Parameter(torch.empty(work.rows, work.dim, device=device)) for _ in range(work.tables)]
    for weight in weights:
        fill(weight)
    optimizer = optimizer_class(weights, lr=RATE, eps=EPS)
    parts = [
        (values[None].to(device), gradient.to(device))
        for values, gradient in zip(work.values(), work.gradients(), strict=True)
    ]

    def prepare() -> None:  # a gradient that was coalesced once would be easier the next time
        for weight, (values, gradient) in zip(weights, parts, strict=True):
            weight.grad = torch.sparse_coo_tensor(values, gradient, weight.shape, check_invariants=False)

    return Job(run=optimizer.step, results=Rows(work, weights, device), prepare=prepare)


def parameters_of(work: Dense, device: str) -> tuple[list[nn.Parameter], Callable[[], None]]:
    """Return parameters, and a function that gives them their gradients anew."""
    params = [nn.Parameter(numbers.to(device)) for numbers in work.parameters()]
    sources = [numbers.to(device) for numbers in work.parameters(seed=1)]
    targets = [torch.empty_like(numbers) for numbers in sources]
    for param, target in zip(params, targets, strict=True):
        param.grad = target

    def restore() -> None:  # clipping may change them
        torch._foreach_copy_(targets, sources)

    return params, restore


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of all numbers of some tensors."""
    return torch.cat([tensor.detach().reshape(-1).to(torch.float32) for tensor in tensors])


def clip_adam(surface: Any, work: Dense, device: str) -> Job:
    """Make a job of ``GradientClippingOptimizer`` around torch's fused Adam."""
    names = ("GradientClippingOptimizer", "GradientClipping", "KeyedOptimizerWrapper")
    clipper, clipping, wrapper = need(surface, *names)
    params, restore = parameters_of(work, device)
    named = {f"p{number}": param for number, param in enumerate(params)}
    inner = wrapper(named, lambda given: torch.optim.Adam(given, lr=RATE, eps=EPS, fused=True))
    optimizer = clipper(inner, clipping.NORM, BOUND)
    return Job(run=optimizer.step, results=lambda: {"weights": flat(params)}, prepare=restore)


def state(surface: Any, work: Dense, device: str) -> Job:
    """Make a job of moving the state of one keyed optimizer to another, Adagrad's: step and sum."""
    (wrapper,) = need(surface, "KeyedOptimizerWrapper")

    def stepped(steps: int) -> Any:
        params, restore = parameters_of(work, device)
        named = {f"layer{number}.weight": param for number, param in enumerate(params)}
        optimizer = wrapper(named, lambda given: torch.optim.Adagrad(given, lr=RATE))
        for _ in range(steps):
            restore()
            optimizer.step()
        return optimizer

    source, target = stepped(2), stepped(1)

    def results() -> dict[str, Tensor]:
        entries = target.state_dict()["state"]
        found: dict[str, list[Tensor]] = {}
        for key in sorted(entries):
            for name, value in entries[key].items():
                found.setdefault(name, []).append(value)
        return {name: flat(tensors) for name, tensors in found.items()}

    return Job(run=lambda: target.load_state_dict(source.state_dict()), results=results)
