"""Clipping around each kind of optimizer: a step equals clipping by hand, then the step of the optimizer."""

import contextlib
import copy
import functools
import types
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torch_hooks

from keyedopt.conformance.suite.support.assertions import exactly, expect, expect_equal, expect_raises
from keyedopt.conformance.suite.support.clipping import (
    CLIPPED_TO,
    DECOUPLED_DECAY,
    INNER,
    OWN_INNER,
    SCALES_OF_STEPS,
    clip_by_hand,
    expect_as_by_hand,
    give_early_grads,
    give_late_grads,
    inner_weights,
    keyed_by_factory,
    without_keys,
)
from keyedopt.conformance.suite.support.device import tensor
from keyedopt.conformance.suite.support.inputs import set_grads
from keyedopt.conformance.suite.support.torch_optimizers import torch_factory


@pytest.mark.clause("CLIP-083")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("inner", list(INNER))
def test_clipped_step(impl: Any, inner: str, fused: bool, kind: str) -> None:
    """A clipped step of an optimizer of torch equals clipping by hand, then its step."""
    cls, options = INNER[inner]
    made = keyed_by_factory(impl, torch_factory(cls, lr=0.1, fused=fused, **options))
    plain = without_keys(lambda params: cls(params, lr=0.1, **options))
    momentum = "momentum" in options
    if momentum:
        expect_as_by_hand(impl, made, plain, kind, give=give_early_grads)
    # torch's fused SGD raises TypeError if a parameter gets its momentum later than another one
    with contextlib.suppress(*([TypeError] if fused and momentum else [])):
        expect_as_by_hand(impl, made, plain, kind)


@pytest.mark.clause("CLIP-085")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("inner", ["Adam", "SGD", "Adagrad"])
def test_clipped_step_with_closure(impl: Any, inner: str, fused: bool, kind: str) -> None:
    """A clipped step of an optimizer of torch with a closure equals clipping by hand, then its step."""
    cls, options = INNER[inner]
    made = keyed_by_factory(impl, torch_factory(cls, lr=0.1, fused=fused, **options))
    expect_as_by_hand(
        impl, made, without_keys(lambda params: cls(params, lr=0.1, **options)), kind, closure=True
    )


@pytest.mark.clause("CLIP-085")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("algorithm", list(OWN_INNER))
def test_clipped_step_of_own_with_closure(impl: Any, algorithm: str, kind: str) -> None:
    """A clipped step of an optimizer of the implementation with a closure equals clipping by hand."""

    def factory(params: Any) -> Any:
        return getattr(impl, algorithm)(params, lr=0.1, **OWN_INNER[algorithm])

    expect_as_by_hand(impl, keyed_by_factory(impl, factory), without_keys(factory), kind, closure=True)


@pytest.mark.clause("CLIP-083")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_clipped_step_of_unlike_groups(impl: Any, kind: str) -> None:
    """A clipped step covers a second group with other kernels and options than the first."""

    def factory(params: Any, **kernel: bool) -> Any:
        second = {"params": params[1:], "lr": 0.3, "weight_decay": 0.5, **kernel}
        return torch.optim.Adam([{"params": params[:1], "fused": True}, second], lr=0.1, eps=0.1)

    torch_factory(torch.optim.Adam, fused=True, amsgrad=True)
    for kernel in ({"fused": False}, {"fused": True, "amsgrad": True}):
        made = functools.partial(factory, **kernel)
        expect_as_by_hand(impl, keyed_by_factory(impl, made), without_keys(made), kind)


@pytest.mark.clause("CLIP-083")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("fused", [(True, True), (True, False)])
def test_clipped_step_of_unlike_members(impl: Any, fused: tuple[bool, bool], kind: str) -> None:
    """A clipped step of a combination covers each of its optimizers, whose kernels differ."""

    def combined(params: dict[str, Any]) -> Any:
        first, rest = {"p0": params["p0"]}, {key: params[key] for key in ("p1", "p2")}
        adam = keyed_by_factory(impl, torch_factory(torch.optim.Adam, lr=0.1, eps=0.1, fused=fused[0]))
        sgd = keyed_by_factory(impl, torch_factory(torch.optim.SGD, lr=0.1, momentum=0.9, fused=fused[1]))
        return impl.CombinedOptimizer([("a", adam(first)), ("b", sgd(rest))])

    def plain(params: dict[str, Any]) -> Any:
        adam = torch.optim.Adam([params["p0"]], lr=0.1, eps=0.1)
        sgd = torch.optim.SGD([params["p1"], params["p2"]], lr=0.1, momentum=0.9)
        return types.SimpleNamespace(step=lambda: (adam.step(), sgd.step()))

    expect_as_by_hand(impl, combined, plain, kind, give=give_early_grads)


@pytest.mark.clause("CLIP-083")
@pytest.mark.needs("SGD")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("own", ["first", "last"])
def test_clipped_step_of_own_beside_torch(impl: Any, own: str, kind: str) -> None:
    """A clipped step covers an optimizer of the implementation beside a fused one of torch."""

    def combined(params: dict[str, Any]) -> Any:
        first, rest = {"p0": params["p0"]}, {key: params[key] for key in ("p1", "p2")}
        mine = keyed_by_factory(impl, lambda given: impl.SGD(given, lr=0.1))
        theirs = keyed_by_factory(impl, torch_factory(torch.optim.SGD, lr=0.1, fused=True))
        one, other = (mine, theirs) if own == "first" else (theirs, mine)
        return impl.CombinedOptimizer([("a", one(first)), ("b", other(rest))])

    expect_as_by_hand(
        impl, combined, lambda params: torch.optim.SGD(params.values(), lr=0.1), kind, give=give_early_grads
    )


@pytest.mark.clause("CLIP-083")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("algorithm", list(OWN_INNER))
def test_clipped_step_of_own(impl: Any, algorithm: str, kind: str, dtype: str) -> None:
    """A clipped step of an optimizer of the implementation equals clipping by hand, then its step."""

    def factory(params: Any) -> Any:
        return getattr(impl, algorithm)(params, lr=0.1, **OWN_INNER[algorithm])

    expect_as_by_hand(impl, keyed_by_factory(impl, factory), without_keys(factory), kind, dtype)


@pytest.mark.clause("CLIP-083")
@pytest.mark.needs("{algorithm}", "{algorithm}.decay")
@pytest.mark.parametrize("algorithm", ["SGD", "Adagrad"])
def test_clipped_step_with_decoupled_decay(impl: Any, algorithm: str) -> None:
    """A clipped step with decoupled decay, also of a strided parameter, equals clipping by hand."""

    def factory(params: Any) -> Any:
        for param in params[:1]:
            param.data = torch.stack([param.data, param.data], dim=1)[:, 0]
        return getattr(impl, algorithm)(params, lr=0.1, **DECOUPLED_DECAY)

    expect_as_by_hand(impl, keyed_by_factory(impl, factory), without_keys(factory), "NORM")


@pytest.mark.clause("CLIP-083")
@pytest.mark.needs("{algorithm}", "{algorithm}.rows")
@pytest.mark.parametrize("algorithm", ["SGD", "Adagrad"])
def test_clipped_step_of_nonzero_rows(impl: Any, algorithm: str) -> None:
    """A clipped step of rows whose gradient is not zero, in the second group, equals clipping by hand."""

    def factory(params: Any) -> Any:
        groups = [{"params": params[1:]}, {"params": params[:1], "rows": "nonzero"}]
        return getattr(impl, algorithm)(groups, lr=0.1, weight_decay=0.5)

    def give(params: dict[str, Any], step: int) -> None:
        give_late_grads(params, step)
        if params["p0"].grad is not None:
            params["p0"].grad[1] = 0.0

    expect_as_by_hand(impl, keyed_by_factory(impl, factory), without_keys(factory), "NORM", give=give)


class Doubling(torch.optim.Adam):
    """Doubles each gradient before the step."""

    def step(self, closure: Any = None) -> Any:
        """Step with doubled gradients."""
        double_gradients(self)
        return super().step(closure)


def double_gradients(optimizer: Any, *_: Any) -> None:
    """Double each gradient in place."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.grad is not None:
                param.grad.mul_(2.0)


def halve_weights(optimizer: Any, *_: Any) -> None:
    """Halve each parameter in place."""
    with torch.no_grad():
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.mul_(0.5)


@pytest.mark.clause("CLIP-084")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("where", ["pre-hook", "post-hook", "replaced", "overridden", "grad_scale"])
def test_clipping_around_hooks(impl: Any, where: str, kind: str) -> None:
    """Hooks of the wrapped optimizer, and a replaced step, take effect on clipped gradients."""
    torch_factory(torch.optim.Adam, fused=True)

    def factory(params: Any) -> Any:
        cls = Doubling if where == "overridden" else torch.optim.Adam
        made = cls(params, lr=0.1, eps=0.1, fused=True)
        if where == "pre-hook":
            made.register_step_pre_hook(double_gradients)
        elif where == "post-hook":
            made.register_step_post_hook(halve_weights)
        elif where == "replaced":
            inner = made.step

            def doubled(closure: Any = None) -> Any:
                double_gradients(made)
                return inner(closure)

            made.step = doubled  # type: ignore[method-assign]
        elif where == "grad_scale":
            made.grad_scale, made.found_inf = tensor(2.0), tensor(0.0)  # type: ignore[attr-defined]
        return made

    expect_as_by_hand(impl, keyed_by_factory(impl, factory), without_keys(factory), kind)


@pytest.mark.clause("CLIP-083")
@pytest.mark.parametrize(("kind", "inner"), [("NORM", "VALUE"), ("VALUE", "NORM")])
@pytest.mark.parametrize("fused", [False, True])
def test_clipped_step_around_another(impl: Any, fused: bool, kind: str, inner: str) -> None:
    """Around another clipping, a clipped step clips first, and the step inside clips what is left."""
    bound = CLIPPED_TO / 8
    keyed = keyed_by_factory(impl, torch_factory(torch.optim.SGD, lr=0.1, momentum=0.5, fused=fused))

    def clipped(params: dict[str, Any]) -> Any:
        return impl.GradientClippingOptimizer(keyed(params), impl.GradientClipping[inner], bound)

    def plain(params: dict[str, Any]) -> Any:
        sgd = torch.optim.SGD(params.values(), lr=0.1, momentum=0.5)

        def step() -> None:
            if inner == "VALUE":
                torch.nn.utils.clip_grad_value_(params.values(), bound)
            else:
                torch.nn.utils.clip_grad_norm_(params.values(), bound)
            sgd.step()

        return types.SimpleNamespace(step=step)

    expect_as_by_hand(impl, clipped, plain, kind, give=give_early_grads)


@pytest.mark.clause("CLIP-084")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("when", ["pre", "post"])
def test_clipping_with_global_hooks(impl: Any, when: str, kind: str) -> None:
    """Hooks of all optimizers run once per step of the wrapped optimizer, on clipped gradients."""
    factory = torch_factory(torch.optim.Adam, lr=0.1, eps=0.1, fused=True)
    ran: list[Any] = []

    def hook(optimizer: Any, *_: Any) -> None:
        if type(optimizer) is torch.optim.Adam:
            ran.append(optimizer)
            (double_gradients if when == "pre" else halve_weights)(optimizer)

    register = getattr(torch_hooks, f"register_optimizer_step_{when}_hook")
    handle = register(hook)
    try:
        expect_as_by_hand(impl, keyed_by_factory(impl, factory), without_keys(factory), kind)
    finally:
        handle.remove()
    expect_equal(len(ran), 2 * len(SCALES_OF_STEPS), "calls of a global hook, here and by hand")


@pytest.mark.clause("CLIP-083", "CLIP-044")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_tracked_norm_of_a_clipped_step(impl: Any, norm_type: float, kind: str) -> None:
    """Each exponent gives the norm before clipping and the clipped step, also with a fused kernel."""
    factory = torch_factory(torch.optim.Adam, lr=0.1, eps=0.1, fused=True)
    norms = expect_as_by_hand(
        *(impl, keyed_by_factory(impl, factory), without_keys(factory), kind),
        norm_type=norm_type,
        track_grad_norm=True,
    )
    for seen, wanted in norms:
        error = abs(float(seen) - wanted)
        expect(error <= 1e-4 * wanted, f"the norm {wanted}", float(seen))


@pytest.mark.clause("CLIP-015")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("scale", [3e38, 1e-25])
def test_clipped_step_of_extreme_gradients(impl: Any, scale: float, fused: bool) -> None:
    """A clipped step is right if squares, or the norm, are out of the range of float32."""
    params = inner_weights()
    bound = 0.1 * min(scale, 1e30)
    inner = keyed_by_factory(impl, torch_factory(torch.optim.SGD, lr=1.0 / bound, fused=fused))(params)
    clipped = impl.GradientClippingOptimizer(inner, clipping=impl.GradientClipping.NORM, max_gradient=bound)
    before = [exactly(param) for param in params.values()]
    set_grads(params, scale=scale)
    exact = [exactly(param.grad) for param in params.values()]
    norm = float(torch.cat([grad.flatten() for grad in exact]).norm())
    clipped.step()
    moved = [start - exactly(param) for param, start in zip(params.values(), before, strict=True)]
    length = float(torch.cat([one.flatten() for one in moved]).norm())
    expect(length <= 1 + 1e-5, "a step no longer than the bound allows, which is 1", length)
    for seen, grad in zip(moved, exact, strict=True):
        error = float((seen - grad / norm).abs().max()) if scale > 1 else 0.0
        expect(error <= 1e-5, "a step along the clipped gradient within 1e-5", error)


@pytest.mark.clause("CLIP-084")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_clipping_after_a_step_that_raised(impl: Any, kind: str) -> None:
    """A step that raises leaves nothing behind: the next step clips by its own gradients."""

    class Stop(Exception):  # noqa: N818 - an interruption
        pass

    def stop(*_: Any) -> None:
        raise Stop

    made, adam = [], torch_factory(torch.optim.Adam, lr=0.1, eps=0.1, fused=True)

    def factory(params: Any) -> Any:
        made.append(adam(params))
        return made[-1]

    params = inner_weights()
    clipped = impl.GradientClippingOptimizer(
        keyed_by_factory(impl, factory)(params), clipping=impl.GradientClipping[kind], max_gradient=CLIPPED_TO
    )
    handle = made[0].register_step_post_hook(stop)
    give_early_grads(params, 2)
    expect_raises(clipped.step, Stop, expected="the error of the hook")
    handle.remove()
    others = {key: torch.nn.Parameter(param.detach().clone()) for key, param in params.items()}
    by_hand = torch.optim.Adam(list(others.values()), lr=0.1, eps=0.1)
    by_hand.load_state_dict(copy.deepcopy(made[0].state_dict()))
    for some in (params, others):
        give_early_grads(some, 0)
    clipped.step()
    clip_by_hand(others, kind, 2.0)
    by_hand.step()
    for key, wanted in others.items():
        error = float((exactly(params[key]) - exactly(wanted)).abs().max())
        expect(error <= 4e-6, f"{key} within 4e-6 of clipping by hand", error)


@pytest.mark.clause("CLIP-083")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_non_finite_norm(impl: Any, bad: float, fused: bool) -> None:
    """The kernel does not change how a gradient that is not finite is clipped."""
    results: list[Any] = []
    for fast in (False, fused):
        params = inner_weights()
        inner = keyed_by_factory(impl, torch_factory(torch.optim.SGD, lr=0.1, fused=fast))(params)
        kind = impl.GradientClipping.NORM
        clipped = impl.GradientClippingOptimizer(inner, clipping=kind, max_gradient=CLIPPED_TO)
        give_late_grads(params, 1)
        params["p0"].grad[1] = bad
        try:
            clipped.step()
        except Exception as error:
            results.append(type(error).__name__)
        else:
            results.append([exactly(param).isfinite().tolist() for param in params.values()])
    expect_equal(results[1], results[0], "finite weights with and without a fused kernel")


def expect_versions_after_clipping(impl: Any, factory: Any, kind: str) -> None:
    """Expect graphs that saved a parameter of each of two groups, or its state, to raise after a step."""
    params, made = inner_weights(), []

    def with_groups(listed: Any) -> Any:
        made.append(factory([{"params": [one]} for one in listed]))
        return made[0]

    inner = keyed_by_factory(impl, with_groups)(params)
    clipping = getattr(impl.GradientClipping, kind)
    clipped = impl.GradientClippingOptimizer(inner, clipping=clipping, max_gradient=CLIPPED_TO)
    give_early_grads(params, 0)
    clipped.step()
    saved = {key: (param * param).sum() for key, param in params.items()}
    one = tensor([1.0]).requires_grad_()
    for key, param in params.items():
        for name, state in made[0].state[param].items():
            if name != "step":
                saved[f"{name} of {key}"] = (one * state).sum()
    give_early_grads(params, 1)
    clipped.step()
    for what, graph in saved.items():
        expected = f"RuntimeError: {what} was modified after it was saved"
        expect_raises(graph.backward, RuntimeError, expected=expected)


@pytest.mark.clause("CLIP-087")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("inner", ["Adam", "SGD-momentum", "Adagrad"])
def test_versions_after_clipping(impl: Any, inner: str, kind: str) -> None:
    """A graph that saved a parameter or its state before a clipped step of torch's optimizer raises."""
    cls, options = INNER[inner]  # with fused=True, torch's own kernels change no version
    expect_versions_after_clipping(impl, torch_factory(cls, lr=0.1, **options), kind)


@pytest.mark.clause("CLIP-087")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("algorithm", list(OWN_INNER))
def test_versions_after_clipping_of_own(impl: Any, algorithm: str, kind: str) -> None:
    """The same holds for a clipped step of an optimizer of the implementation."""

    def factory(params: Any) -> Any:
        return getattr(impl, algorithm)(params, lr=0.1, **OWN_INNER[algorithm])

    expect_versions_after_clipping(impl, factory, kind)
