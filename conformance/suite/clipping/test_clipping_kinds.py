"""Clipping by norm and by value: clipped gradients, and arguments that raise errors."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from keyedopt.conformance.suite.support.assertions import (
    error_of,
    expect,
    expect_bits,
    expect_close,
    expect_derived,
    expect_equal,
    expect_raises,
    p_norm,
)
from keyedopt.conformance.suite.support.clipping import expect_scaled
from keyedopt.conformance.suite.support.device import on_host, tensor, zeros
from keyedopt.conformance.suite.support.doubles import clipping
from keyedopt.conformance.suite.support.inputs import parameters, set_grads, sgd, values
from keyedopt.conformance.suite.support.torch_optimizers import torch_factory


def make(impl: Any, grads: list[list[float]], *args: Any, **options: Any) -> tuple[Any, Any, list[Any]]:
    """Make a clipping optimizer around a recorder, for parameters with these gradients."""
    dtype = options.pop("dtype", torch.float32)
    params = {
        f"p{index}": torch.nn.Parameter(zeros(len(grad), dtype=dtype)) for index, grad in enumerate(grads)
    }
    for param, grad in zip(params.values(), grads, strict=True):
        param.grad = tensor(grad, dtype=dtype)
    optimizer, recorder = clipping(impl, params, *args, **options)
    return optimizer, recorder, list(params.values())


@pytest.mark.clause("CLIP-001")
def test_members(impl: Any) -> None:
    """GradientClipping is an enumeration with NONE, NORM and VALUE and the documented values."""
    seen = {member.name: member.value for member in impl.GradientClipping}
    documented = {"NONE": "none", "NORM": "norm", "VALUE": "value"}
    missing = {name: value for name, value in documented.items() if seen.get(name) != value}
    expect_equal(missing, {}, "members missing or of another value")
    for name, value in documented.items():
        expect_equal(impl.GradientClipping(value).name, name, f"name of GradientClipping({value!r})")


@pytest.mark.clause("CLIP-002")
def test_is_a_wrapper(impl: Any) -> None:
    """A clipping optimizer is an OptimizerWrapper and a KeyedOptimizer."""
    optimizer = impl.GradientClippingOptimizer(sgd(impl, parameters()))
    expect_derived(type(optimizer), impl.OptimizerWrapper)
    expect_derived(type(optimizer), impl.KeyedOptimizer)


@pytest.mark.clause("CLIP-003")
@pytest.mark.parametrize("explicit", [False, True])
def test_none_clips_nothing(impl: Any, explicit: bool) -> None:
    """With NONE, which is the default, the wrapped optimizer receives the gradients bit for bit."""
    params: dict[str, Any] = parameters()
    set_grads(params, scale=1e6)
    before = [param.grad.clone() for param in params.values()]
    kind = (impl.GradientClipping.NONE,) if explicit else ()
    inner = sgd(impl, params, lr=1.0)
    start = values(params)
    impl.GradientClippingOptimizer(inner, *kind).step()
    for param, grad, old in zip(params.values(), before, start, strict=True):
        expect_bits(param.detach(), old - grad, "parameter after one step of plain SGD")


@pytest.mark.clause("CLIP-004")
def test_default_bound(impl: Any) -> None:
    """The default of max_gradient is 0.1."""
    params = {"p": torch.nn.Parameter(zeros(2))}
    params["p"].grad = tensor([3.0, -4.0])
    impl.GradientClippingOptimizer(sgd(impl, params, lr=1.0), impl.GradientClipping.VALUE).step()
    expect_close(params["p"].detach(), torch.tensor([-0.1, 0.1]), "parameter after the step")


@pytest.mark.clause("CLIP-005")
@pytest.mark.parametrize("bound", [0.0, 0.25, 1, 2.5, math.inf])
def test_value_clamps_every_element(impl: Any, bound: float, dtype: str) -> None:
    """VALUE clamps every element to [-max_gradient, max_gradient] and changes no other element."""
    grads = [[-3.0, 0.125, 0.0], [1.5, -0.25]]
    optimizer, recorder, _ = make(impl, grads, "VALUE", bound, dtype=getattr(torch, dtype))
    optimizer.step()
    for seen, grad in zip(recorder.received[0], grads, strict=True):
        wanted = [max(-bound, min(bound, element)) for element in grad]
        expect_equal(seen.tolist(), wanted, "received gradient")


@pytest.mark.clause("CLIP-007")
@pytest.mark.parametrize("bound", [1.0, 5, 0.01])
def test_norm_scales_all_gradients_together(impl: Any, bound: float, dtype: str) -> None:
    """NORM multiplies every gradient by max_gradient / (norm of all + 1e-6)."""
    grads = [[3.0, -4.0], [12.0], [0.0, 84.0]]
    optimizer, recorder, _ = make(impl, grads, "NORM", bound, dtype=getattr(torch, dtype))
    optimizer.step()
    factor = min(1.0, bound / (p_norm([element for grad in grads for element in grad]) + 1e-6))
    for seen, grad in zip(recorder.received[0], grads, strict=True):
        wanted = torch.tensor([element * factor for element in grad], dtype=torch.float64)
        expect_close(seen, wanted, "received gradient")


@pytest.mark.clause("CLIP-008")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_gradients_within_the_bound_are_untouched(impl: Any, kind: str, dtype: str) -> None:
    """Gradients within the bound reach the wrapped optimizer bit for bit."""
    params: dict[str, Any] = parameters(n=3, dtype=dtype)
    set_grads(params)
    before = [param.grad.clone() for param in params.values()]
    optimizer, recorder = clipping(impl, params, kind, 100.0)
    optimizer.step()
    for seen, grad in zip(recorder.received[0], before, strict=True):
        expect_bits(seen, grad, "received gradient")


@pytest.mark.clause("CLIP-009")
@pytest.mark.parametrize("norm_type", [1, 2, 2.0, 3.0, "inf", math.inf], ids=lambda value: str(value))
def test_norm_types(impl: Any, norm_type: Any, dtype: str) -> None:
    """norm_type selects the p-norm; 'inf' selects the largest magnitude."""
    grads = [[3.0, -4.0, 0.5], [12.0, 0.0]]
    optimizer, recorder, _ = make(impl, grads, "NORM", 2.0, norm_type=norm_type, dtype=getattr(torch, dtype))
    optimizer.step()
    norm = p_norm([element for grad in grads for element in grad], float(norm_type))
    expect_scaled(recorder.received[0], grads, 2.0, norm)


@pytest.mark.clause("CLIP-009")
@pytest.mark.parametrize("norm_type", [1, 2.0, 3.0, math.inf], ids=str)
def test_the_last_element_counts(impl: Any, norm_type: float) -> None:
    """Gradients of any size are scaled by a norm that includes their last element."""
    for size in (1, 5, 16, 17, 255, 257, 1024, 1025, 4097, 65537):
        grads = [[0.0] * (size - 1) + [5.0], [3.0]]
        optimizer, recorder, _ = make(impl, grads, "NORM", 2.0, norm_type=norm_type)
        optimizer.step()
        expect_scaled(recorder.received[0], grads, 2.0, p_norm([5.0, 3.0], norm_type))


@pytest.mark.clause("CLIP-010")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_bound_of_zero(impl: Any, kind: str) -> None:
    """max_gradient = 0 sets the gradients to zero."""
    optimizer, recorder, _ = make(impl, [[3.0, -4.0], [1e-20]], kind, 0)
    optimizer.step()
    for seen in recorder.received[0]:
        expect(not seen.any(), "gradients that are zero", seen.tolist())


@pytest.mark.clause("CLIP-010")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_bound_of_zero_in_a_fused_step(impl: Any, kind: str) -> None:
    """max_gradient = 0 leaves nothing for a fused kernel to subtract."""
    params = {"p": torch.nn.Parameter(zeros(2))}
    params["p"].grad = tensor([30.0, -40.0])
    inner = impl.KeyedOptimizerWrapper(params, torch_factory(torch.optim.SGD, lr=0.1, fused=True))
    impl.GradientClippingOptimizer(inner, impl.GradientClipping[kind], 0.0).step()
    expect(not params["p"].any(), "a parameter that does not move", params["p"])


@pytest.mark.clause("CLIP-011")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("bound", [-1.0, -math.inf, math.nan], ids=["negative", "-inf", "nan"])
def test_senseless_bounds_are_refused(impl: Any, kind: str, bound: float) -> None:
    """A negative or NaN max_gradient raises ValueError."""

    def use() -> Any:
        optimizer, recorder, _ = make(impl, [[3.0, -4.0]], kind, bound)
        optimizer.step()
        return recorder.received[0]

    expect_raises(use, ValueError, expected=f"ValueError for max_gradient={bound}")


@pytest.mark.clause("CLIP-012")
@pytest.mark.parametrize("kind", ["norm", "VALUE", "l2", 2], ids=lambda value: str(value))
def test_clipping_that_is_no_member(impl: Any, kind: Any) -> None:
    """An argument that is not a GradientClipping is understood or raises an error."""
    params = {"p": torch.nn.Parameter(zeros(2))}
    params["p"].grad = tensor([30.0, -40.0])
    if error_of(lambda: impl.GradientClippingOptimizer(sgd(impl, params, lr=1.0), kind, 1.0).step()):
        return
    largest = float(params["p"].detach().abs().max())
    expect(largest <= 1.0 + 1e-6, f"an error for clipping={kind!r}, or clipped gradients", params["p"])


@pytest.mark.clause("CLIP-013")
@pytest.mark.parametrize(
    "norm_type", [0, -1.0, -math.inf, math.nan, "fro"], ids=["0", "-1", "-inf", "nan", "fro"]
)
def test_senseless_norm_types_are_refused(impl: Any, norm_type: Any) -> None:
    """A norm_type that is not positive raises ValueError: it bounds nothing."""

    def use() -> Any:
        optimizer, recorder, _ = make(impl, [[3.0, -4.0]], "NORM", 1.0, norm_type=norm_type)
        optimizer.step()
        return recorder.received[0]

    expect_raises(use, ValueError, expected=f"ValueError for norm_type={norm_type!r}")


@pytest.mark.clause("CLIP-006", "CLIP-014")
@given(
    grads=st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=5), min_size=1, max_size=4),
    bound=st.floats(0.0, 1e3, width=32),
    p=st.sampled_from([1.0, 2.0, 3.0, math.inf]),
)
def test_norm_never_exceeds_the_bound(impl: Any, grads: Any, bound: float, p: float) -> None:
    """After clipping the norm is the bound, if it was larger, and no sign has changed, for any gradients."""
    optimizer, recorder, _ = make(impl, grads, "NORM", bound, norm_type=p)
    optimizer.step()
    seen = [element for grad in recorder.received[0] for element in grad.tolist()]
    norm = p_norm(seen, p)
    expect(norm <= bound * (1 + 1e-5) + 1e-30, f"norm at most {bound}", norm)
    before = [element for grad in grads for element in grad]
    if p_norm(before, p) > bound >= 1e-3:  # a smaller factor could underflow
        expect_scaled(recorder.received[0], grads, bound, p_norm(before, p))
    turned = [(old, new) for old, new in zip(before, seen, strict=True) if old * new < 0]
    expect_equal(turned, [], "elements whose sign changed")


@pytest.mark.clause("CLIP-015")
@pytest.mark.parametrize(
    ("precision", "grads", "norm_type"),
    [
        ("float16", [[4e4, -4e4], [4e4, 4e4]], 2.0),
        ("bfloat16", [[2.0**120, -(2.0**120)]], 2.0),
        ("float32", [[3e20, -4e20]], 2.0),
        ("float32", [[3e7, -4e7]], 8.0),
        ("float64", [[3e200, -4e200], [1.0]], 2.0),
    ],
    ids=["float16", "bfloat16", "float32", "float32, power 8", "float64"],
)
def test_large_finite_gradients_are_scaled_not_lost(
    impl: Any, precision: str, grads: Any, norm_type: float
) -> None:
    """Finite gradients are scaled even if their powers or norm overflow."""
    optimizer, recorder, _ = make(
        impl, grads, "NORM", 1.0, norm_type=norm_type, dtype=getattr(torch, precision)
    )
    optimizer.step()
    norm = p_norm([element for grad in grads for element in grad], norm_type)
    for seen, grad in zip(recorder.received[0], grads, strict=True):
        wanted = torch.tensor([element / norm for element in grad], dtype=torch.float64)
        expect_close(seen, wanted, "received gradient", ulps=8)


@pytest.mark.clause("CLIP-016")
def test_small_factors_do_not_vanish(impl: Any) -> None:
    """If the factor underflows float16, the scaled gradient is still correct."""
    optimizer, recorder, _ = make(impl, [[3e4, 4e4]], "NORM", 1e-3, dtype=torch.float16)
    optimizer.step()
    wanted = torch.tensor([6e-4, 8e-4], dtype=torch.float64)
    expect_close(recorder.received[0][0], wanted, "received gradient", ulps=4)


@pytest.mark.clause("CLIP-017")
def test_dtypes_are_clipped_together(impl: Any) -> None:
    """Gradients of several dtypes have a joint norm."""
    params: dict[str, Any] = {}
    for name in ("float16", "float32", "float64"):
        params[name] = torch.nn.Parameter(zeros(2, dtype=getattr(torch, name)))
        params[name].grad = tensor([3.0, 4.0], dtype=params[name].dtype)
    optimizer, recorder = clipping(impl, params, "NORM", 1.0)
    optimizer.step()
    factor = 1.0 / (p_norm([3.0, 4.0] * 3) + 1e-6)
    for name, seen in zip(params, recorder.received[0], strict=True):
        expect_equal(str(seen.dtype), f"torch.{name}", "dtype of the received gradient")
        wanted = torch.tensor([3.0 * factor, 4.0 * factor], dtype=torch.float64)
        if name == "float64":  # the norm may have been formed in the precision of float16
            expect(
                bool(((on_host(seen) - wanted).abs() < 1e-3).all()), f"about {wanted.tolist()}", seen.tolist()
            )
        else:
            expect_close(seen, wanted, f"{name} received gradient", ulps=4 if name == "float16" else 2**13)


@pytest.mark.clause("CLIP-018")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_complex_gradients(impl: Any, kind: str) -> None:
    """Complex gradients are clipped by magnitude, or the step raises."""
    params = {"p": torch.nn.Parameter(zeros(2, dtype=torch.complex64))}
    params["p"].grad = tensor([3 + 4j, 12j])
    optimizer, recorder = clipping(impl, params, kind, 1.0)
    try:
        optimizer.step()
    except (ValueError, TypeError, RuntimeError):
        expect_equal(recorder.received, [], "gradients handed on by a refused step")
        return
    (seen,) = recorder.received[0]
    if kind == "VALUE":
        expect(bool((seen.abs() <= 1 + 1e-6).all()), "magnitudes at most 1", seen.tolist())
        return
    wanted = tensor([(3 + 4j), 12j], dtype=torch.complex128) / (13 + 1e-6)
    expect_close(torch.view_as_real(seen), torch.view_as_real(wanted), "received gradient")
