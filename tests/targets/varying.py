"""Sound optimizers that follow a documented variant of Adam's formula, and claim it: ``varying:no_debias``.

The words of a variant are joined with two underscores.
"""

import functools
from typing import Any

import torch

from keyedopt import reference
from keyedopt.conformance.suite.support.described import DEFAULTS
from keyedopt.conformance.targets.implementation import Implementation


def _rule(words: set[str]) -> Any:
    """Return Adam's rule in a variant, computed in float64."""

    def adam(
        weight: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        *,
        step: float,
        lr: Any,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        maximize: bool,
        **fixed: Any,
    ) -> tuple[torch.Tensor, ...]:
        w, g, m, v = (one.double() for one in (weight, grad, exp_avg, exp_avg_sq))
        g = -g if maximize else g
        if "decoupled" not in words:
            g = g + weight_decay * w
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        first, second = (1.0, 1.0) if "no_debias" in words else (1 - betas[0] ** step, 1 - betas[1] ** step)
        root, over = (v / second).sqrt() + eps, m / first
        if "eps_in_root" in words:
            root = (v / second + eps).sqrt()
        elif "eps_bound" in words:
            root = (v / second).sqrt().clamp(min=eps)
        elif "eps_before" in words:
            root, over = v.sqrt() + eps, over * second**0.5
        moved = w - lr * torch.where(over == 0, 0.0, over / root)
        if "by_itself" in words:
            moved = moved - weight_decay * w
        elif "decay_after" in words:
            moved = moved * (1 - lr * weight_decay)
        elif "decoupled" in words:
            moved = moved - lr * weight_decay * w
        return moved.to(weight), m.to(exp_avg), v.to(exp_avg_sq)

    return adam


@functools.cache
def _class(name: str) -> Any:
    rule = staticmethod(_rule(set(name.removeprefix("Adam_").split("__"))))
    return type("Adam", (reference.Adam,), {"function": rule, "__module__": __name__, "__qualname__": name})


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    if name.startswith("Adam_"):
        return _class(name)
    return Implementation(
        name=name,
        root="keyedopt.reference",
        names={"Adam": f"varying:Adam_{name}"},
        areas=("algorithms",),
        dtypes=("float32", "float64"),
        absent=(
            *("Adam.decay", "Adam.decoupled_weight_decay", "Adam.eps_placement", "Adam.bias_correction"),
            *(algorithm for algorithm in DEFAULTS if algorithm != "Adam"),
        ),
        variants={"Adam": name.replace("__", " ")},
    )
