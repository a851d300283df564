"""Clipping over process groups of several ranks that all have the same gradients.

With n ranks the elements of a sharded gradient count n times, and those of a replicated gradient once.
"""

import copy
import math
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import error_of, expect, expect_close, expect_equal, p_norm
from keyedopt.conformance.suite.support.clipping import local, spread, zeros_with_grads
from keyedopt.conformance.suite.support.device import tensor, zeros
from keyedopt.conformance.suite.support.doubles import clipping
from keyedopt.conformance.suite.support.inputs import sgd
from keyedopt.conformance.suite.support.mirror import mirrored_ranks
from keyedopt.conformance.suite.support.sharded import everyone

HERE = [3.0, -4.0]
THERE = [12.0, 0.0]
#: How a gradient lies on a mesh, a word for each dimension.
ON_MESHES = [
    *("shard", "replicate", "partial"),
    *("replicate shard", "shard shard", "partial replicate", "shard partial"),
]


@pytest.mark.clause("CLIP-058")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf], ids=["1", "2", "3", "inf"])
@pytest.mark.parametrize("sharded", [["p0"], ["p1"], ["p0", "p1"]], ids=["first", "second", "all"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_global_norm_over_ranks(impl: Any, norm_type: float, sharded: list[str], ranks: int) -> None:
    """The norm counts the shards of all ranks, and replicated gradients once."""
    with mirrored_ranks(ranks):
        params = zeros_with_grads(HERE, THERE)
        optimizer, recorder = clipping(
            impl,
            params,
            "NORM",
            1.0,
            norm_type=norm_type,
            enable_global_grad_clip=True,
            param_to_pgs={params[key]: [everyone()] for key in sharded},
        )
        optimizer.step()
        everywhere = [
            element
            for key, grad in zip(params, (HERE, THERE), strict=True)
            for element in grad * (ranks if key in sharded else 1)
        ]
        norm = p_norm(everywhere, norm_type)
        expect_close(optimizer.last_total_grad_norm.float(), norm, "norm", ulps=8)
        for seen, grad in zip(recorder.received[0], (HERE, THERE), strict=True):
            expect_close(seen, torch.tensor(grad) / (norm + 1e-6), "received gradient", ulps=8)


@pytest.mark.clause("CLIP-089")
def test_copy_with_process_groups(impl: Any) -> None:
    """A deep copy of an optimizer with process groups clips by the norm over them, or is refused."""
    with mirrored_ranks(2):
        params = zeros_with_grads(HERE, THERE)
        optimizer = impl.GradientClippingOptimizer(
            sgd(impl, params),
            clipping=impl.GradientClipping.NORM,
            max_gradient=1.0,
            enable_global_grad_clip=True,
            param_to_pgs={param: [everyone()] for param in params.values()},
        )
        try:
            copied = copy.deepcopy(optimizer)
        except Exception:
            return
        for param, grad in zip(copied.params.values(), (HERE, THERE), strict=True):
            param.grad = tensor(grad)
        copied.step()
        norm = p_norm((*HERE, *THERE) * 2)
        for param, grad in zip(copied.params.values(), (HERE, THERE), strict=True):
            expect_close(param.grad, torch.tensor(grad) / (norm + 1e-6), "clipped gradient", ulps=8)


@pytest.mark.clause("CLIP-058")
def test_groups_of_other_ranks(impl: Any) -> None:
    """Each parameter is reduced over each of its own process groups and over no others."""
    with mirrored_ranks(2):
        params = zeros_with_grads([1.0], [2.0], [4.0], [8.0])
        both, alone = torch.distributed.new_group([0, 1]), torch.distributed.new_group([0])
        groups = {params["p0"]: [everyone()], params["p1"]: [everyone(), both], params["p2"]: [alone]}
        optimizer, recorder = clipping(
            impl, params, "NORM", 1.0, enable_global_grad_clip=True, param_to_pgs=groups
        )
        optimizer.step()
        norm = math.sqrt(2 * 1.0 + 4 * 4.0 + 16.0 + 64.0)
        seen = torch.cat(recorder.received[0])
        wanted = tensor([1.0, 2.0, 4.0, 8.0]) / (norm + 1e-6)
        expect_close(seen, wanted, "received gradients", ulps=8)


@pytest.mark.clause("CLIP-061")
@pytest.mark.parametrize("given", ["nothing", "flag", "groups"])
def test_local_norm_among_ranks(impl: Any, given: str) -> None:
    """Without the flag, or without process groups, the norm is local to this rank."""
    with mirrored_ranks(2):
        params = zeros_with_grads(HERE, THERE)
        choices: dict[str, dict[str, Any]] = {
            "nothing": {},
            "flag": {"enable_global_grad_clip": True},
            "groups": {"param_to_pgs": {params["p0"]: [everyone()]}},
        }
        optimizer, recorder = clipping(impl, params, "NORM", 1.0, **choices[given])
        optimizer.step()
        expect_close(recorder.received[0][0], torch.tensor(HERE) / 13.0, "received gradient", ulps=8)


@pytest.mark.clause("CLIP-060")
@pytest.mark.parametrize("kind", ["VALUE", "NONE"])
def test_norm_of_other_kinds_over_ranks(impl: Any, kind: str) -> None:
    """The tracked norm covers all ranks for the other kinds too, or they raise an error."""
    with mirrored_ranks(2):
        params = zeros_with_grads(HERE, THERE)
        groups = {params["p0"]: [everyone()]}
        options = {"enable_global_grad_clip": True, "param_to_pgs": groups, "track_grad_norm": True}
        if error_of(lambda: clipping(impl, params, kind, 1.0, **options)):
            expect_equal(kind, "VALUE", "kind that may raise an error")
            return
        optimizer, _ = clipping(impl, params, kind, 1.0, **options)
        optimizer.step()
        expect_close(optimizer.last_total_grad_norm.float(), p_norm([*HERE, *HERE, *THERE]), "norm", ulps=8)


@pytest.mark.clause("CLIP-055", "CLIP-056")
@pytest.mark.parametrize("norm_type", [2.0, math.inf], ids=["2", "inf"])
@pytest.mark.parametrize("placement", ON_MESHES)
def test_dtensor_over_ranks(impl: Any, norm_type: float, placement: str) -> None:
    """A DTensor counts as the full tensor: shards, copies or sums of all ranks; or the step raises."""
    words = placement.split()
    with mirrored_ranks(2 ** len(words)):
        params: dict[str, Any] = {
            "d": torch.nn.Parameter(spread(zeros(2), placement.replace("partial", "replicate"), 2)),
            **zeros_with_grads(THERE),
        }
        params["d"].grad = spread(tensor(HERE), placement, 2)
        optimizer, recorder = clipping(impl, params, "NORM", 1.0, norm_type=norm_type, track_grad_norm=True)
        try:
            optimizer.step()
        except (ValueError, TypeError, RuntimeError):
            expect_equal(recorder.received, [], "gradients handed on by a refused step")
            return
        full = [element * 2 ** words.count("partial") for element in HERE]
        norm = p_norm([*full * 2 ** words.count("shard"), *THERE], norm_type)
        expect(optimizer.last_total_grad_norm is not None, "a norm", None)
        expect_close(local(optimizer.last_total_grad_norm).float(), norm, "norm", ulps=8)
        for seen, grad in zip(recorder.received[0], (full, THERE), strict=True):
            summands = 2 ** sum(kind.is_partial() for kind in getattr(seen, "placements", ()))
            wanted = tensor(grad) / (norm + 1e-6)
            expect_close(local(seen) * summands, wanted, "received gradient", ulps=8)
