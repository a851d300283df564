"""Try whether a class takes the first steps of an algorithm: a name alone does not say what a class is."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from keyedopt.conformance.golden.formulas import variants
from keyedopt.conformance.results.untrusted import error_text, one_line
from keyedopt.conformance.suite.support.trajectories import TRAJECTORIES, in_variant
from keyedopt.conformance.targets.implementation import Implementation

#: How far a weight may be from the exact one, relative to the longest way of one: an optimizer in float32 is
#: within 1e-4 after 24 steps, where AdamP is 1e-2 from Adam.
TOLERANCE = 1e-3


def first_steps(about: Implementation, algorithm: str) -> tuple[str | None, str]:
    """Return the variant of an algorithm whose first steps a class takes, or None, and what it does instead.

    The plain formula is the variant ``""``. The steps are without decay, and with it if the class has the
    option. Only weights are compared, and roughly: this tells algorithms apart, and judges none.
    """
    kinds = ["plain", "decay"] if not about.lacks(f"{algorithm}.weight_decay") else ["plain"]
    found = [TRAJECTORIES[name] for kind in kinds if (name := f"{algorithm}-{kind}") in TRAJECTORIES]
    try:
        seen = [_train(about, algorithm, made) for made in found]
    except Exception as error:
        return None, f"a step with it raises {one_line(error_text(error), 200)}"
    for variant in ("", *variants(algorithm)):
        if all(map(partial(_follows, variant), found, seen)):
            return variant, ""
    return None, "its first steps are not those of the formula"


def step_error(about: Implementation, algorithm: str) -> str:
    """Return the error of a step of a class, or an empty string if it takes one."""
    weight = torch.nn.Parameter(torch.ones(4, 3))
    weight.grad = torch.ones(4, 3)
    try:
        getattr(about.surface(), algorithm)([weight]).step()
    except Exception as error:
        return one_line(error_text(error), 200)
    return ""


def _follows(variant: str, made: Mapping[str, Any], seen: Mapping[str, torch.Tensor]) -> bool:
    """Return whether weights, by step, are roughly those of a trajectory in a variant."""
    other = in_variant(made, variant, "float64", by_bound=False)
    start = _weight(made)
    exact = {step: _exact(other, step) for step in seen}
    return all((seen[step] - exact[step]).abs().max() <= _allowed(start, exact[step]) for step in seen)


def _train(about: Implementation, algorithm: str, made: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the weights after the steps of which `made` has exact values, by the number of the step."""
    weight = torch.nn.Parameter(_weight(made).float())
    optimizer = getattr(about.surface(), algorithm)([weight], **made["options"])
    seen = {}
    for number, step in enumerate(made["steps"], 1):
        weight.grad = torch.tensor(step["grads"]) * made["unit"]
        optimizer.step()
        if str(number) in made["after"]:
            seen[str(number)] = weight.detach().double().clone()
    return seen


def _weight(made: Mapping[str, Any]) -> torch.Tensor:
    return torch.tensor(made["weight"], dtype=torch.float64) / 64


def _exact(made: Mapping[str, Any], step: str) -> torch.Tensor:
    return torch.tensor(made["after"][step]["weight"], dtype=torch.float64).reshape(len(made["weight"]), -1)


def _allowed(start: torch.Tensor, exact: torch.Tensor) -> float:
    return TOLERANCE * float((exact - start).abs().max())
