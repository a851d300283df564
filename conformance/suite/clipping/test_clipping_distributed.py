"""Clipping of DTensor and ShardedTensor, and over process groups, on one rank.

On one rank every clause has a simple form, because all shards are local. `test_clipping_ranks` has the cases
for several ranks.
"""

import copy
import math
import warnings
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    error_of,
    expect,
    expect_close,
    expect_equal,
    outcome,
    p_norm,
)
from keyedopt.conformance.suite.support.clipping import local, spread
from keyedopt.conformance.suite.support.device import tensor, zeros
from keyedopt.conformance.suite.support.doubles import clipping, single_rank
from keyedopt.conformance.suite.support.sharded import everyone


def given_grads(**grads: list[float] | None) -> dict[str, Any]:
    """Make parameters of two zeros with these gradients; None for none."""
    params: dict[str, Any] = {}
    for key, grad in grads.items():
        params[key] = torch.nn.Parameter(zeros(2 if grad is None else len(grad)))
        params[key].grad = None if grad is None else tensor(grad)
    return params


@pytest.mark.clause("CLIP-055")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
@pytest.mark.parametrize("placement", ["shard", "replicate"])
@pytest.mark.parametrize("beside", [False, True])
def test_dtensor(impl: Any, kind: str, placement: str, beside: bool) -> None:
    """The gradient of a DTensor parameter is clipped, also beside a plain one, or the step raises."""
    with single_rank():
        params = {"d": torch.nn.Parameter(spread(zeros(2), placement))}
        params["d"].grad = spread(tensor([30.0, -40.0]), placement)
        if beside:
            params["p"] = torch.nn.Parameter(zeros(1))
            params["p"].grad = tensor([120.0])
        optimizer, recorder = clipping(impl, params, kind, 1.0)
        try:
            optimizer.step()
        except (ValueError, TypeError, RuntimeError):
            expect_equal(recorder.received, [], "gradients handed on by a refused step")
            return
        norm = 130.0 if beside else 50.0
        wanted = [30.0 / norm, -40.0 / norm] if kind == "NORM" else [1.0, -1.0]
        seen = local(recorder.received[0][0])
        expect_close(seen, torch.tensor(wanted), "DTensor received gradient")
        if beside:
            wanted = [120.0 / norm] if kind == "NORM" else [1.0]
            expect_close(recorder.received[0][1], torch.tensor(wanted), "plain received gradient")


@pytest.mark.clause("CLIP-056")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
@pytest.mark.parametrize("placement", ["shard", "replicate"])
def test_norm_of_a_dtensor(impl: Any, kind: str, placement: str) -> None:
    """The tracked norm includes the gradients of DTensor parameters."""
    with single_rank():
        params = {"d": torch.nn.Parameter(spread(zeros(2), placement))}
        params["d"].grad = spread(tensor([30.0, 40.0]), placement)
        optimizer, _ = clipping(impl, params, kind, 1.0, track_grad_norm=True)
        optimizer.step()
        norm = optimizer.last_total_grad_norm
        expect(norm is not None, "a norm of 50", norm)
        expect_close(local(norm), 50.0, "norm")
        params["d"].grad = spread(tensor([6.0, 8.0]), placement)
        computed, _ = optimizer.compute_total_grad_norm()
        expect_close(local(computed), 10.0, "norm that is computed")


@pytest.mark.clause("CLIP-057")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_sharded_tensor_passes(impl: Any, kind: str) -> None:
    """A ShardedTensor parameter, which has no gradient, does not affect clipping of the others."""
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard

    with single_rank(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shard = Shard.from_tensor_and_offsets(zeros(2, 2), [0, 0], 0)
        table = init_from_local_shards([shard], 2, 2)
        dense: Any = torch.nn.Parameter(zeros(2))
        dense.grad = tensor([0.0, 40.0])
        received: list[torch.Tensor] = []

        class Listed(impl.KeyedOptimizer):  # type: ignore[misc]
            def step(self, closure: Any) -> None:
                received.append(dense.grad.detach().clone())

            def zero_grad(self, set_to_none: bool = False) -> None: ...

        inner = Listed({"t": table, "p": dense}, {}, [{"params": [table, dense]}])
        impl.GradientClippingOptimizer(inner, getattr(impl.GradientClipping, kind), 1.0).step()
        expect_close(received[0], torch.tensor([0.0, 1.0]), "dense received gradient")


@pytest.mark.clause("CLIP-058")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf], ids=["1", "2", "3", "inf"])
@pytest.mark.parametrize("sharded", [["a"], ["a", "b"]], ids=["some", "all"])
@pytest.mark.parametrize("way", ["step", "clip_grad_norm_"])
def test_global_norm(impl: Any, norm_type: float, sharded: list[str], way: str) -> None:
    """Over process groups one norm covers sharded and replicated gradients."""
    with single_rank():
        params = given_grads(a=[3.0, -4.0], b=[12.0, 0.0])
        optimizer, recorder = clipping(
            impl,
            params,
            "NORM",
            1.0,
            norm_type=norm_type,
            enable_global_grad_clip=True,
            param_to_pgs={params[key]: [everyone()] for key in sharded},
        )
        norm = p_norm([3.0, -4.0, 12.0], norm_type)
        if way == "step":
            optimizer.step()
            clipped = recorder.received[0]
            expect_close(optimizer.last_total_grad_norm.float(), norm, "norm", ulps=8)
        else:
            expect_close(optimizer.clip_grad_norm_(), norm, "norm", ulps=8)
            clipped = [param.grad for param in params.values()]
        for seen, grad in zip(clipped, ([3.0, -4.0], [12.0, 0.0]), strict=True):
            wanted = tensor(grad) / (norm + 1e-6)
            expect_close(seen, wanted, "gradient", ulps=8)


@pytest.mark.clause("CLIP-058")
def test_several_groups(impl: Any) -> None:
    """Parameters may be sharded over different process groups, and over several."""
    with single_rank():
        params = given_grads(a=[3.0, 0.0], b=[4.0, 0.0], c=[12.0, 0.0])
        other = torch.distributed.new_group([0])
        groups = {params["a"]: [everyone()], params["b"]: [other], params["c"]: [everyone(), other]}
        optimizer, recorder = clipping(
            impl, params, "NORM", 1.0, enable_global_grad_clip=True, param_to_pgs=groups
        )
        optimizer.step()
        seen = torch.stack([grad[0] for grad in recorder.received[0]])
        expect_close(seen, torch.tensor([3.0, 4.0, 12.0]) / 13.0, "received gradients", ulps=8)


@pytest.mark.clause("CLIP-059")
@pytest.mark.parametrize("norm_type", [2.0, math.inf], ids=["2", "inf"])
@pytest.mark.parametrize("missing", ["sharded", "replicated", "both"])
@pytest.mark.parametrize("empty", [False, True], ids=["none", "empty"])
def test_rank_without_gradients(impl: Any, norm_type: float, missing: str, empty: bool) -> None:
    """A rank whose sharded or replicated gradients are missing or empty completes its step."""
    with single_rank():
        params = given_grads(a=[30.0, 40.0], b=[30.0, 40.0])
        for key, kind in (("a", "sharded"), ("b", "replicated")):
            if missing in (kind, "both"):
                params[key] = torch.nn.Parameter(zeros(0 if empty else 2))
                params[key].grad = zeros(0) if empty else None
        optimizer, recorder = clipping(
            impl,
            params,
            "NORM",
            1.0,
            norm_type=norm_type,
            enable_global_grad_clip=True,
            param_to_pgs={params["a"]: [everyone()]},
        )
        optimizer.step()
        norm = p_norm([30.0, 40.0], norm_type)
        for key, seen in zip(params, recorder.received[0], strict=True):
            if params[key].numel() and params[key].grad is not None:
                wanted = tensor([30.0 / norm, 40.0 / norm])
                expect_close(seen, wanted, f"received gradient of {key!r}")


@pytest.mark.clause("CLIP-060")
@pytest.mark.parametrize("kind", ["VALUE", "NONE"])
def test_value_of_sharded_parameters(impl: Any, kind: str) -> None:
    """VALUE and NONE also work for sharded parameters, or the constructor raises an error."""
    with single_rank():
        params = given_grads(a=[30.0, -40.0], b=[0.5, 12.0])
        groups = {params["a"]: [everyone()]}
        options = {"enable_global_grad_clip": True, "param_to_pgs": groups, "track_grad_norm": True}
        if error_of(lambda: clipping(impl, params, kind, 1.0, **options)):
            expect_equal(kind, "VALUE", "kind that may raise an error")
            return
        optimizer, recorder = clipping(impl, params, kind, 1.0, **options)
        optimizer.step()
        wanted = [[1.0, -1.0], [0.5, 1.0]] if kind == "VALUE" else [[30.0, -40.0], [0.5, 12.0]]
        expect_equal([seen.tolist() for seen in recorder.received[0]], wanted, "gradients")
        norm = p_norm([30.0, -40.0, 0.5, 12.0])
        expect_close(optimizer.last_total_grad_norm.float(), norm, "norm before clipping")


@pytest.mark.clause("CLIP-061")
@pytest.mark.parametrize("enabled", [False, True])
def test_local_without_groups(impl: Any, enabled: bool) -> None:
    """Without process groups the norm is local and needs no torch.distributed."""
    params = given_grads(a=[3.0, 4.0], b=[12.0, 0.0])
    optimizer, recorder = clipping(impl, params, "NORM", 1.0, enable_global_grad_clip=enabled)
    optimizer.step()
    wanted = tensor([3.0, 4.0]) / 13.0
    expect_close(recorder.received[0][0], wanted, "received gradient", ulps=8)


@pytest.mark.clause("CLIP-062")
@pytest.mark.parametrize(
    ("scale", "bound"), [(1.0, 1.0), (100.0, 1.0), (2e-5, 1e-5)], ids=["plain", "large", "small"]
)
def test_global_norm_in_half_precision(impl: Any, scale: float, bound: float) -> None:
    """Over process groups float16 gradients are scaled correctly, also if squares overflow."""
    with single_rank():
        param = torch.nn.Parameter(zeros(2, dtype=torch.float16))
        param.grad = tensor([3.0 * scale, 4.0 * scale], dtype=torch.float16)
        grad = param.grad.tolist()
        optimizer, recorder = clipping(
            impl,
            {"p": param},
            "NORM",
            bound,
            enable_global_grad_clip=True,
            param_to_pgs={param: [everyone()]},
        )
        optimizer.step()
        factor = bound / (p_norm(grad) + 1e-6)
        wanted = torch.tensor([element * factor for element in grad], dtype=torch.float64)
        expect_close(recorder.received[0][0], wanted, "received gradient", ulps=8)


@pytest.mark.clause("CLIP-063")
def test_copy_with_process_groups(impl: Any) -> str:
    """Observe what a deep copy of an optimizer with process groups does."""
    with single_rank():
        params = given_grads(a=[30.0, 40.0])
        optimizer, _ = clipping(
            impl,
            params,
            "NORM",
            1.0,
            enable_global_grad_clip=True,
            param_to_pgs={params["a"]: [everyone()]},
        )

        def copy_and_step() -> list[float]:
            other = copy.deepcopy(optimizer)
            (param,) = other.params.values()
            param.grad = tensor([30.0, 40.0])
            other.step()
            return [round(element, 4) for element in param.grad.tolist()]

        return outcome(copy_and_step)
