"""Tasks on uncoalesced sparse gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from keyedopt.benchmarks.tasks.base import CLASSES, EPS, RATE, Rows, Task, fill, need, options_of
from keyedopt.benchmarks.timing import Job
from keyedopt.benchmarks.workloads import STATE, SparseGradients


def optimizer_of(
    surface: Any, name: str, work: SparseGradients, device: str
) -> tuple[Any, Callable[[], None], list[nn.Parameter]]:
    """Return an optimizer of tables, a function that restores their gradients, and the tables."""
    adam = name == "adam"  # it has another class for sparse gradients
    (optimizer_class,) = need(surface, "SparseAdam" if adam else CLASSES[name])
    weights = [nn.Parameter(torch.empty(work.rows, work.dim, device=device)) for _ in range(work.tables)]
    for weight in weights:
        fill(weight)
    optimizer = optimizer_class(weights, **({"lr": RATE, "eps": EPS} if adam else options_of(name)))
    parts = [
        (values[None].to(device), gradient.to(device))
        for values, gradient in zip(work.values(), work.gradients(), strict=True)
    ]

    def prepare() -> None:  # a step may have coalesced the gradient
        for weight, (values, gradient) in zip(weights, parts, strict=True):
            weight.grad = torch.sparse_coo_tensor(values, gradient, weight.shape, check_invariants=False)

    return optimizer, prepare, weights


def step(surface: Any, task: Task, work: SparseGradients, device: str) -> Job:
    """Return a job of an optimizer's step."""
    optimizer, prepare, weights = optimizer_of(surface, task.optimizer, work, device)
    return Job(run=optimizer.step, results=Rows(work, weights, device), prepare=prepare)


def step_bytes(optimizer: str, work: SparseGradients) -> int:
    """Return the bytes: read row numbers and gradients once, read and write rows and their state once."""
    return work._as_lookups().backward_bytes(optimizer)


def _task(optimizer: str) -> Task:
    name = "SparseAdam" if optimizer == "adam" else CLASSES[optimizer]
    return Task(
        name=f"sparse-{optimizer}",
        about=f"{name}.step on sparse gradients",
        kind="sparse",
        moved=lambda work: step_bytes(optimizer, work),
        maker=step,
        optimizer=optimizer,
    )


TASKS = tuple(_task(optimizer) for optimizer in STATE)
