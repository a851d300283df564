"""Whole steps of embedding modules with the Triton kernels: what stops them, and what they never wait for.

They run in Triton's interpreter, in a process of its own, of which this file is the script. There the kernels
are as on CUDA, where bad lookups set the error flag on the device; that the host asks for it at once is left
out.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sampling import chosen
from torch import optim
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode,
)
from torch.utils._pytree import tree_leaves
from triton_process import hand_over, outcomes, run_alone

CPU = torch.device("cpu")
#: Operators that synchronize.
SYNCHRONIZING = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "equal", "is_nonzero", "item")
#: What launches nothing: memory, views, and what is put together on the host.
FREE = ("empty", "new_empty", "detach", "slice", "select", "view", "expand", "lift_fresh")
BAD = {
    "too_large": ([1, 2, 20], [0, 1, 3]),
    "negative": ([1, -1, 3], [0, 1, 3]),
    "falling": ([1, 2, 3], [0, 3, 1, 3]),
    "late": ([1, 2, 3], [1, 2, 3]),
    "short": ([1, 2, 3], [0, 1, 2]),
    "far": ([1, 2, 3], [0, 2**40, 3]),
}


class NoSynchronization(TorchDispatchMode):
    """Fail on every operator that synchronizes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        assert not any(one in name for one in SYNCHRONIZING), f"{name} synchronizes"
        if "index" in name:
            indices = [one for arg in args if isinstance(arg, (list, tuple)) for one in arg]
            assert all(getattr(one, "dtype", None) is not torch.bool for one in indices), f"{name} by a mask"
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        read = torch.Tensor.tolist

        def listed(tensor: torch.Tensor) -> Any:  # which is no operator on the CPU
            assert not isinstance(_get_current_dispatch_mode(), NoSynchronization), "tolist synchronizes"
            return read(tensor)

        self._patch = patch.object(torch.Tensor, "tolist", listed)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._patch.stop()
        super().__exit__(*error)


def modules(pools: bool, algorithm: Any = optim.Adam, **options: Any) -> Any:
    from keyedopt.fused import embedding as fused

    config: Any = fused.EmbeddingBagConfig if pools else fused.EmbeddingConfig
    tables = [config(10, 4, name="t", feature_names=["f"]), config(20, 8, name="u", feature_names=["g", "h"])]
    torch.manual_seed(0)
    kind = fused.EmbeddingBagCollection if pools else fused.EmbeddingCollection
    return kind(tables, algorithm, {"lr": 0.1}, **{"backend": "triton", **options})


def features(**changed: Any) -> dict[str, Any]:
    given = {name: ([1, 2, 3], [0, 1, 3]) for name in ("f", "g", "h")} | changed
    return {name: (torch.tensor(values), torch.tensor(offsets)) for name, (values, offsets) in given.items()}


def train(module: Any, given: Any) -> None:
    sum(out.sum() for out in module(given).values()).backward()


def copies(module: Any) -> dict[str, torch.Tensor]:
    """Copy tables and states where they are: `state_dict` would ask for errors."""
    found = dict(module.named_parameters())
    for entry in module.fused_optimizer.state.values():
        found |= entry
    return {name: value.detach().clone() for name, value in found.items()}


def asks_later() -> Any:
    """Leave the error flag alone until someone reads it, as on CUDA."""
    from keyedopt.fused.backends.triton import device_flags

    return patch.object(device_flags, "send_flag", lambda device: None)


def counts_on_device() -> Any:
    """Have the kernels count steps, as on CUDA."""
    from keyedopt.fused.backends.triton import TritonBackend

    return patch.object(TritonBackend, "counts_steps", lambda backend, device: True)


def refusal(call: Callable[[], Any]) -> str:
    """Return with what a call is refused; empty where it is not."""
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def case_error_flag(pools: bool, name: str) -> None:
    """After a bad lookup nothing is written any more, until the host has asked what was wrong."""
    module = modules(pools)
    train(module, features())
    with asks_later(), counts_on_device():
        before = copies(module)
        train(module, features(g=BAD[name]))
        train(module, features())  # and what is right is not done either
        after = copies(module)
        assert all(torch.equal(before[key], after[key]) for key in before)
        what = "row numbers" if name in ("too_large", "negative") else "offsets"
        assert what in refusal(module.check if pools else module.fused_optimizer.state_dict)
        module.check()  # only once
        train(module, features())
        other = modules(pools)
        train(other, features())
        train(other, features())
        right = copies(other)
        assert all(torch.equal(right[key], value) for key, value in copies(module).items())


def case_strict(pools: bool) -> None:
    """Asked for, the error comes from the forward itself, and names the feature."""
    module = modules(pools, strict=True)
    with asks_later():
        for bad in BAD.values():
            assert "feature 'g'" in refusal(lambda bad=bad: module(features(g=bad)))
        module(features())
        module.check()


def case_no_synchronization(algorithm: str) -> None:
    """Forward, backward and update do not synchronize, also in the first step and at a new learning rate."""
    from triton.runtime import interpreter

    from keyedopt import fused
    from keyedopt.fused.backends.triton import launch

    module = modules(True, getattr(fused, algorithm))
    stages = [fused.WarmupStage(fused.WarmupPolicy.LINEAR, 4, value=0.1)]
    optimizer = fused.WarmupOptimizer(module.fused_optimizer, stages, lr=0.1)
    call = interpreter.GridExecutor.__call__
    seen: list[list[int]] = []

    def quiet(this: Any, *args: Any, **named: Any) -> Any:
        if this.fn.__name__ == "update":  # tables, states and the error flag stay where they are
            seen.append([args[0].data_ptr(), *module_pointers(module)])
        with _disable_current_modes():  # how the interpreter itself works
            return call(this, *args, **named)

    assert launch.update
    with asks_later(), counts_on_device(), patch.object(interpreter.GridExecutor, "__call__", quiet):
        for _ in range(3):  # the first step too
            given = features()
            with NoSynchronization():
                train(module, given)
            optimizer.step()  # the iteration of a schedule is on the CPU, wherever the tables are
    assert len(seen) == 3
    assert seen[0] == seen[1] == seen[2]


class Launches(TorchDispatchMode):
    """Notes the operators that would launch something on CUDA."""

    def __init__(self, noted: list[str]) -> None:
        super().__init__()
        self._noted = noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if name not in FREE and any(one.numel() for one in tensors):
            self._noted.append(name)
        return func(*args, **(kwargs or {}))


def case_launches(algorithm: str) -> None:
    """From indices to updated rows and counts of steps, all that is launched, with a long run."""
    from triton.runtime import interpreter

    from keyedopt import fused

    given = features(g=([1] * 600 + [2, 3], [0, 600, 602]))
    call, launched, results = interpreter.GridExecutor.__call__, [], []

    def counted(this: Any, *args: Any, **named: Any) -> Any:
        launched.append(this.fn.__name__)
        with _disable_current_modes():
            return call(this, *args, **named)

    for on_cuda in (True, False):
        module = modules(True, getattr(fused, algorithm))
        grads = [torch.ones_like(output) for output in module(given).values()]
        here: tuple[Any, ...] = (asks_later(), counts_on_device()) if on_cuda else ()
        with ExitStack() as stack:
            for one in here:
                stack.enter_context(one)
            for _ in range(2):
                launched.clear()
                watch = (Launches(launched), patch.object(interpreter.GridExecutor, "__call__", counted))
                with watch[0], watch[1]:
                    torch.autograd.backward(list(module(given).values()), grads)
        results.append((launched[:], list(copies(module).values())))
    sort = ["write_keys", "radix_pass", "find_runs"]  # where keys have more digits, two passes more
    assert results[0][0] == [*sort, "pool", "sum_chunks", "update"]
    assert all(map(torch.equal, results[0][1], results[1][1]))


def case_clipping(joint: bool) -> None:
    """Clip by a norm of all, and step: from indices to updated tables nothing is known of the device.

    Of the norm, the factor and the dense step `test_no_synchronization` shows the same: on the CPU they look.
    """
    from triton.runtime import interpreter

    from keyedopt import fused
    from keyedopt.fused import clipping
    from keyedopt.fused.dense import norms, scaling
    from keyedopt.fused.embedding import backward_clip

    def unseen(function: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **named)

        return call

    results = []
    for quiet in (True, False):
        module = modules(True, fused.Adam)
        dense = torch.nn.Parameter(torch.ones(3, 4))
        optimizer: Any = module.fused_optimizer
        if joint:
            inner = fused.KeyedOptimizerWrapper({"w": dense}, lambda listed: fused.Adam(listed, lr=0.1))
            optimizer = fused.CombinedOptimizer([optimizer, inner])
        stages = [fused.WarmupStage(fused.WarmupPolicy.LINEAR, 4, value=0.1)]
        clipped = fused.GradientClippingOptimizer(optimizer, fused.GradientClipping.NORM, 0.5)
        scheduled = fused.WarmupOptimizer(clipped, stages, lr=0.1)
        patches = [
            patch.object(
                interpreter.GridExecutor, "__call__", unseen_call(interpreter.GridExecutor.__call__)
            ),
            patch.object(fused.GradientClippingOptimizer, "_norm", staticmethod(unseen(norms.p_norm))),
            patch.object(backward_clip, "p_norm", unseen(norms.p_norm)),
            *(
                patch.object(where, "scale_all", unseen(scaling.scale_all))
                for where in (clipping, backward_clip)
            ),
            *(
                patch.object(clipping, fold, unseen(getattr(clipping, fold)))
                for fold in ("clip_norm_in_step", "clip_value_in_step")
            ),
            patch.object(fused.Adam, "step", unseen(fused.Adam.step)),
            patch.object(fused.WarmupOptimizer, "_move_to", unseen(fused.WarmupOptimizer._move_to)),
            patch.object(fused.WarmupOptimizer, "_iteration", unseen(fused.WarmupOptimizer._iteration)),
        ]
        with ExitStack() as stack:
            for one in (asks_later(), counts_on_device(), *patches) if quiet else ():
                stack.enter_context(one)
            for _ in range(2):
                given = features()
                dense.grad = torch.ones(3, 4)
                with NoSynchronization() if quiet else nullcontext():
                    for _ in range(2 if joint else 1):  # deferred gradients add up
                        train(module, given)
                    scheduled.step()
        results.append([*copies(module).values(), dense.detach(), clipped.last_total_grad_norm])
        assert float(clipped.last_total_grad_norm) > 0.5
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    reference = modules(True, fused.Adam, backend="torch")
    other = fused.GradientClippingOptimizer(reference.fused_optimizer, fused.GradientClipping.NORM, 0.5)
    if not joint:
        other = fused.WarmupOptimizer(other, stages, lr=0.1)
        for _ in range(2):
            train(reference, features())
            other.step()
        for one, right in zip(results[0], copies(reference).values(), strict=False):
            torch.testing.assert_close(one, right, rtol=1e-6, atol=1e-6)


def case_counts_are_known(clips: bool) -> None:
    """No step reads the step counts from the device, also if no kernel but an operator of torch counts."""
    from keyedopt import fused

    module = modules(True, fused.Adam)
    optimizer: Any = module.fused_optimizer
    if clips:
        optimizer = fused.GradientClippingOptimizer(optimizer, fused.GradientClipping.NORM, 0.5)
    with counts_on_device():
        for number in range(1, 4):
            train(module, features())
            optimizer.step()
            for group in module.current_layout().groups:
                known = group._known_counts
                counters = [group.counter(index) for index in known]
                assert [known[index] for index in known] == [(one._version, number) for one in counters]
                assert [one.tolist() for one in counters] == [[number]] * 2


def unseen_call(call: Any) -> Any:
    """Let the interpreter do as it likes."""

    def quiet(this: Any, *args: Any, **named: Any) -> Any:
        with _disable_current_modes():
            return call(this, *args, **named)

    return quiet


def case_saved() -> None:
    """An update is written in place: autograd must not go on with other numbers than it has saved."""
    module = modules(True)
    saved = module.embedding_bags["u"].weight.square().sum()
    train(module, features())
    why = ""
    try:
        saved.backward()
    except RuntimeError as error:
        why = str(error)
    assert "modified by an inplace operation" in why


def module_pointers(module: Any) -> list[int]:
    state = module.fused_optimizer.state.values()
    values = [value for entry in state for value in entry.values()]
    return [tensor.data_ptr() for tensor in (*module.parameters(), *values)]


def case_rate_on_device() -> None:
    """A rate in a tensor is read by the kernel where it is: what a graph replays sees a new one."""
    from keyedopt.fused.backends.interface import Lookup, Step, Table
    from keyedopt.fused.backends.triton import TritonBackend, launch

    rate, count = torch.tensor(0.5), torch.tensor([1])
    table = Table(torch.zeros(4, 4), (torch.zeros(4, 4), torch.zeros(4, 4)))
    lookup = Lookup(0, torch.tensor([1, 2]), grad=torch.ones(2, 4))
    launched: list[Any] = []

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def go(*args: Any, **named: Any) -> None:
                launched.append((self.kernel, grid, args, named))
                self.kernel[grid](*args, **named)

            return go

    with patch.object(launch, "update", Recorded(launch.update)):
        TritonBackend().update([table], [lookup], Step("adam", lr=rate, count=count, eps=0.0))
    first = table.weight.clone()
    table.weight.zero_()
    for state in table.states:
        state.zero_()
    rate.fill_(0.25)
    for kernel, grid, args, named in launched:  # as a graph would
        kernel[grid](*args, **named)
    assert torch.equal(table.weight * 2, first)
    assert first[1, 0] != 0


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for pools in (True, False):
        for name in BAD:
            yield f"error_flag-{name}-{pools}", lambda pools=pools, name=name: case_error_flag(pools, name)
        yield f"strict-{pools}", lambda pools=pools: case_strict(pools)
    for algorithm in ("SGD", "RowWiseAdagrad", "Adam"):
        yield (
            f"no_synchronization-{algorithm}",
            lambda algorithm=algorithm: case_no_synchronization(algorithm),
        )
    for joint in (False, True):
        yield f"clipping-{joint}", lambda joint=joint: case_clipping(joint)
    for algorithm in ("SGD", "Adam"):
        yield f"launches-{algorithm}", lambda algorithm=algorithm: case_launches(algorithm)
    yield "rate_on_device", case_rate_on_device
    yield "saved", case_saved
    for clips in (False, True):
        yield f"counts_are_known-{clips}", lambda clips=clips: case_counts_are_known(clips)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_alone(tmp_path_factory, __file__, *chosen(request, "name"))


@pytest.mark.complete(sample=2)
@pytest.mark.parametrize("name", [name for name, _ in cases()])
def test_steps(found: dict[str, str], name: str) -> None:
    assert not found[name], found[name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    hand_over(outcomes((name, case) for name, case in cases() if name in sys.argv))
