"""Clipping gradients of every layout, and missing, empty and non-finite gradients."""

import math
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    error_of,
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    p_norm,
)
from keyedopt.conformance.suite.support.clipping import zeros_with_grads
from keyedopt.conformance.suite.support.device import full, tensor, zeros
from keyedopt.conformance.suite.support.doubles import clipping
from keyedopt.conformance.suite.support.inputs import sgd
from keyedopt.conformance.suite.support.torch_optimizers import torch_factory


def zero_params(*shapes: Any) -> dict[str, Any]:
    """Make parameters of these shapes, filled with zeros."""
    return {f"p{index}": torch.nn.Parameter(zeros(shape)) for index, shape in enumerate(shapes)}


def try_step(optimizer: Any, recorder: Any) -> bool:
    """Take a step and return True; if it raises, expect no call of the wrapped optimizer and return False."""
    try:
        optimizer.step()
    except (ValueError, TypeError, RuntimeError):
        expect_equal(recorder.received, [], "gradients handed on by a refused step")
        return False
    return True


@pytest.mark.clause("CLIP-027")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_gradients(impl: Any, kind: str, coalesced: bool) -> None:
    """A sparse gradient is clipped by the sum per row, or the step raises; it is never left unclipped."""
    params = zero_params((4, 2), 2)
    rows = tensor([[3.0, 0.0], [3.0, 0.0], [0.0, 8.0]])
    grad = torch.sparse_coo_tensor(tensor([[1, 1, 2]]), rows, (4, 2), check_invariants=False)
    params["p0"].grad = grad.coalesce() if coalesced else grad
    params["p1"].grad = tensor([24.0, 0.0])
    optimizer, recorder = clipping(impl, params, kind, 2.0)
    if not try_step(optimizer, recorder):
        return
    factor = 2.0 / (26.0 + 1e-6)
    big, small = (6.0 * factor, 8.0 * factor) if kind == "NORM" else (2.0, 2.0)
    dense = zeros(4, 2)
    dense[1, 0], dense[2, 1] = big, small
    seen, other = recorder.received[0]
    expect_close(seen.to_dense(), dense, "sparse received gradient")
    expect_close(other, torch.tensor([24.0 * factor if kind == "NORM" else 2.0, 0.0]), "dense gradient")


@pytest.mark.clause("CLIP-028")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_strides(impl: Any, kind: str, layout: str) -> None:
    """A gradient that is not contiguous is clipped like any other, or the step raises."""
    grads = {
        "transposed": tensor([[3.0, 0.0], [4.0, 0.0]]).t(),
        "strided": tensor([3.0, 99.0, 4.0, 99.0, 0.0, 99.0])[::2],
        "expanded": tensor([2.5]).expand(4),
    }
    grad = grads[layout]
    params = zero_params(grad.shape)
    params["p0"].grad = grad
    before = grad.clone()
    optimizer, recorder = clipping(impl, params, kind, 1.0)
    if not try_step(optimizer, recorder):
        return
    wanted = before / (5.0 + 1e-6) if kind == "NORM" else before.clamp(-1.0, 1.0)
    expect_close(recorder.received[0][0], wanted, "received gradient")


@pytest.mark.clause("CLIP-028")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_expanded_dimensions(impl: Any, kind: str) -> None:
    """Gradients that are expanded in the first dimension or in the last are all clipped, or all raise."""
    clipped = []
    for grad in (tensor([3.0, 4.0]).expand(2, 2), tensor([[3.0], [4.0]]).expand(2, 2)):
        params = zero_params((2, 2))
        params["p0"].grad = grad
        wanted = grad / (50**0.5 + 1e-6) if kind == "NORM" else grad.clamp(-1.0, 1.0)
        optimizer, recorder = clipping(impl, params, kind, 1.0)
        clipped.append(try_step(optimizer, recorder))
        if clipped[-1]:
            expect_close(recorder.received[0][0], wanted, "received gradient")
    expect_equal(clipped, clipped[:1] * 2, "whether it is clipped, by the dimension that is expanded")


@pytest.mark.clause("CLIP-029")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf], ids=["2", "inf"])
@pytest.mark.parametrize("where", ["first", "last"])
def test_missing_gradients(impl: Any, kind: str, norm_type: float, where: str) -> None:
    """A parameter without a gradient still has none, and the others are clipped."""
    params = zero_params(2, 2) if where == "last" else dict(reversed(zero_params(2, 2).items()))
    params["p0"].grad = tensor([30.0, 40.0])
    optimizer, recorder = clipping(impl, params, kind, 1.0, norm_type=norm_type)
    optimizer.step()
    received = dict(zip(params, recorder.received[0], strict=True))
    expect(received["p1"] is None, "no gradient", received["p1"])
    wanted = {
        "NORM": [30.0 / p_norm([30.0, 40.0], norm_type), 40.0 / p_norm([30.0, 40.0], norm_type)],
        "VALUE": [1.0, 1.0],
        "NONE": [30.0, 40.0],
    }[kind]
    expect_close(received["p0"], torch.tensor(wanted), "received gradient")


@pytest.mark.clause("CLIP-030")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf], ids=["1", "2", "inf"])
@pytest.mark.parametrize("track", [False, True])
def test_empty_gradients(impl: Any, kind: str, norm_type: float, track: bool) -> None:
    """A gradient without elements raises no error, for any norm."""
    params = zero_params(0, 2)
    params["p0"].grad = zeros(0)
    params["p1"].grad = tensor([0.0, 40.0])
    optimizer, recorder = clipping(impl, params, kind, 1.0, norm_type=norm_type, track_grad_norm=track)
    optimizer.step()
    wanted = tensor([0.0, 40.0 if kind == "NONE" else 1.0])
    expect_close(recorder.received[0][1], wanted, "received gradient")


@pytest.mark.clause("CLIP-031")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf], ids=["2", "inf"])
@pytest.mark.parametrize("track", [False, True])
def test_no_gradient_at_all(impl: Any, kind: str, norm_type: float, track: bool) -> None:
    """A step without any gradient succeeds, as it does without clipping."""
    params = zero_params(2, 2)
    optimizer, recorder = clipping(impl, params, kind, 1.0, norm_type=norm_type, track_grad_norm=track)
    optimizer.step()
    expect_equal(recorder.received, [[None, None]], "received gradients")


@pytest.mark.clause("CLIP-032")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_frozen_parameters(impl: Any, kind: str) -> None:
    """A frozen parameter does not affect the others; a gradient that it still has is clipped."""
    params = zero_params(2, 2, 2)
    params["p0"].requires_grad_(False)
    params["p1"].grad = tensor([0.0, 40.0])
    optimizer, recorder = clipping(impl, params, kind, 1.0)
    optimizer.step()
    expect_close(recorder.received[0][1], torch.tensor([0.0, 1.0]), "received gradient")
    params["p1"].grad, params["p2"].grad = tensor([0.0, 4.0]), tensor([3.0, 0.0])
    params["p2"].requires_grad_(False)
    optimizer.step()
    wanted = tensor([0.0, 0.8, 0.6, 0.0] if kind == "NORM" else [0.0, 1.0, 1.0, 0.0])
    expect_close(torch.cat(recorder.received[1][1:]), wanted, "later received gradients", ulps=16)


@pytest.mark.clause("CLIP-033")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf], ids=["2", "inf"])
def test_nan_is_not_turned_into_a_number(impl: Any, kind: str, norm_type: float) -> None:
    """A NaN gradient reaches the wrapped optimizer as NaN, or the step raises."""
    params = zero_params(3)
    params["p0"].grad = tensor([1.0, math.nan, 2.0])
    optimizer, recorder = clipping(impl, params, kind, 1.0, norm_type=norm_type)
    if try_step(optimizer, recorder):
        seen = recorder.received[0][0]
        expect(seen[1].isnan(), "NaN where the gradient was NaN", seen.tolist())


@pytest.mark.clause("CLIP-034")
@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_what_nonfinite_gradients_become(impl: Any, kind: str, bad: str) -> Any:
    """Observe how one non-finite element affects itself, its neighbours and other gradients."""
    params = zero_params(2, 2)
    params["p0"].grad = tensor([float(bad), 1.0])
    params["p1"].grad = tensor([3.0, 4.0])
    optimizer, recorder = clipping(impl, params, kind, 1.0)
    if not try_step(optimizer, recorder):
        return "refused"
    return [[str(round(element, 4)) for element in seen.tolist()] for seen in recorder.received[0]]


@pytest.mark.clause("CLIP-035")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_in_place(impl: Any, kind: str) -> dict[str, bool]:
    """Observe whether .grad contains the clipped gradient after the step."""
    params = zero_params(2)
    grad = params["p0"].grad = tensor([30.0, 40.0])
    clipping(impl, params, kind, 1.0)[0].step()
    return {
        "grad is clipped": bool((params["p0"].grad.abs() <= 1).all()),
        "grad is the same tensor": params["p0"].grad is grad,
    }


@pytest.mark.clause("CLIP-036")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_meta_parameters_pass(impl: Any, kind: str) -> None:
    """A step accepts parameters on the meta device, as in a dry run of a model."""
    params = {"p": torch.nn.Parameter(torch.zeros(2, device="meta"))}
    params["p"].grad = torch.zeros(2, device="meta")
    clipping(impl, params, kind, 1.0)[0].step()
    params["p"].grad = None
    clipping(impl, params, kind, 1.0)[0].step()


@pytest.mark.clause("CLIP-037")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_meta_parameters_do_not_switch_clipping_off(impl: Any, kind: str) -> None:
    """A parameter on the meta device does not disable clipping of the others."""
    params = {
        "real": torch.nn.Parameter(zeros(2)),
        "meta": torch.nn.Parameter(torch.zeros(2, device="meta")),
    }
    params["real"].grad = tensor([0.0, 40.0])
    optimizer, recorder = clipping(impl, params, kind, 1.0)
    optimizer.step()
    expect_close(recorder.received[0][0], torch.tensor([0.0, 1.0]), "received gradient")


@pytest.mark.clause("CLIP-038")
@pytest.mark.plain_only("its optimizer is of a class of its own")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_a_parameter_in_two_groups_counts_once(impl: Any, kind: str) -> None:
    """A parameter that is listed in two groups is counted and scaled once."""
    (param,) = zero_params(2).values()
    param.grad = tensor([30.0, 40.0])
    received: list[torch.Tensor] = []

    class Listed(impl.KeyedOptimizer):  # type: ignore[misc]
        def step(self, closure: Any) -> None:
            received.append(param.grad.detach().clone())

        def zero_grad(self, set_to_none: bool = False) -> None:
            param.grad = None

    inner = Listed({"p": param}, {}, [{"params": [param]}, {"params": [param]}])
    optimizer = impl.GradientClippingOptimizer(
        inner, getattr(impl.GradientClipping, kind), 1.0, track_grad_norm=True
    )
    optimizer.step()
    wanted = tensor([0.6, 0.8] if kind == "NORM" else [1.0, 1.0])
    expect_close(received[0], wanted, "received gradient")
    expect_close(optimizer.last_total_grad_norm, 50.0, "norm")


@pytest.mark.clause("CLIP-038")
@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_of_two_parameters_is_scaled_once(impl: Any, fused: bool) -> None:
    """A tensor that is the gradient of two parameters counts for both, and is scaled once."""
    params, shared = zero_params(2, 2), tensor([3.0, 4.0])
    for param in params.values():
        param.grad = shared
    inner = impl.KeyedOptimizerWrapper(params, torch_factory(torch.optim.SGD, lr=1.0, fused=fused))
    impl.GradientClippingOptimizer(inner, impl.GradientClipping.NORM, 1.0).step()
    for key, param in params.items():
        wanted = tensor([-0.6, -0.8]) / math.sqrt(2.0)
        expect_close(param, wanted, f"parameter {key} after a step by the clipped gradient", ulps=32)


@pytest.mark.clause("CLIP-039")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_groups_that_come_later_are_clipped(impl: Any, kind: str) -> None:
    """Parameters that are added to the wrapped optimizer after wrapping are clipped."""
    params = zero_params(1, 1)
    raw: list[torch.optim.SGD] = []

    def factory(listed: Any) -> torch.optim.SGD:
        raw.append(torch.optim.SGD(listed, lr=1.0))
        return raw[0]

    keyed = impl.KeyedOptimizerWrapper({"p0": params["p0"]}, factory)
    optimizer = impl.GradientClippingOptimizer(keyed, getattr(impl.GradientClipping, kind), 1.0)
    params["p0"].grad = tensor([0.0])
    optimizer.step()
    raw[0].add_param_group({"params": [params["p1"]]})  # as when a frozen layer is unfrozen
    params["p0"].grad = tensor([3.0])
    params["p1"].grad = tensor([4.0])
    optimizer.step()
    moved = [-float(param.detach()) for param in params.values()]
    wanted = [0.6, 0.8] if kind == "NORM" else [1.0, 1.0]
    expect_close(torch.tensor(moved), torch.tensor(wanted), "moves of the two parameters")


@pytest.mark.plain_only("it counts groups")
@pytest.mark.clause("CLIP-040")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_add_param_group(impl: Any, kind: str) -> None:
    """A group that is added to the clipping optimizer is clipped, or adding it raises an error."""
    params = zero_params(1, 1)
    optimizer = impl.GradientClippingOptimizer(
        sgd(impl, {"p0": params["p0"]}, lr=1.0), getattr(impl.GradientClipping, kind), 1.0
    )
    if error_of(lambda: optimizer.add_param_group({"params": {"p1": params["p1"]}})):
        expect_equal(len(optimizer.param_groups), 1, "groups after an error")
        return
    params["p1"].grad = tensor([4.0])
    optimizer.step()
    expect_close(params["p1"].detach(), torch.tensor([-1.0]), "the new parameter after a step")


@pytest.mark.clause("CLIP-041")
def test_step_leaves_parameters_and_state_to_the_wrapped_optimizer(impl: Any) -> None:
    """Clipping modifies only gradients."""
    params = zero_params(2)
    params["p0"].grad = tensor([30.0, 40.0])
    before = params["p0"].detach().clone()
    optimizer, _ = clipping(impl, params, "NORM", 1.0)
    optimizer.step()
    expect_bits(params["p0"].detach(), before, "parameter")
    expect_equal(len(optimizer.state), 0, "entries of state")


@pytest.mark.clause("CLIP-005", "CLIP-006")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("at", ["first", "last"])
def test_a_single_number(impl: Any, kind: str, at: str) -> None:
    """A parameter without dimensions, for example a temperature, is clipped like any other."""
    scalar: Any = torch.nn.Parameter(tensor(0.0))
    scalar.grad = tensor(-30.0)
    others = zeros_with_grads([40.0, 0.0])
    params = {"t": scalar, **others} if at == "first" else {**others, "t": scalar}
    optimizer, recorder = clipping(impl, params, kind, 1.0)
    optimizer.step()
    seen = dict(zip(params, recorder.received[0], strict=True))
    factor = 1.0 / (50.0 + 1e-6)
    wanted = [-30.0 * factor, 40.0 * factor] if kind == "NORM" else [-1.0, 1.0]
    expect_close(torch.stack([seen["t"], seen["p0"][0]]), torch.tensor(wanted), "received gradients", ulps=8)


@pytest.mark.clause("CLIP-005", "CLIP-006")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_many_parameters(impl: Any, kind: str) -> None:
    """Every parameter counts in the norm and is clipped, however many there are."""
    params = zeros_with_grads(*([3.0] for _ in range(1600)))
    optimizer, recorder = clipping(impl, params, kind, 1.0)
    optimizer.step()
    seen = torch.cat(recorder.received[0])
    wanted = full((1600,), 3.0 / (120.0 + 1e-6) if kind == "NORM" else 1.0)
    expect_close(seen, wanted, "received gradients", ulps=8)
