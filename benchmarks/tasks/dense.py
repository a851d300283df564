"""Tasks on dense parameters: the step of each optimizer, and of each wrapper around Adam."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keyedopt.benchmarks.tasks.base import (
    ACCUMULATING,
    BOUND,
    CLASSES,
    EPS,
    RATE,
    WINDOW,
    Task,
    dense_step_bytes,
    flat,
    need,
    need_arguments,
    options_of,
)
from keyedopt.benchmarks.timing import Job
from keyedopt.benchmarks.workloads import FLOAT, STATE, Dense

#: Local steps per global step of semi-synchronous training.
LOCAL_STEPS = 4


def parameters_of(work: Dense, device: str) -> tuple[list[nn.Parameter], Callable[[], None]]:
    """Return parameters, and a function that restores their gradients; a vector is a table with one row."""
    params = [nn.Parameter(numbers.to(device)) for numbers in _tables(work, 0)]
    sources = [numbers.to(device) for numbers in _tables(work, 1)]
    targets = [torch.empty_like(numbers) for numbers in sources]

    def restore() -> None:  # clipping may change gradients, and a wrapper may remove them
        for param, target in zip(params, targets, strict=True):
            param.grad = target
        torch._foreach_copy_(targets, sources)

    restore()
    return params, restore


def _tables(work: Dense, seed: int) -> list[Tensor]:
    return [numbers.reshape(-1, numbers.shape[-1]) for numbers in work.parameters(seed)]


def named(params: list[nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return parameters by key."""
    return {f"layer{number}.weight": param for number, param in enumerate(params)}


# --- wrappers -------------------------------------------------------------------------------------


def keyed(surface: Any, params: Mapping[str, nn.Parameter]) -> Any:
    """Wrap torch's fused Adam in the keyed wrapper."""
    (wrapper,) = need(surface, "KeyedOptimizerWrapper")
    return wrapper(dict(params), lambda given: torch.optim.Adam(given, lr=RATE, eps=EPS, fused=True))


def combined(surface: Any, params: Mapping[str, nn.Parameter]) -> Any:
    """Combine two keyed optimizers, each with half of the parameters."""
    (combination,) = need(surface, "CombinedOptimizer")
    items = list(params.items())
    return combination(
        [(name, keyed(surface, dict(items[start::2]))) for start, name in enumerate(("even", "odd"))]
    )


def wrapped(surface: Any, params: Mapping[str, nn.Parameter]) -> Any:
    """Put the plain wrapper around a keyed optimizer."""
    (wrapper,) = need(surface, "OptimizerWrapper")
    return wrapper(keyed(surface, params))


def clipped(mode: str, **options: Any) -> Callable[[Any, Mapping[str, nn.Parameter]], Any]:
    """Return a function that wraps a keyed optimizer in the clipping wrapper."""

    def wrap(surface: Any, params: Mapping[str, nn.Parameter]) -> Any:
        clipper, modes = need(surface, "GradientClippingOptimizer", "GradientClipping")
        need_arguments(clipper, options)
        return clipper(keyed(surface, params), getattr(modes, mode), BOUND, **options)

    return wrap


def warmed_up(surface: Any, params: Mapping[str, nn.Parameter]) -> Any:
    """Wrap a keyed optimizer in a learning-rate schedule."""
    warmer, stage, policy = need(surface, "WarmupOptimizer", "WarmupStage", "WarmupPolicy")
    return warmer(keyed(surface, params), [stage(policy.LINEAR, max_iters=10**6, value=0.5)], lr=RATE)


class Willing:
    """A fault-tolerance manager that commits every step at once, so that only the wrapper takes time."""

    def start_quorum(self) -> None:
        """Start a quorum; does nothing."""

    def should_commit(self) -> bool:
        """Return True."""
        return True


def fault_tolerant(surface: Any, params: Mapping[str, nn.Parameter]) -> Any:
    """Wrap torch's fused Adam in the fault-tolerant wrapper."""
    (wrapper,) = need(surface, "FaultTolerantOptimizer")
    return wrapper(Willing(), torch.optim.Adam(params.values(), lr=RATE, eps=EPS, fused=True))


class Averaging(torch.optim.SGD):
    """A global optimizer that averages the parameters with those of the last global step."""

    def step(self, closure: Any = None) -> Any:
        """Create missing state."""
        for group in self.param_groups:
            for param in group["params"]:
                if not self.state[param]:
                    self.state[param] = {"anchor": param.detach().clone()}

    @torch.no_grad()
    def global_step(self, count: Tensor, closure: Any = None) -> None:
        """Average the parameters with the anchors, and set new anchors."""
        self.step()
        params = [param for group in self.param_groups for param in group["params"]]
        anchors = [self.state[param]["anchor"] for param in params]
        torch._foreach_lerp_(params, anchors, 0.5)
        torch._foreach_copy_(anchors, params)


def semi_sync(surface: Any, params: Mapping[str, nn.Parameter]) -> Any:
    """Wrap a keyed optimizer in the semi-synchronous wrapper."""
    outer, wrapper = need(surface, "SemisyncOptimizer", "KeyedOptimizerWrapper")
    around = wrapper(dict(params), lambda given: Averaging(given, lr=RATE))
    return outer(list(params.values()), keyed(surface, params), around, num_local_steps=LOCAL_STEPS)


#: The wrappers around torch's fused Adam, by name.
WRAPPERS: dict[str, Callable[[Any, Mapping[str, nn.Parameter]], Any]] = {
    "keyed": keyed,
    "combined": combined,
    "wrapper": wrapped,
    "clip_norm": clipped("NORM"),
    "clip_norm_inf": clipped("NORM", norm_type="inf"),
    "clip_norm_tracked": clipped("NORM", track_grad_norm=True),
    "clip_value": clipped("VALUE"),
    "clip_none": clipped("NONE"),
    "warmup": warmed_up,
    "fault_tolerant": fault_tolerant,
    "semi_sync": semi_sync,
}

# --- jobs -----------------------------------------------------------------------------------------


def step(surface: Any, task: Task, work: Dense, device: str) -> Job:
    """Return a job of an optimizer's step."""
    (optimizer_class,) = need(surface, CLASSES[task.optimizer])
    params, restore = parameters_of(work, device)
    optimizer = optimizer_class(params, **options_of(task.optimizer))
    return Job(run=optimizer.step, results=lambda: {"weights": flat(params)}, prepare=restore)


def wrapper_step(wrapper: str, surface: Any, work: Dense, device: str) -> Job:
    """Return a job of a wrapper's step; for semi-synchronous training, of all steps of a global step."""
    params, restore = parameters_of(work, device)
    optimizer = WRAPPERS[wrapper](surface, named(params))
    steps = LOCAL_STEPS if wrapper == "semi_sync" else 1
    grads = [param.grad for param in params]

    def run() -> None:
        for _ in range(steps):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.step()

    job = optimizer.step if steps == 1 else run
    return Job(run=job, results=lambda: {"weights": flat(params)}, prepare=restore)


def around_own(wrapper: str, surface: Any, task: Task, work: Dense, device: str) -> Job:
    """Return a job of the step of an implementation's own optimizer in a wrapper."""
    optimizer_class, wrap = need(surface, CLASSES[task.optimizer], "KeyedOptimizerWrapper")
    params, restore = parameters_of(work, device)
    inner = wrap(named(params), lambda given: optimizer_class(given, **options_of(task.optimizer)))
    if wrapper == "warmup":
        warmer, stage, policy = need(surface, "WarmupOptimizer", "WarmupStage", "WarmupPolicy")
        optimizer = warmer(inner, [stage(policy.LINEAR, max_iters=10**6, value=0.5)], lr=RATE)
    else:
        clipper, modes = need(surface, "GradientClippingOptimizer", "GradientClipping")
        optimizer = clipper(inner, getattr(modes, wrapper.upper()), BOUND)
    return Job(run=optimizer.step, results=lambda: {"weights": flat(params)}, prepare=restore)


def accumulate(surface: Any, task: Task, work: Dense, device: str) -> Job:
    """Return a job of a window of steps, of which the last one updates the parameters."""
    (optimizer_class,) = need(surface, ACCUMULATING[task.optimizer])
    params, restore = parameters_of(work, device)
    options = {**options_of(task.optimizer), "use_accumulate": True, "accumulate_step": WINDOW}
    optimizer = optimizer_class(params, **options)
    grads = [param.grad for param in params]

    def run() -> None:
        for _ in range(WINDOW):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            optimizer.step()

    return Job(run=run, results=lambda: {"weights": flat(params)}, prepare=restore)


def in_backward(surface: Any, task: Task, work: Dense, device: str) -> Job:
    """Return a job of a backward pass that steps each parameter as soon as it has its gradient."""
    apply, optimizer = need(surface, "apply_optimizer_in_backward", CLASSES[task.optimizer])
    params, _ = parameters_of(work, device)
    gradients = [numbers.to(device) for numbers in _tables(work, 1)]
    for param in params:
        param.grad = None
    apply(optimizer, params, options_of(task.optimizer))
    outputs: list[Tensor] = []

    def prepare() -> None:
        outputs[:] = [param.view_as(param) for param in params]

    def run() -> None:
        torch.autograd.backward(outputs, gradients)

    return Job(run=run, results=lambda: {"weights": flat(params)}, prepare=prepare)


def init_state(surface: Any, task: Task, work: Dense, device: str) -> Job:
    """Return a job of `init_state` of a fresh keyed optimizer."""
    need(surface, "KeyedOptimizerWrapper")
    fresh: list[Any] = []

    def prepare() -> None:
        params, _ = parameters_of(work, device)
        for param in params:
            param.grad = None
        fresh[:] = [keyed(surface, named(params))]

    def results() -> dict[str, Tensor]:
        entries = fresh[0].state_dict()["state"].values() if fresh else ()
        return {"entries": torch.tensor([float(len(entry)) for entry in entries]).sum()[None]}

    return Job(run=lambda: fresh[0].init_state(), results=results, prepare=prepare)


def _optimizer_tasks(optimizer: str) -> tuple[Task, ...]:
    name = CLASSES[optimizer]

    def moved(work: Any) -> int:
        return dense_step_bytes(optimizer, work)

    def with_norm(work: Any) -> int:  # the norm reads the gradients once more
        return moved(work) + FLOAT * int(work.numbers())

    def window(work: Any) -> int:  # every step but the last reads a gradient, and reads and writes the sum
        return moved(work) + (WINDOW - 1) * 3 * FLOAT * int(work.numbers())

    def task(kind: str, about: str, maker: Any, moved: Callable[[Any], int] = moved) -> Task:
        return Task(f"{kind}-{optimizer}", about, "dense", moved, maker, optimizer)

    made = [
        task("step", f"{name}.step", step),
        task("in_backward", f"a backward in which {name} updates each parameter", in_backward),
        *(
            task(
                f"step_clipped-{mode}", f"clip by {mode}, then {name}.step", partial(around_own, mode), bytes_
            )
            for mode, bytes_ in (("norm", with_norm), ("value", moved))
        ),
        task("step_warmed_up", f"{name}.step with a learning-rate schedule", partial(around_own, "warmup")),
    ]
    if optimizer in ACCUMULATING:
        about = f"{WINDOW} steps, one update, {ACCUMULATING[optimizer]}"
        made.append(task("step_accumulate", about, accumulate, window))
    return tuple(made)


def _wrapper_task(name: str) -> Task:
    def moved(work: Any) -> int:
        if name.startswith("clip_norm"):
            return int(work.clip_adam_bytes())
        steps = LOCAL_STEPS if name == "semi_sync" else 1
        return steps * dense_step_bytes("adam", work)

    return Task(
        name=f"step_{name}",
        about=f"step of Adam in {name}" + (", up to a global step" if name == "semi_sync" else ""),
        kind="dense",
        moved=moved,
        maker=lambda surface, task, work, device: wrapper_step(name, surface, work, device),
    )


TASKS = (
    *(task for optimizer in STATE for task in _optimizer_tasks(optimizer)),
    *(_wrapper_task(name) for name in WRAPPERS if name != "clip_norm"),  # is the next task
    Task(
        name="clip-adam",
        about="clip by norm, then step with Adam",
        kind="dense",
        moved=Dense.clip_adam_bytes,
        maker=lambda surface, task, work, device: wrapper_step("clip_norm", surface, work, device),
    ),
    Task(
        name="init_state",
        about="init_state of a fresh keyed optimizer",
        kind="dense",
        moved=lambda work: 2 * 4 * work.numbers(),
        maker=init_state,
    ),
)
