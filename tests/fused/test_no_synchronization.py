"""Clip, schedule and step on CUDA without synchronizing, tested without a GPU.

Fake tensors on CUDA have no memory: reading a number raises an error where the host would synchronize on a
GPU. `test_triton_steps` does the same for tables, with kernels that run.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from keyedopt import fused, reference
from keyedopt.fused.dense.fused_kernels import PLAIN
from keyedopt.fused.dense.scaling import scale_all
from keyedopt.fused.embedding.backward_clip import BackwardClip

ALGORITHMS = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "PartialRowWiseAdam", "LAMB", "LarsSGD")
SHAPE = (40, 8)


@contextmanager
def on_cuda() -> Iterator[None]:
    """Give tensors on CUDA no memory; the iteration of a schedule is on the CPU, wherever all else is."""
    move = fused.WarmupOptimizer._move_to
    read = fused.WarmupOptimizer._iteration

    def moved(self, iteration):
        with _disable_current_modes():
            assert self._progress().is_cpu
            move(self, iteration)

    def asked(self):
        with _disable_current_modes():
            return read(self)

    with (
        patch.object(fused.WarmupOptimizer, "_move_to", moved),
        patch.object(fused.WarmupOptimizer, "_iteration", asked),
        FakeTensorMode(allow_non_fake_inputs=True),
    ):
        yield


def parameters(count):
    return {str(number): torch.nn.Parameter(torch.empty(SHAPE, device="cuda")) for number in range(count)}


def wrapped(params, factory):
    inner = fused.KeyedOptimizerWrapper(params, factory)
    stages = [fused.WarmupStage(fused.WarmupPolicy.LINEAR, 4, value=0.1)]
    with _disable_current_modes():
        return fused.WarmupOptimizer(inner, stages, lr=0.1)


def step(optimizer, params):
    for _ in range(3):  # the first step too
        for param in params.values():
            param.grad = torch.empty_like(param)
        optimizer.step()


class Passes(TorchDispatchMode):
    """Notes which operators are given whole parameters, or gradients, or states."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        name = func.overloadpacket.__name__
        if any(one.shape == SHAPE for one in tensors) and name not in ("device", "detach"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def test_asking_for_a_number_is_noticed():
    with on_cuda(), pytest.raises(DataDependentOutputException):
        torch.empty(1, device="cuda").item()


@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_clip_schedule_and_step(algorithm, kind):
    with on_cuda():
        params = parameters(3)
        inner = wrapped(params, lambda listed: getattr(fused, algorithm)(listed, lr=0.1))
        clipping = fused.GradientClipping[kind]
        optimizer = fused.GradientClippingOptimizer(inner, clipping, 1.0, track_grad_norm=True)
        step(optimizer, params)
        assert optimizer.last_total_grad_norm.device.type == "cuda"


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_every_norm(norm_type):
    with on_cuda():
        params = parameters(1)
        inner = wrapped(params, lambda listed: fused.Adam(listed, lr=0.1))
        step(fused.GradientClippingOptimizer(inner, fused.GradientClipping.NORM, 1.0, norm_type), params)


def test_a_rate_on_the_device():
    with on_cuda():
        params = parameters(2)
        inner = fused.KeyedOptimizerWrapper(params, lambda listed: fused.Adam(listed, lr=0.1))
        inner.param_groups[0]["lr"] = torch.empty((), device="cuda")
        step(fused.GradientClippingOptimizer(inner, fused.GradientClipping.NORM, 1.0), params)


@pytest.mark.parametrize("library", [fused, torch.optim], ids=lambda library: library.__name__)
def test_the_factor_is_a_part_of_the_step(library):
    options = {"fused": True} if library is torch.optim else {}
    with ExitStack() as stack:
        stack.enter_context(on_cuda())  # where all are of another type
        stack.enter_context(patch("keyedopt.fused.dense.fused_clipping._is_ordinary", lambda *_: True))
        stack.enter_context(patch("keyedopt.fused.dense.fused_kernels.PLAIN", (*PLAIN, FakeTensor)))
        params = parameters(2)
        inner = wrapped(params, lambda listed: library.Adam(listed, lr=0.1, **options))
        optimizer = fused.GradientClippingOptimizer(inner, fused.GradientClipping.NORM, 1.0)
        with patch("keyedopt.fused.clipping.scale_all") as scaled:
            step(optimizer, params)
            with Passes() as passes:
                optimizer.step()
        assert passes.names == ["_foreach_norm", "_fused_adam_"]  # of memory, whatever is clipped
        assert not scaled.called  # the step scales the gradients as it reads them


@pytest.mark.parametrize("algorithm", ["SGD", "Adagrad", "Adam"])
def test_the_factor_of_a_mixed_tree_is_a_part_of_the_dense_step(algorithm):
    """Gradients of tables are scaled where they wait; those of dense parameters as the step reads them."""
    trained = []
    for library in (fused, reference):
        bags = library.EmbeddingBagConfig(
            6, 4, "t", torch.float32, ["f"], init_fn=lambda weight: weight.detach().fill_(0.5)
        )
        module = library.EmbeddingBagCollection([bags], getattr(library, algorithm), {"lr": 0.1})
        layer = torch.nn.Parameter(torch.full((4, 3), 2.0))
        dense = library.KeyedOptimizerWrapper(
            {"layer": layer}, lambda listed, made=library: getattr(made, algorithm)(listed, lr=0.1)
        )
        both = library.CombinedOptimizer([("tables", module.fused_optimizer), ("dense", dense)])
        optimizer = library.GradientClippingOptimizer(both, library.GradientClipping.NORM, 1.0)
        for _ in range(3):
            output = module({"f": (torch.tensor([1, 1, 3]), torch.tensor([0, 2, 3]))})["f"]
            layer.grad = None
            (output @ layer).square().sum().backward()
            given = layer.grad.clone()
            if library is reference:
                optimizer.step()
                continue
            with (
                patch("keyedopt.fused.clipping.scale_all") as outside,
                patch("keyedopt.fused.embedding.backward_clip.scale_all", side_effect=scale_all) as scaled,
            ):
                optimizer.step()
            assert not outside.called
            ((table,),) = [call.args[0] for call in scaled.call_args_list]
            assert table.shape == (2, 4)  # the rows that were looked up
            assert torch.equal(layer.grad, given)
        trained.append([layer.detach(), *(one.detach() for one in module.parameters())])
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert (trained[0][0] < 2).all()


@pytest.mark.parametrize("kind", ["norm", "value", "none"])
def test_gradients_of_tables(kind):
    with on_cuda():
        clip = BackwardClip(kind, 0.5, measure=True)
        clip.apply([torch.empty(9, 8, device="cuda"), torch.empty(0, 4, device="cuda")])
        assert clip.last_norm.device.type == "cuda"
