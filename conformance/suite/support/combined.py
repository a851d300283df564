"""Helpers for cases of combined optimizers: a combination of two, and all data that a load may change."""

from typing import Any

from keyedopt.conformance.suite.support.inputs import adam, parameter, sgd, train


def combined_pair(impl: Any, dtype: str = "float32", steps: int = 0) -> tuple[Any, list[Any], list[Any]]:
    """Combine Adam (key a) and SGD with momentum (key b), each over a parameter ``p``, and train."""
    params = [parameter(3, dtype=dtype, seed=1), parameter(2, 2, dtype=dtype, seed=2)]
    inner = [adam(impl, {"p": params[0]}), sgd(impl, {"p": params[1]}, momentum=0.9)]
    combined = impl.CombinedOptimizer([("a", inner[0]), ("b", inner[1])])
    train(combined, params, steps)
    return combined, inner, params


def loadable_parts(inner: list[Any], params: list[Any]) -> Any:
    """List all data that a load may change: state, groups and parameters of every optimizer."""
    return [
        [list(optimizer.state.values()) for optimizer in inner],
        [
            {key: value for key, value in group.items() if key != "params"}
            for optimizer in inner
            for group in optimizer.param_groups
        ],
        list(params),
    ]
