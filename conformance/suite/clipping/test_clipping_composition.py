"""Clipping around, inside and beside other optimizers; copies, loads, schedulers, scalers and autocast."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_raises,
    expect_unchanged,
    p_norm,
    snapshot,
)
from keyedopt.conformance.suite.support.clipping import zeros_with_grads
from keyedopt.conformance.suite.support.device import full, ones, tensor, the_device
from keyedopt.conformance.suite.support.doubles import clipping, recording
from keyedopt.conformance.suite.support.inputs import adagrad, adam, parameter, parameters, sgd, train, values
from keyedopt.conformance.suite.support.torch_optimizers import torch_factory


def fused(impl: Any, params: dict[str, Any]) -> Any:
    """Make an optimizer derived from the implementation's FusedOptimizer."""

    class Fused(impl.FusedOptimizer):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None: ...

        def zero_grad(self, set_to_none: bool = False) -> None: ...

    return Fused(params, {}, [{"params": list(params.values()), "lr": 0.1}])


def clip(impl: Any, optimizer: Any, kind: str = "NORM", bound: float = 1.0, **options: Any) -> Any:
    """Wrap an optimizer in a clipping optimizer."""
    chosen = getattr(impl.GradientClipping, kind)
    return impl.GradientClippingOptimizer(optimizer, chosen, bound, **options)


@pytest.mark.clause("CLIP-064")
@pytest.mark.parametrize("keys", [["", ""], ["dense", "over"]], ids=["plain", "keyed"])
def test_around_a_combination(impl: Any, keys: list[str]) -> None:
    """Around a CombinedOptimizer all gradients are clipped by their joint norm."""
    params = zeros_with_grads([3.0, 4.0], [12.0])
    parts = [sgd(impl, {key: param}, lr=1.0) for key, param in params.items()]
    combined = impl.CombinedOptimizer(list(zip(keys, parts, strict=True)))
    optimizer = clip(impl, combined, track_grad_norm=True)
    expect_close(optimizer.compute_total_grad_norm()[0], 13.0, "norm that is computed")
    optimizer.step()
    expect_close(optimizer.last_total_grad_norm, 13.0, "norm of the step")
    expect_close(params["p0"].detach(), torch.tensor([-3.0, -4.0]) / 13, "first part", ulps=8)
    expect_close(params["p1"].detach(), torch.tensor([-12.0]) / 13, "second part", ulps=8)


@pytest.mark.clause("CLIP-064")
def test_closure_of_a_combination(impl: Any) -> None:
    """Around a CombinedOptimizer the gradients of a closure are clipped for every optimizer."""
    params = zeros_with_grads([0.0], [0.0])
    parts = [sgd(impl, {key: param}, lr=1.0) for key, param in params.items()]
    optimizer = clip(impl, impl.CombinedOptimizer(parts), "VALUE", 1.0)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = params["p0"].sum() * 30.0 + params["p1"].sum() * 40.0
        loss.backward()
        return loss

    optimizer.step(closure)
    for param in params.values():
        expect_close(param.detach(), torch.tensor([-1.0]), "parameter")


@pytest.mark.clause("CLIP-065")
def test_inside_a_combination(impl: Any) -> None:
    """Inside a CombinedOptimizer each clipping optimizer clips only its own parameters."""
    params = zeros_with_grads([30.0, 40.0], [12.0], [24.0])
    parts = [
        ("norm", clip(impl, sgd(impl, {"p": params["p0"]}, lr=1.0), "NORM", 1.0)),
        ("value", clip(impl, sgd(impl, {"p": params["p1"]}, lr=1.0), "VALUE", 2.0)),
        ("free", sgd(impl, {"p": params["p2"]}, lr=1.0)),
    ]
    impl.CombinedOptimizer(parts).step()
    moved = [element for param in params.values() for element in (-param.detach()).tolist()]
    expect_close(torch.tensor(moved), torch.tensor([0.6, 0.8, 2.0, 24.0]), "moves")


@pytest.mark.clause("CLIP-066")
@pytest.mark.parametrize("outer", ["NORM", "VALUE"])
def test_nested(impl: Any, outer: str) -> None:
    """Two nested clipping optimizers each apply their bound, the outer one first."""
    params = zeros_with_grads([30.0, 40.0])
    inner = "VALUE" if outer == "NORM" else "NORM"
    keyed, recorder = recording(impl, params)
    clip(impl, clip(impl, keyed, inner, 0.7), outer, 1.0).step()
    wanted = [0.6, 0.7] if outer == "NORM" else [0.7 / p_norm([1.0, 1.0])] * 2
    expect_close(recorder.received[0][0], torch.tensor(wanted), "received gradient", ulps=16)


@pytest.mark.clause("CLIP-067")
@pytest.mark.parametrize("order", ["clipping outside", "clipping inside"])
def test_with_warmup(impl: Any, order: str) -> None:
    """Clipping and warmup nest in either order: the bound and the scheduled learning rate both apply."""
    params = zeros_with_grads([30.0, 40.0])
    stages = [impl.WarmupStage(impl.WarmupPolicy.CONSTANT, max_iters=10, value=0.5)]
    keyed, recorder = recording(impl, params, lr=1.0)
    if order == "clipping outside":
        optimizer = clip(impl, impl.WarmupOptimizer(keyed, stages, lr=0.2))
    else:
        optimizer = impl.WarmupOptimizer(clip(impl, keyed), stages, lr=0.2)
    optimizer.step()
    expect_close(recorder.received[0][0], torch.tensor([0.6, 0.8]), "received gradient")
    expect_close(recorder.rates[0][0], 0.1, "learning rate in force")


@pytest.mark.clause("CLIP-068")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("nesting", ["direct", "wrapped", "combined"])
def test_fused_is_refused(impl: Any, kind: str, nesting: str) -> None:
    """Clipping around a fused optimizer, whose gradients never reach step, raises ValueError."""

    def build() -> Any:
        inner = fused(impl, zeros_with_grads([30.0, 40.0]))
        if nesting == "wrapped":
            inner = impl.OptimizerWrapper(inner)
        elif nesting == "combined":
            inner = impl.CombinedOptimizer([("table", inner)])
        return clip(impl, inner, kind)

    expect_raises(build, ValueError, expected="ValueError: fused gradients cannot be clipped here")


@pytest.mark.clause("CLIP-069")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_mixed_tree(impl: Any, kind: str) -> None:
    """Around dense and fused optimizers the dense gradients are clipped, and one warning says so."""
    params = zeros_with_grads([30.0, 40.0])
    table = zeros_with_grads([0.0, 0.0])
    table["p0"].grad = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        parts = [("dense", sgd(impl, params, lr=1.0)), ("table", fused(impl, table))]
        optimizer = clip(impl, impl.CombinedOptimizer(parts), kind)
        for _ in range(3):
            params["p0"].grad = tensor([30.0, 40.0])
            optimizer.step()
    step = [0.6, 0.8] if kind == "NORM" else [1.0, 1.0]
    expect_close(params["p0"].detach(), -3 * torch.tensor(step), "dense parameter", ulps=8)
    told = [str(warning.message) for warning in caught if "fused" in str(warning.message).lower()]
    expect_equal(len(told), 1, "warnings about the fused part")


@pytest.mark.clause("CLIP-070")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
@pytest.mark.parametrize("norm_type", [2.0, float("inf")], ids=["2", "inf"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside dense"])
def test_empty_fused(impl: Any, kind: str, norm_type: float, beside: bool) -> None:
    """Around an EmptyFusedOptimizer, by itself or beside a dense one, clipping raises no error."""
    params = zeros_with_grads([0.0, 40.0])
    parts = [("none", impl.EmptyFusedOptimizer())]
    if beside:
        parts.append(("dense", sgd(impl, params, lr=1.0)))
    inner = impl.CombinedOptimizer(parts) if beside else parts[0][1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = clip(impl, inner, kind, norm_type=norm_type, track_grad_norm=True)
        optimizer.step()
        optimizer.zero_grad()
    expect_equal([str(item.message) for item in caught if item.category is UserWarning], [], "warnings")
    if beside:
        wanted = tensor([0.0, -40.0 if kind == "NONE" else -1.0])
        expect_close(params["p0"].detach(), wanted, "dense parameter")


@pytest.mark.clause("CLIP-071")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_copies_clip_their_own_gradients(impl: Any, how: str, kind: str) -> None:
    """A copy clips the gradients of its own parameters, not those of the original."""
    params = zeros_with_grads([0.0, 0.0])
    optimizer = clip(impl, sgd(impl, params, lr=1.0), kind)
    other = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    (param,) = other.params.values()
    param.grad = tensor([30.0, 40.0])
    params["p0"].grad = tensor([300.0, 400.0])
    other.step()
    wanted = tensor([0.6, 0.8] if kind == "NORM" else [1.0, 1.0])
    expect_close(param.detach(), -wanted, "parameter of the copy")
    expect_equal(params["p0"].tolist(), [0.0, 0.0], "parameter of the original")
    expect_equal(params["p0"].grad.tolist(), [300.0, 400.0], "gradient of the original")


@pytest.mark.clause("CLIP-072")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_copy_leaves_other_optimizers_working(impl: Any, how: str) -> None:
    """After a copy, the original and new clipping optimizers still step."""
    params = zeros_with_grads([30.0, 40.0])
    optimizer = clip(impl, sgd(impl, params, lr=1.0))
    copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    optimizer.step()
    expect_close(params["p0"].detach(), torch.tensor([-0.6, -0.8]), "parameter of the original")
    params = zeros_with_grads([30.0, 40.0])
    clip(impl, sgd(impl, params, lr=1.0)).step()
    expect_close(params["p0"].detach(), torch.tensor([-0.6, -0.8]), "parameter of a new optimizer")


@pytest.mark.clause("CLIP-073")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
def test_adds_nothing_to_the_state(impl: Any, kind: str) -> None:
    """state_dict is that of the wrapped optimizer, with the live state tensors."""
    params: dict[str, Any] = parameters()
    inner = adam(impl, params)
    optimizer = clip(impl, inner, kind, track_grad_norm=True)
    train(optimizer, params, 2)
    expect_unchanged(snapshot(inner.state_dict()), optimizer.state_dict(), "state_dict()")
    held = optimizer.state_dict()["state"]["p0"]["exp_avg"]
    train(optimizer, params, 1, seed=9)
    expect_bits(optimizer.state_dict()["state"]["p0"]["exp_avg"], held, "state held from before")


@pytest.mark.clause("CLIP-074")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("algorithm", ["adam", "adagrad"])
def test_resumes_exactly(impl: Any, kind: str, algorithm: str) -> None:
    """Training that resumes from a state_dict equals uninterrupted training bit for bit."""
    make = {"adam": adam, "adagrad": adagrad}[algorithm]
    params: dict[str, Any] = parameters()
    optimizer = clip(impl, make(impl, params), kind, 0.25)
    train(optimizer, params, 2)
    saved = snapshot(optimizer.state_dict())
    middle = values(params)
    train(optimizer, params, 3, seed=7)
    again = {key: torch.nn.Parameter(value) for key, value in zip(params, middle, strict=True)}
    resumed = clip(impl, make(impl, again), kind, 0.25)
    resumed.init_state()
    resumed.load_state_dict(saved)
    train(resumed, again, 3, seed=7)
    for key, param in params.items():
        expect_bits(again[key].detach(), param.detach(), f"parameter {key!r}")


@pytest.mark.clause("CLIP-075")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
@pytest.mark.parametrize("sparse", [None, ["p0"]], ids=["dense", "sparse"])
def test_init_state_through_clipping(impl: Any, kind: str, sparse: list[str] | None) -> None:
    """init_state through the clipping optimizer initializes the state and changes no parameter."""
    params: dict[str, Any] = {key: parameter(3, 2, seed=seed) for seed, key in enumerate(("p0", "p1"))}
    before = values(params)
    optimizer = clip(impl, adagrad(impl, params), kind, 0.0)
    optimizer.init_state(None if sparse is None else set(sparse))
    expect_equal(params["p0"].grad.is_sparse, bool(sparse), "whether the gradient of p0 is sparse")
    for param, old in zip(params.values(), before, strict=True):
        expect_bits(param.detach(), old, "parameter")
    expect_equal(set(optimizer.state_dict()["state"]), {"p0", "p1"}, "keys with state")


@pytest.mark.clause("CLIP-076")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_zero_grad_and_the_next_step(impl: Any, kind: str) -> None:
    """Each step clips its own gradients; no value carries over to the next step."""
    params = zeros_with_grads([30.0, 40.0])
    optimizer, recorder = clipping(impl, params, kind, 1.0)
    for grad in ([30.0, 40.0], [0.3, 0.4], [300.0, 400.0]):
        optimizer.zero_grad(set_to_none=True)
        params["p0"].grad = tensor(grad)
        optimizer.step()
    big = [0.6, 0.8] if kind == "NORM" else [1.0, 1.0]
    for seen, wanted in zip(recorder.received, (big, [0.3, 0.4], big), strict=True):
        expect_close(seen[0], torch.tensor(wanted), "received gradient")


@pytest.mark.clause("CLIP-077")
def test_with_a_scheduler(impl: Any) -> None:
    """A scheduler around the clipping optimizer sets the learning rates of the wrapped one."""
    params = zeros_with_grads([30.0, 40.0])
    keyed, recorder = recording(impl, params, lr=1.0)
    optimizer = clip(impl, keyed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(2):
        params["p0"].grad = tensor([30.0, 40.0])
        optimizer.step()
        scheduler.step()
    expect_equal(recorder.rates, [[1.0], [0.5]], "learning rates in use")
    for seen in recorder.received:
        expect_close(seen[0], torch.tensor([0.6, 0.8]), "received gradient")


@pytest.mark.clause("CLIP-078")
@pytest.mark.parametrize("bad", [False, True], ids=["finite", "overflow"])
def test_with_a_gradient_scaler(impl: Any, bad: bool) -> None:
    """GradScaler.step unscales before clipping, and skips a step whose gradients overflowed."""
    params = zeros_with_grads([0.0, 0.0])
    optimizer = clip(impl, sgd(impl, params, lr=1.0), "NORM", 1.0, track_grad_norm=True)
    scaler = torch.amp.GradScaler(the_device().type, init_scale=1024.0)
    loss = (params["p0"] * tensor([0.3, float("inf") if bad else 0.4])).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    wanted = tensor([0.0, 0.0] if bad else [-0.3, -0.4])
    expect_close(params["p0"].detach(), wanted, "parameter after scaler.step")
    if not bad:
        expect_close(optimizer.last_total_grad_norm.float(), 0.5, "norm, unscaled")


@pytest.mark.clause("CLIP-079")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_with_autocast(impl: Any, kind: str) -> None:
    """Gradients of a model that runs in bfloat16 under autocast are clipped."""
    params = {"w": torch.nn.Parameter(ones(2, 2))}
    optimizer, recorder = clipping(impl, params, kind, 0.5)
    with torch.autocast(the_device().type, dtype=torch.bfloat16):
        loss: Any = (full((3, 2), 100.0) @ params["w"]).float().square().sum()
    loss.backward()
    optimizer.step()
    (seen,) = recorder.received[0]
    size = p_norm(seen.flatten().tolist(), 2.0 if kind == "NORM" else float("inf"))
    expect(abs(size - 0.5) < 1e-5, "a gradient at the bound of 0.5", seen.tolist())


@pytest.mark.clause("CLIP-080")
def test_fused_kernels_of_torch(impl: Any) -> None:
    """Torch optimizers with fused or foreach kernels receive clipped gradients."""
    moved = []
    for option in ("fused", "foreach"):
        params = zeros_with_grads([30.0, 40.0])
        options: dict[str, Any] = {option: True}
        factory = torch_factory(torch.optim.SGD, lr=1.0, **options)
        clip(impl, impl.KeyedOptimizerWrapper(params, factory)).step()
        moved.append(params["p0"].detach())
    for seen in moved:
        expect_close(seen, torch.tensor([-0.6, -0.8]), "parameter")
