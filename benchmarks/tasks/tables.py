"""Tasks on embedding tables that are updated in the backward pass."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from keyedopt.benchmarks.tasks.base import (
    ACCUMULATING,
    BOUND,
    CLASSES,
    RATE,
    WINDOW,
    NotOffered,
    Rows,
    Task,
    as_given,
    fill,
    need,
    options_of,
)
from keyedopt.benchmarks.tasks.keyed import keyed_jagged_tensor
from keyedopt.benchmarks.timing import Job
from keyedopt.benchmarks.workloads import FLOAT, INDEX, STATE, Lookups

#: The two forms of input and output.
JOINED = "a KeyedJaggedTensor in, one joined output and gradient"
SPLIT = "an input, an output and a gradient for each feature"
#: The modes of clipping: names of `GradientClipping` in lower case.
MODES = ("norm", "value", "none")


class Tables:
    """An embedding collection with the lookups and gradients of a workload.

    Args:
        surface: the public names of the implementation.
        work: the workload.
        device: the device of the tables.
        optimizer: the name of the class that updates the tables in the backward pass.
        options: its arguments.
        pooled: whether each bag is pooled into one row.
        joined: whether the features are one `KeyedJaggedTensor`, made before the timed part, and the outputs
            are one tensor.

    Raises:
        NotOffered: the implementation lacks a name, or does not take a `KeyedJaggedTensor`.
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
        kind = "EmbeddingBag" if pooled else "Embedding"
        collection, config, updates = need(surface, f"{kind}Collection", f"{kind}Config", optimizer)
        self.module = collection(
            [
                config(rows, work.dim, f"t{number}", feature_names=[f"f{number}"], init_fn=fill)
                for number, (rows, _, _) in enumerate(lookups_of(work, device))
            ],
            *as_given(updates, options),
            device=device,
        )
        self.optimizer = self.module.fused_optimizer
        self.rows = Rows(work, list(self.optimizer.params.values()), device)
        self._joined = joined
        self._features: Any = {f"f{n}": found[1:] for n, found in enumerate(lookups_of(work, device))}
        gradients = work.gradients() if pooled else of_each_value(work)
        if joined:
            self._features, gradients = (
                keyed_jagged_tensor(lookups_of(work, device)),
                [torch.cat(gradients, 1)],
            )
            self._refuse_separate_outputs()
        self._gradients = [gradient.to(device) for gradient in gradients]

    def forward(self) -> list[Tensor]:
        """Return the outputs of the forward pass: one for each feature, or the joined one."""
        outputs = self.module(self._features)
        return [outputs.values()] if self._joined else [outputs[name] for name in self._features]

    def _refuse_separate_outputs(self) -> None:
        """Raise NotOffered unless a `KeyedJaggedTensor` gives one joined output."""
        try:
            with torch.no_grad():
                found = self.module(self._features).values()
        except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
            raise NotOffered(f"no lookup of a KeyedJaggedTensor: {type(error).__name__}") from error
        if not isinstance(found, Tensor):
            raise NotOffered("no joined output for a KeyedJaggedTensor")

    def backward(self, outputs: list[Tensor]) -> None:
        """Run the backward pass, which updates the tables."""
        torch.autograd.backward(outputs, self._gradients)

    def train(self) -> None:
        """Run the forward and the backward pass."""
        self.backward(self.forward())


class OwnTables:
    """The surface of an implementation with a replacement for `Tables`.

    Args:
        surface: its public names.
        maker: called with the arguments of `Tables`; returns an object with the same methods.
    """

    def __init__(self, surface: Any, maker: Callable[..., Any]) -> None:
        self._surface, self.maker = surface, maker

    def has(self, name: str) -> bool:
        """Return whether the implementation has a name."""
        return bool(self._surface.has(name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._surface, name)


def tables_of(surface: Any, *given: Any, **more: Any) -> Any:
    """Return the `Tables` of an implementation, or its replacement; see there for the arguments.

    Raises:
        NotOffered: the implementation lacks a name.
    """
    maker = surface.maker if isinstance(surface, OwnTables) else Tables
    return maker(surface, *given, **more)


def lookups_of(work: Lookups, device: str) -> list[tuple[int, Tensor, Tensor]]:
    """Return the number of rows, the indices and the offsets of each table."""
    return [
        (rows, values.to(device), work.offsets(table).to(device))
        for table, (rows, values) in enumerate(zip(work.heights, work.values(), strict=True))
    ]


def of_each_value(work: Lookups) -> list[Tensor]:
    """Return the gradients of unpooled outputs: each lookup gets the gradient of its bag."""
    pairs = zip(work.gradients(), lookups_of(work, "cpu"), strict=True)
    return [gradient.repeat_interleave(offsets.diff(), 0) for gradient, (_, _, offsets) in pairs]


def training_job(
    task: Task, forward: Callable[[], Any], backward: Callable[[Any], Any], rows: Rows, device: str
) -> Job:
    """Return a job that times the task's part of a forward and a backward pass.

    On a GPU the forward pass may sort the indices for the backward pass, as `keyedopt.fused` does. There,
    the time of the backward pass is that of both passes minus that of a forward pass without gradients.
    """
    if task.part == "train":
        return Job(run=lambda: backward(forward()), results=rows)
    ready: list[Any] = []
    if task.part == "backward" and torch.device(device).type == "cuda":
        return Job(run=lambda: backward(forward()), results=rows, less=torch.no_grad()(forward))
    if task.part == "backward":
        return Job(run=lambda: backward(ready.pop()), results=rows, prepare=lambda: ready.append(forward()))

    def look_up() -> None:
        ready[:] = [forward()]

    def results() -> dict[str, Tensor]:  # zeros before the first lookup
        pooled = ready[0] if ready else forward()
        joined = pooled if isinstance(pooled, Tensor) else torch.cat(list(pooled), 1)
        return {"pooled": joined.detach().clone() if ready else torch.zeros_like(joined)}

    return Job(run=look_up, results=results)


def train(surface: Any, task: Task, work: Lookups, device: str) -> Job:
    """Return a job of pooled tables."""
    options = options_of(task.optimizer)
    tables = tables_of(surface, work, device, CLASSES[task.optimizer], options, joined=task.joined)
    return training_job(task, tables.forward, tables.backward, tables.rows, device)


def train_unpooled(surface: Any, task: Task, work: Lookups, device: str) -> Job:
    """Return a job of unpooled tables."""
    options = options_of(task.optimizer)
    tables = tables_of(surface, work, device, CLASSES[task.optimizer], options, pooled=False)
    return Job(run=tables.train, results=tables.rows)


def accumulate(surface: Any, task: Task, work: Lookups, device: str) -> Job:
    """Return a job of a window of batches whose gradients become one update."""
    options = {**options_of(task.optimizer), "use_accumulate": True, "accumulate_step": WINDOW}
    tables = tables_of(surface, work, device, ACCUMULATING[task.optimizer], options)

    def run() -> None:
        for _ in range(WINDOW):
            tables.train()

    return Job(run=run, results=tables.rows)


def clipped(surface: Any, task: Task, work: Lookups, device: str) -> Job:
    """Return a job of tables whose optimizer is wrapped in the clipping wrapper."""
    clipper, modes = need(surface, "GradientClippingOptimizer", "GradientClipping")
    tables = tables_of(surface, work, device, CLASSES[task.optimizer], options_of(task.optimizer))
    mode = task.name.split("-")[1].upper()
    optimizer = clipper(tables.optimizer, getattr(modes, mode), BOUND if mode == "NORM" else BOUND / 10)

    def run() -> None:
        tables.train()
        optimizer.step()

    return Job(run=run, results=tables.rows)


def warmed_up(surface: Any, task: Task, work: Lookups, device: str) -> Job:
    """Return a job of tables whose learning rate is set by a schedule."""
    warmer, stage, policy = need(surface, "WarmupOptimizer", "WarmupStage", "WarmupPolicy")
    tables = tables_of(surface, work, device, CLASSES[task.optimizer], options_of(task.optimizer))
    optimizer = warmer(tables.optimizer, [stage(policy.LINEAR, max_iters=10**6, value=0.5)], lr=RATE)

    def run() -> None:
        optimizer.zero_grad()  # as in every loop; torchrec's tables read the learning rate here
        tables.train()
        optimizer.step()

    return Job(run=run, results=tables.rows)


def in_backward(surface: Any, task: Task, work: Lookups, device: str) -> Job:
    """Return a job of ``nn.EmbeddingBag(sparse=True)`` with `apply_optimizer_in_backward`."""
    apply, optimizer = need(surface, "apply_optimizer_in_backward", CLASSES[task.optimizer])
    lookups = [(values, offsets[:-1]) for _, values, offsets in lookups_of(work, device)]
    bags = [nn.EmbeddingBag(rows, work.dim, mode="sum", sparse=True, device=device) for rows in work.heights]
    weights = [bag.weight for bag in bags]
    for weight in weights:
        fill(weight)
    apply(optimizer, weights, options_of(task.optimizer))
    gradients = [part.to(device) for part in work.gradients()]

    def run() -> None:
        outputs = [bag(values, starts) for bag, (values, starts) in zip(bags, lookups, strict=True)]
        torch.autograd.backward(outputs, gradients)

    return Job(run=run, results=Rows(work, weights, device))


def trained(optimizer: str, surface: Any, work: Lookups, device: str, steps: int) -> Any:
    """Return the optimizer of tables after `steps - 1` steps; it has state from the start."""
    tables = tables_of(surface, work, device, CLASSES[optimizer], options_of(optimizer))
    for _ in range(steps - 1):
        tables.train()
    return tables.optimizer


def in_a_window(optimizer: str, surface: Any, work: Lookups, device: str, steps: int) -> Any:
    """Return the optimizer of accumulating tables after some batches of a window."""
    options = {**options_of(optimizer), "use_accumulate": True, "accumulate_step": WINDOW}
    tables = tables_of(surface, work, device, ACCUMULATING[optimizer], options)
    for _ in range(steps):
        tables.train()
    return tables.optimizer


def state_bytes(optimizer: str, work: Lookups) -> int:
    """Return the bytes to read and write the state of each row."""
    factor, constant = STATE[optimizer]
    return 2 * FLOAT * (factor * work.dim + constant) * sum(work.heights)


def window_bytes(optimizer: str, work: Lookups) -> int:
    """Return `state_bytes`, and those of the row numbers and gradient sums of the window."""
    rows = sum(len(values) for values in work.unique())
    return state_bytes(optimizer, work) + 2 * rows * (FLOAT * work.dim + INDEX)


def unpooled_bytes(optimizer: str, work: Lookups) -> int:
    """Return the bytes: row numbers in each pass, an output and a gradient per lookup, rows and state."""
    lookups = sum(len(values) for values in work.values())
    rows = sum(len(values) for values in work.unique())
    factor, constant = STATE[optimizer]
    numbers = work.dim * (2 * lookups + rows * (1 + 2 * (1 + factor))) + 2 * constant * rows
    return 2 * INDEX * lookups + FLOAT * numbers


def _training(optimizer: str) -> tuple[Task, ...]:
    name = CLASSES[optimizer]

    def backward(work: Any) -> int:
        return int(work.backward_bytes(optimizer))

    def both(work: Any) -> int:
        return int(work.forward_bytes()) + backward(work)

    def window(work: Any) -> int:
        return WINDOW * int(work.forward_bytes()) + backward(work)

    def task(
        kind: str, about: str, moved: Callable[[Any], int], maker: Any, part: str = "", joined: bool = False
    ) -> Task:
        return Task(f"{kind}-{optimizer}", about, "lookups", moved, maker, optimizer, part, joined)

    update = f"backward and update of pooled tables, {name}"
    made = [
        task("train_joined", f"forward, {update}; {JOINED}", both, train, "train", joined=True),
        task("train", f"forward, {update}; {SPLIT}", both, train, "train"),
        task("backward", update, backward, train, "backward"),
        task(
            "train_unpooled",
            f"forward, backward and update without pooling, {name}",
            functools.partial(unpooled_bytes, optimizer),
            train_unpooled,
        ),
        *(
            task(f"train_clipped-{mode}", f"forward, {update}, clipped by {mode}", both, clipped)
            for mode in MODES
        ),
        task("train_warmup", f"forward, {update}, with a learning-rate schedule", both, warmed_up),
        task(
            "bag_in_backward",
            f"EmbeddingBag(sparse=True) whose weight {name} updates in the backward",
            both,
            in_backward,
        ),
    ]
    if optimizer in ACCUMULATING:
        about = f"{WINDOW} batches, one update, {ACCUMULATING[optimizer]}"
        made.append(task("accumulate", about, window, accumulate))
    return tuple(made)


TASKS = (
    *(task for optimizer in STATE for task in _training(optimizer)),
    Task(
        "forward_joined",
        f"forward of pooled tables; {JOINED}",
        "lookups",
        Lookups.forward_bytes,
        train,
        "sgd",
        "forward",
        joined=True,
    ),
    Task(
        "forward",
        f"forward of pooled tables; {SPLIT}",
        "lookups",
        Lookups.forward_bytes,
        train,
        "sgd",
        "forward",
    ),
)
