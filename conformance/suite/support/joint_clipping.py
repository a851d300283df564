"""Helpers for cases that clip the tables of an embedding module, alone or with a dense parameter."""

import warnings
from typing import Any

import torch

from keyedopt.conformance.suite.support.device import tensor
from keyedopt.conformance.suite.support.embedding import ONE_TABLE, collection, jagged
from keyedopt.conformance.suite.support.inputs import parameters
from keyedopt.conformance.suite.support.torch_optimizers import torch_factory


def clipped_unless_refused(impl: Any, optimizer: Any, kind: str, bound: float, **options: Any) -> Any:
    """Put clipping around a fused optimizer; return None if that raises ValueError, which is accepted."""
    try:
        return impl.GradientClippingOptimizer(
            optimizer, getattr(impl.GradientClipping, kind), bound, **options
        )
    except ValueError:
        return None


def mixed_tree(impl: Any, kind: str = "NORM", **options: Any) -> Any:
    """Make a module with a table, a dense parameter, and clipping around both; return whether it warned.

    Clipping is None if it raises ValueError.
    """
    accumulating = {name: value for name, value in options.items() if "accumulate" in name}
    more = {name: value for name, value in options.items() if name not in accumulating}
    chosen = "AccumulateSGD" if accumulating else "SGD"
    module = collection(impl, chosen, {"lr": 1.0, **accumulating}, tables=ONE_TABLE)
    return module, *dense_with_joint_clipping(impl, module.fused_optimizer, kind, **more)


def dense_with_joint_clipping(impl: Any, member: Any, kind: str = "NORM", **options: Any) -> Any:
    """Make a dense parameter, and clipping around it and another member; return whether it warned."""
    params = parameters(1)
    sgd = torch_factory(torch.optim.SGD, lr=1.0, fused=options.pop("fused", False))
    dense = impl.KeyedOptimizerWrapper(params, sgd)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = clipped_unless_refused(impl, impl.CombinedOptimizer([member, dense]), kind, 0.5, **options)
    return params["p0"], whole, bool(caught)


def backpropagate(module: Any, weight: torch.Tensor, rows: Any, grads: Any, dense: Any) -> None:
    """Backpropagate gradients to rows of the table, and add one to the gradient of a dense parameter."""
    (module(jagged({"f": [[row] for row in rows]}))["f"] * tensor(grads)).sum().backward()
    added = tensor(dense)
    weight.grad = added if weight.grad is None else weight.grad + added
