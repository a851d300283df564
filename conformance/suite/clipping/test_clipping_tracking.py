"""The norm that a clipping optimizer reports, and its methods that compute it."""

import math
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    p_norm,
)
from keyedopt.conformance.suite.support.clipping import zeros_with_grads
from keyedopt.conformance.suite.support.device import as_tensor, full, ones, tensor, zeros
from keyedopt.conformance.suite.support.doubles import clipping
from keyedopt.conformance.suite.support.inputs import parameters, set_grads
from keyedopt.conformance.suite.support.torch_optimizers import torch_factory


@pytest.mark.clause("CLIP-042")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
@pytest.mark.parametrize("track", [False, True])
def test_no_norm_before_the_first_step(impl: Any, kind: str, track: bool) -> None:
    """last_total_grad_norm is None before any step."""
    optimizer, _ = clipping(impl, zeros_with_grads([3.0]), kind, 1.0, track_grad_norm=track)
    expect(optimizer.last_total_grad_norm is None, "None", optimizer.last_total_grad_norm)


@pytest.mark.clause("CLIP-043", "CLIP-044")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf], ids=["1", "2", "3", "inf"])
def test_norm_of_the_last_step(impl: Any, kind: str, norm_type: float) -> None:
    """With track_grad_norm every kind records the norm of all gradients before clipping."""
    params = zeros_with_grads([3.0, -4.0], [12.0])
    optimizer, _ = clipping(impl, params, kind, 1.0, norm_type=norm_type, track_grad_norm=True)
    optimizer.step()
    wanted = p_norm([3.0, -4.0, 12.0], norm_type)
    expect_close(optimizer.last_total_grad_norm.float(), wanted, "norm of the first step")
    for param, grad in zip(params.values(), ([0.0, 0.5], [0.25]), strict=True):
        param.grad = tensor(grad)
    optimizer.step()
    wanted = p_norm([0.5, 0.25], norm_type)
    expect_close(optimizer.last_total_grad_norm.float(), wanted, "norm of the second step")


@pytest.mark.clause("CLIP-088")
@pytest.mark.parametrize("precision", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf], ids=["1", "2", "3", "inf"])
def test_norm_of_tiny_gradients(impl: Any, precision: str, norm_type: float) -> None:
    """The norm of gradients whose powers are zero in float32, or in float64, is correct."""
    size = 2.0**-600 if precision == "float64" else 2.0**-84
    params = {f"p{at}": torch.nn.Parameter(zeros(2, dtype=getattr(torch, precision))) for at in range(2)}
    for param, grad in zip(params.values(), ([3.0, -4.0], [12.0, 0.0]), strict=True):
        param.grad = tensor([one * size for one in grad], dtype=param.dtype)
    optimizer, _ = clipping(impl, params, "NORM", 1.0, norm_type=norm_type)
    norm = float(optimizer.compute_total_grad_norm()[0]) / size
    wanted = p_norm([3.0, -4.0, 12.0], norm_type)
    # Four powers, three sums, a root and the norm itself are rounded in at least float32: 16 units of 2^-23.
    expect(abs(norm - wanted) <= 2.0**-19 * wanted, f"a norm of {wanted} times 2^{math.log2(size):.0f}", norm)


@pytest.mark.clause("CLIP-045")
@pytest.mark.parametrize("kind", ["VALUE", "NONE"])
def test_tracking_changes_nothing(impl: Any, kind: str) -> None:
    """The clipped gradients are the same with and without tracking, bit for bit."""
    arrived = []
    for track in (False, True):
        params: dict[str, Any] = parameters()
        set_grads(params, scale=10.0)
        optimizer, recorder = clipping(impl, params, kind, 1.0, track_grad_norm=track)
        optimizer.step()
        arrived.append(recorder.received[0])
    for plain, tracked in zip(*arrived, strict=True):
        expect_bits(tracked, plain, "received gradient with tracking")


@pytest.mark.clause("CLIP-046")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf], ids=["2", "inf"])
@pytest.mark.parametrize("empty", [False, True])
def test_norm_of_nothing(impl: Any, kind: str, norm_type: float, empty: bool) -> None:
    """The norm of a step without gradients is 0 or None, and never negative."""
    params = zeros_with_grads([1.0])
    params["p0"].grad = None
    if empty:
        params["p1"] = torch.nn.Parameter(zeros(0))
        params["p1"].grad = zeros(0)
    optimizer, _ = clipping(impl, params, kind, 1.0, norm_type=norm_type, track_grad_norm=True)
    optimizer.step()
    norm = optimizer.last_total_grad_norm
    expect(norm is None or float(norm) == 0.0, "a norm of 0, or None", norm)


@pytest.mark.clause("CLIP-047")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
def test_norm_holds_no_graph(impl: Any, kind: str) -> None:
    """The norm holds neither an autograd graph nor a gradient."""
    param: Any = torch.nn.Parameter(tensor([3.0]))
    optimizer, _ = clipping(impl, {"p": param}, kind, 1.0, track_grad_norm=True)
    (param**3).sum().backward(create_graph=True)
    optimizer.step()
    norm = optimizer.last_total_grad_norm
    expect(not norm.requires_grad, "a norm without a graph", norm)
    computed, _ = optimizer.compute_total_grad_norm()
    expect(not computed.requires_grad, "a computed norm without a graph", computed)
    expect_close(norm, 27.0, "norm")
    with torch.no_grad():
        param.grad.zero_()
    expect_close(norm, 27.0, "norm after the gradient was zeroed")
    param.grad = None  # breaks the cycle of graph and parameter


@pytest.mark.clause("CLIP-048")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
@pytest.mark.parametrize("norm_type", [2.0, math.inf], ids=["2", "inf"])
@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_nonfinite_gradients_show(impl: Any, kind: str, norm_type: float, bad: str) -> None:
    """The norm of a non-finite gradient is not finite."""
    params = zeros_with_grads([1.0, float(bad)], [2.0])
    optimizer, _ = clipping(impl, params, kind, 1.0, norm_type=norm_type, track_grad_norm=True)
    optimizer.step()
    norm = optimizer.last_total_grad_norm
    expect(not math.isfinite(float(norm)), "NaN or infinity", norm)


@pytest.mark.clause("CLIP-049")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
def test_norm_of_a_closure(impl: Any, kind: str) -> None:
    """With a closure the norm is that of the gradients that the closure computed."""
    params = zeros_with_grads([1.0, 1.0])
    optimizer, _ = clipping(impl, params, kind, 1.0, track_grad_norm=True)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = (params["p0"] * tensor([3.0, 4.0])).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    expect(optimizer.last_total_grad_norm is not None, "a norm", None)
    expect_close(optimizer.last_total_grad_norm, 5.0, "norm")


@pytest.mark.clause("CLIP-050")
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_norm_in_half_precision(impl: Any, scale: float) -> None:
    """The norm of float16 gradients is correct, also if float16 cannot represent it."""
    param = torch.nn.Parameter(zeros(4, dtype=torch.float16))
    param.grad = tensor([6.0, 6.0, 6.0, 6.0], dtype=torch.float16) * scale
    optimizer, _ = clipping(impl, {"p": param}, "NONE", 1.0, track_grad_norm=True)
    optimizer.step()
    norm = float(optimizer.last_total_grad_norm)
    expect(abs(norm - 12.0 * scale) <= 12.0 * scale * 2**-10, f"about {12.0 * scale}", norm)


@pytest.mark.clause("CLIP-051")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
@pytest.mark.parametrize("track", [False, True])
def test_what_the_norm_is_made_of(impl: Any, kind: str, track: bool) -> dict[str, str]:
    """Observe which kinds record a norm without track_grad_norm, and its dtype."""
    seen = {}
    for dtype in (torch.float16, torch.float32, torch.float64):
        param = torch.nn.Parameter(zeros(2, dtype=dtype))
        param.grad = ones(2, dtype=dtype)
        optimizer, _ = clipping(impl, {"p": param}, kind, 1.0, track_grad_norm=track)
        optimizer.step()
        norm = optimizer.last_total_grad_norm
        seen[str(dtype)] = "None" if norm is None else str(norm.dtype)
    return seen


@pytest.mark.clause("CLIP-052")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf], ids=["1", "2", "inf"])
def test_compute_total_grad_norm(impl: Any, norm_type: float) -> None:
    """compute_total_grad_norm returns the norm and the flat list of gradients, and does not clip."""
    params = zeros_with_grads([3.0, -4.0], [12.0])
    params["p2"] = torch.nn.Parameter(zeros(2))
    before = [params["p0"].grad.clone(), params["p1"].grad.clone()]
    optimizer, _ = clipping(impl, params, "NORM", 1.0, norm_type=norm_type)
    norm, grads = optimizer.compute_total_grad_norm()
    expect_close(norm, p_norm([3.0, -4.0, 12.0], norm_type), "norm")
    expect_equal(len(grads), 2, "gradients in the list")
    for grad, old in zip(grads, before, strict=True):
        expect_bits(grad.detach(), old, "gradient in the list")
    expect(optimizer.last_total_grad_norm is None, "no norm of a step", optimizer.last_total_grad_norm)


@pytest.mark.clause("CLIP-053")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf], ids=["1", "2", "inf"])
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
def test_clip_grad_norm(impl: Any, norm_type: float, kind: str) -> None:
    """clip_grad_norm_ clips immediately, without a step, and returns the norm before clipping."""
    for bound in (1.0, 50.0):
        params = zeros_with_grads([3.0, -4.0], [12.0])
        optimizer, recorder = clipping(impl, params, kind, bound, norm_type=norm_type)
        norm = p_norm([3.0, -4.0, 12.0], norm_type)
        expect_close(optimizer.clip_grad_norm_(), norm, "what it returns")
        factor = min(1.0, bound / (norm + 1e-6))
        for param, old in zip(params.values(), ([3.0, -4.0], [12.0]), strict=True):
            expect_close(param.grad, tensor([element * factor for element in old]), "gradient")
        expect_equal(recorder.received, [], "steps taken")


@pytest.mark.clause("CLIP-084")
def test_pre_hooks_of_both_optimizers_inside(impl: Any) -> None:
    """A hook of the keyed optimizer and one of the optimizer that it wraps see clipped gradients."""
    params, seen = zeros_with_grads([30.0, 40.0]), []

    def hooked(optimizer: Any) -> Any:
        optimizer.register_step_pre_hook(lambda *_: seen.append(params["p0"].grad.clone()))
        return optimizer

    sgd = torch_factory(torch.optim.SGD, lr=1.0, fused=True)
    wrapper = impl.KeyedOptimizerWrapper(params, lambda some: hooked(sgd(some)))
    impl.GradientClippingOptimizer(hooked(wrapper), impl.GradientClipping.NORM, 1.0).step()
    expect(bool(seen), "calls of hooks", "none")
    for grad in seen:
        expect_close(grad, tensor([0.6, 0.8]), "gradient in a hook")


@pytest.mark.clause("CLIP-054")
@pytest.mark.parametrize("method", ["compute_total_grad_norm", "clip_grad_norm_"])
@pytest.mark.parametrize("case", ["none", "empty", "shared", "sparse", "float16", "nan", "meta"])
def test_methods_on_special_gradients(impl: Any, method: str, case: str) -> None:
    """The two methods measure what a step would, also for special gradients, or raise."""
    params = zeros_with_grads([30.0, 40.0])
    wanted = 50.0
    groups = 1
    if case == "none":
        params["p0"].grad, wanted = None, 0.0
    elif case == "empty":
        params["p0"] = torch.nn.Parameter(zeros(0))
        params["p0"].grad, wanted = zeros(0), 0.0
    elif case == "shared":
        groups = 2
    elif case == "sparse":
        params["p0"] = torch.nn.Parameter(zeros(4))
        index = tensor([[1, 1, 2]])
        values = tensor([15.0, 15.0, 40.0])
        params["p0"].grad = torch.sparse_coo_tensor(index, values, (4,), check_invariants=False)
    elif case == "float16":
        params["p0"] = torch.nn.Parameter(zeros(4, dtype=torch.float16))
        params["p0"].grad = full((4,), 6e4, dtype=torch.float16)
        wanted = 2 * float(params["p0"].grad[0])
    elif case == "nan":
        params["p0"].grad[1], wanted = math.nan, math.nan
    elif case == "meta":
        params["p1"] = torch.nn.Parameter(torch.zeros(2, device="meta"))

    class Listed(impl.KeyedOptimizer):  # type: ignore[misc]
        def step(self, closure: Any) -> None: ...

        def zero_grad(self, set_to_none: bool = False) -> None: ...

    inner = Listed(params, {}, [{"params": list(params.values())} for _ in range(groups)])
    optimizer = impl.GradientClippingOptimizer(inner, impl.GradientClipping.NORM, 1.0)
    try:
        result = getattr(optimizer, method)()
    except (ValueError, TypeError, RuntimeError):
        expect_equal(case, "sparse", "only a sparse gradient may be refused; case")
        return
    norm = result[0] if method == "compute_total_grad_norm" else result
    if case == "nan":
        expect(math.isnan(norm), "a norm that is NaN", norm)
        return
    expect(abs(float(norm) - wanted) <= wanted * 1e-3, f"a norm of {wanted}", norm)
    if method == "clip_grad_norm_" and case == "shared":
        expect_close(params["p0"].grad, torch.tensor([0.6, 0.8]), "gradient, scaled once")


@pytest.mark.clause("CLIP-047")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
def test_norms_that_are_kept(impl: Any, kind: str) -> None:
    """A norm that was read does not change in later steps of this or other optimizers."""
    params = zeros_with_grads([3.0, 4.0])
    optimizer, _ = clipping(impl, params, kind, 1.0, track_grad_norm=True)
    other, _ = clipping(impl, zeros_with_grads([1.0, 0.0]), kind, 1.0, track_grad_norm=True)
    kept = []
    for scale in (1.0, 10.0, 100.0):
        params["p0"].grad = tensor([3.0 * scale, 4.0 * scale])
        optimizer.step()
        other.step()
        kept.append(optimizer.last_total_grad_norm)
    seen = torch.stack([as_tensor(norm).float() for norm in kept])
    expect_close(seen, torch.tensor([5.0, 50.0, 500.0]), "norms of three steps")
