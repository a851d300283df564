"""Checks that need a GPU: no synchronization in a step, CUDA graphs, streams, first steps.

``python -m keyedopt.benchmarks.gpu.checks [--implementation TARGET] [--output FILE]`` prints one line per
check, of public names. The exit code is 0 if all held, 1 if one failed, 2 without a GPU or the target.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from keyedopt.benchmarks.timing import Budget, Job, clock_of, measure, ratio
from keyedopt.conformance.targets.find import find
from keyedopt.conformance.targets.implementation import TargetError

ROWS, WIDTH, BAGS, LENGTH = 5000, 64, 512, 8
#: The environment variable that makes `keyedopt.fused` sort indices in a stream beside the forward pass.
OVERLAP = "KEYEDOPT_OVERLAP"
ALGORITHMS = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "PartialRowWiseAdam", "LAMB", "LarsSGD")


class NotOfferedError(Exception):
    """The implementation does not offer what is checked; the message says why."""


def tables(
    surface: Any,
    algorithm: str,
    device: str,
    dtype: torch.dtype = torch.float32,
    options: Mapping[str, Any] | None = None,
    **more: Any,
) -> Any:
    """Return a module with two tables of different width and always the same numbers."""

    def fill(weight: Tensor) -> None:
        numbers = torch.Generator().manual_seed(weight.shape[1])
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=numbers))

    configs = [
        surface.EmbeddingBagConfig(ROWS, width, name, dtype, [name], init_fn=fill)
        for name, width in (("narrow", WIDTH), ("wide", 2 * WIDTH))
    ]
    kind = getattr(surface, algorithm)
    given = {"lr": 0.01, **(options or {})}
    return surface.EmbeddingBagCollection(configs, kind, given, device=torch.device(device), **more)


def features(device: str, seed: int = 0, bags: int = BAGS) -> dict[str, tuple[Tensor, Tensor]]:
    """Return lookups for both tables, with many duplicates of low row numbers."""
    numbers = torch.Generator().manual_seed(seed)
    offsets = torch.arange(0, bags * LENGTH + 1, LENGTH)
    made = {}
    for name in ("narrow", "wide"):
        spread = torch.rand(bags * LENGTH, generator=numbers) ** 4 * ROWS
        made[name] = (spread.long().clamp(max=ROWS - 1).to(device), offsets.to(device))
    return made


def step(module: nn.Module, given: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Run the forward and the backward pass, which updates the tables."""
    outputs = module(given)
    torch.autograd.backward([output.square().sum() for output in outputs.values()])


def contents(module: Any) -> list[Tensor]:
    """Return copies of all tables and their state tensors."""
    found = list(module.parameters())
    for entry in module.fused_optimizer.state_dict()["state"].values():
        found += [value for value in entry.values() if isinstance(value, Tensor)]
    return [tensor.detach().clone() for tensor in found]


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Return whether tensors have the same bits."""
    pairs = list(zip(one, other, strict=True))
    return all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)) for a, b in pairs
    )


def first_step_equals_a_warm_one(surface: Any, algorithm: str, device: str) -> str:
    """Step two equal modules, the second after everything was compiled; return a fault or an empty text."""
    modules = [tables(surface, algorithm, device) for _ in range(2)]
    found = []
    for module in modules:
        step(module, features(device))
        found.append(contents(module))
    return "" if same(*found) else "the first step gave other bits than the same step later"


def no_synchronization(surface: Any, algorithm: str, device: str) -> str:
    """Step while torch raises at every synchronization; return a fault or an empty text."""
    module, given = tables(surface, algorithm, device), features(device)
    for _ in range(3):
        step(module, given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(module, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def no_synchronization_of_dense(surface: Any, algorithm: str, device: str) -> str:
    """Clip by norm and step dense parameters while torch raises at every synchronization."""
    params = {str(number): nn.Parameter(torch.ones(1000, 100, device=device)) for number in range(3)}
    inner = surface.KeyedOptimizerWrapper(params, lambda listed: getattr(surface, algorithm)(listed, lr=0.01))
    optimizer = surface.GradientClippingOptimizer(inner, surface.GradientClipping.NORM, 1.0)
    for number in range(4):
        for param in params.values():
            param.grad = torch.full_like(param, 0.5)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if number == 3 else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return ""


class Whole:
    """A model of tables and a dense layer whose gradients are clipped by one joint norm.

    Args:
        surface, algorithm, device: as for `tables`; the dense layer uses the same algorithm.
    """

    def __init__(self, surface: Any, algorithm: str, device: str) -> None:
        self.module = tables(surface, algorithm, device)
        numbers = torch.Generator().manual_seed(0)
        self.layer = nn.Parameter(torch.randn(3 * WIDTH, 8, generator=numbers).to(device))
        dense = surface.KeyedOptimizerWrapper(
            {"layer": self.layer}, lambda listed: getattr(surface, algorithm)(listed, lr=0.01)
        )
        both = surface.CombinedOptimizer([("tables", self.module.fused_optimizer), ("dense", dense)])
        self.optimizer = surface.GradientClippingOptimizer(both, surface.GradientClipping.NORM, 1.0)

    def step(self, given: dict[str, tuple[Tensor, Tensor]]) -> None:
        """Run the forward and the backward pass, clip, and step."""
        outputs = self.module(given)
        torch.autograd.backward((torch.cat(list(outputs.values()), dim=1) @ self.layer).square().sum())
        self.optimizer.step()
        self.layer.grad = None

    def contents(self) -> list[Tensor]:
        """Return copies of all parameters and their state."""
        state = self.optimizer.state_dict()["state"].get("dense.layer", {})
        kept = [self.layer, *(state[name] for name in sorted(state) if isinstance(state[name], Tensor))]
        return contents(self.module) + [tensor.detach().clone() for tensor in kept]


def first_whole_step_equals_a_warm_one(surface: Any, algorithm: str, device: str) -> str:
    """Step two equal models, the second after everything was compiled; return a fault or an empty text."""
    models = [Whole(surface, algorithm, device) for _ in range(2)]
    for model in models:
        model.step(features(device))
    pair = [model.contents() for model in models]
    return "" if same(*pair) else "the first step gave other bits than the same step later"


def no_synchronization_of_a_whole_step(surface: Any, algorithm: str, device: str) -> str:
    """Step tables and a dense layer under one norm while torch raises at every synchronization."""
    model, given = Whole(surface, algorithm, device), features(device)
    for _ in range(3):
        model.step(given)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model.step(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def graph_replays_to_the_same_bits(surface: Any, algorithm: str, device: str) -> str:
    """Compare steps replayed from a CUDA graph with a twin's eager steps; return a fault or an empty text."""
    module, twin = tables(surface, algorithm, device), tables(surface, algorithm, device)
    _replay(lambda given: step(module, given), lambda given: step(twin, given), device)
    return "" if same(contents(module), contents(twin)) else "replayed steps gave other bits than plain ones"


def graph_of_a_whole_step(surface: Any, algorithm: str, device: str) -> str:
    """Do the same as `graph_replays_to_the_same_bits`, with a dense layer under one norm."""
    model, twin = (Whole(surface, algorithm, device) for _ in range(2))
    _replay(model.step, twin.step, device)
    return "" if same(model.contents(), twin.contents()) else "replayed steps gave other bits than plain ones"


def _replay(one: Callable[[Any], None], twin: Callable[[Any], None], device: str) -> None:
    """Step both five times on the same lookups; the last two steps of `one` are replayed from a graph."""
    given = features(device)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            one(given)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # a capture runs nothing
        one(given)
    for seed in (1, 2):
        for name, (values, _) in features(device, seed).items():
            given[name][0].copy_(values)
        graph.replay()
    for seed in (0, 0, 0, 1, 2):
        twin(features(device, seed))
    torch.cuda.synchronize()


@contextmanager
def elsewhere(device: str) -> Iterator[None]:
    """Run the body in another stream, ordered after the work before it and before the work after it."""
    if device == "cpu":
        yield
        return
    other, here = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
    other.wait_stream(here)
    with torch.cuda.stream(other):
        yield
    here.wait_stream(other)


@contextmanager
def overlapping(asked: str) -> Iterator[None]:
    """Set `OVERLAP`: "1" sorts beside the forward pass, "0" within it."""
    before = os.environ.get(OVERLAP)
    os.environ[OVERLAP] = asked
    try:
        yield
    finally:
        os.environ.pop(OVERLAP)
        os.environ |= {} if before is None else {OVERLAP: before}


@contextmanager
def short_of_memory(device: str) -> Iterator[None]:
    """Limit the free memory, so that freed memory is soon reused."""
    if device == "cpu":
        yield
        return
    torch.cuda.empty_cache()
    least = torch.cuda.memory_reserved() + (1 << 28)
    torch.cuda.set_per_process_memory_fraction(least / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def overlapped_sort_gives_the_same_bits(surface: Any, algorithm: str, device: str) -> str:
    """Compare steps that sort beside the forward pass with steps that sort within it.

    Some forward or backward passes run in another stream, and some forward passes are never used. Lookups are
    freed at once, and their memory is reused for numbers that are not row numbers.
    """
    modules = [tables(surface, algorithm, device) for _ in range(2)]
    bags = BAGS if device == "cpu" else 64 * BAGS
    for module, asked in zip(modules, "10", strict=True):
        with overlapping(asked), short_of_memory(device):
            for seed in range(9):
                for dropped in (True, True, False) if asked == "1" else (False,):
                    with elsewhere(device) if seed % 3 == 1 else nullcontext():
                        outputs = module(features(device, seed + 100 * dropped, bags))
                    for _ in range(4):
                        torch.full((bags * LENGTH,), -1, device=device)
                losses = [output.square().sum() for output in outputs.values()]
                with elsewhere(device) if seed % 3 == 2 else nullcontext():
                    torch.autograd.backward(losses)
        getattr(module, "check", lambda: None)()
    found = [contents(module) for module in modules]
    return "" if same(*found) else "with the sort beside the forward there are other bits than without"


def time_without_overlap(surface: Any, device: str, bags: int, budget: Budget = Budget()) -> str:  # noqa: B008 - frozen
    """Return how many times as long a step with dense layers takes if it sorts within the forward pass."""
    module, given = tables(surface, "RowWiseAdagrad", device), features(device, 0, bags)
    layers = [torch.ones(width, 1024, device=device) for width in (3 * WIDTH, 1024, 1024)]

    def run(asked: str) -> None:
        with overlapping(asked):
            found = torch.cat(list(module(given).values()), dim=1)
            for layer in layers:
                found = found @ layer
            torch.autograd.backward(found.mean())

    beside, within = (Job(partial(run, asked), dict) for asked in "10")
    found = ratio(*measure(clock_of(device), beside, within, budget))
    return f"{bags} bags: {found.value:.2f} times as long without ({found.low:.2f} to {found.high:.2f})"


def fbgemm_follows_the_reference(surface: Any, algorithm: str, device: str) -> str:
    """Compare steps of the FBGEMM backend with steps of the reference; return a fault or an empty text."""
    other = tables(find("reference").surface(), algorithm, "cpu", options=FBGEMM[algorithm])
    try:
        modules = [tables(surface, algorithm, device, options=FBGEMM[algorithm], backend="fbgemm"), other]
    except (TypeError, RuntimeError) as error:  # no backends, or this one is missing
        raise NotOfferedError(str(error)) from error
    for seed in range(3):
        for module, place in zip(modules, (device, "cpu"), strict=True):
            step(module, features(place, seed))
    pairs = zip(contents(modules[0]), contents(modules[1]), strict=True)
    off = [
        float((one.cpu().double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-3))
        for one, other in pairs
    ]
    return "" if max(off) <= 1e-4 else f"after 3 steps FBGEMM differs by up to {max(off):.1e} of the largest"


#: The options of the FBGEMM check, by algorithm: decay, a norm limit and learning-rate decay if supported.
FBGEMM: dict[str, dict[str, Any]] = {
    "SGD": {},
    "Adagrad": {"eps": 1e-8, "lr_decay": 0.5},
    "RowWiseAdagrad": {"eps": 1e-8, "weight_decay": 0.01, "decay": "decoupled", "max_norm": 8.0},
    "Adam": {"weight_decay": 0.01, "decay": "decoupled"},
    "SparseAdam": {},
    "PartialRowWiseAdam": {"weight_decay": 0.01},
}

Check = Callable[[Any, str, str], str]
#: The checks by name, each with its algorithms.
CHECKS: dict[str, tuple[Check, Sequence[str]]] = {
    "first step": (first_step_equals_a_warm_one, ALGORITHMS),
    "no synchronization": (no_synchronization, ALGORITHMS),
    "no synchronization, clip and step": (no_synchronization_of_dense, ("SGD", "Adagrad", "Adam")),
    "graph": (graph_replays_to_the_same_bits, ALGORITHMS),
    "sort beside the forward": (overlapped_sort_gives_the_same_bits, ("SGD", "RowWiseAdagrad", "Adam")),
    "first step, tables and dense": (first_whole_step_equals_a_warm_one, ("SGD", "Adagrad", "Adam")),
    "no synchronization, tables and dense": (
        no_synchronization_of_a_whole_step,
        ("SGD", "Adagrad", "Adam"),
    ),
    "graph, tables and dense": (graph_of_a_whole_step, ("SGD", "Adagrad", "Adam")),
    "FBGEMM's operators": (fbgemm_follows_the_reference, tuple(FBGEMM)),
}


def run(surface: Any, device: str, names: Sequence[str] = tuple(CHECKS)) -> list[dict[str, str]]:
    """Run checks; an exception fails only its own check.

    Returns:
        ``check``, ``algorithm``, ``outcome`` (held, failed, missing) and ``message`` of each.
    """
    rows = []
    for name in names:
        check, algorithms = CHECKS[name]
        for algorithm in algorithms:
            outcome, message = "missing", f"{algorithm} is not offered"
            if hasattr(surface, algorithm):
                try:
                    message = check(surface, algorithm, device)
                except NotOfferedError as error:
                    rows.append(
                        {"check": name, "algorithm": algorithm, "outcome": outcome, "message": str(error)}
                    )
                    continue
                except Exception as error:  # any exception is the result of this check
                    message = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                outcome = "failed" if message else "held"
            rows.append({"check": name, "algorithm": algorithm, "outcome": outcome, "message": message})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--implementation", default="fused", help="the target; default: fused")
    parser.add_argument("--output", type=Path, help="where to write JSON")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("CUDA: torch cannot use it here; nothing to check", file=sys.stderr)
        return 2
    try:
        surface = find(given.implementation).surface()
    except TargetError as error:
        print(f"{given.implementation}: {error}", file=sys.stderr)
        return 2
    rows = run(surface, "cuda")
    for row in rows:
        print(f"{row['outcome']:8} {row['check']:38} {row['algorithm']:20} {row['message']}".rstrip())
    if given.output:
        report = {"kind": "keyedopt-gpu-checks", "device": torch.cuda.get_device_name(), "checks": rows}
        given.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for bags in (BAGS, 64 * BAGS, 256 * BAGS) if hasattr(surface, "RowWiseAdagrad") else ():
        print(f"time of a step and the sort beside it, {time_without_overlap(surface, 'cuda', bags)}")
    return 1 if any(row["outcome"] == "failed" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
