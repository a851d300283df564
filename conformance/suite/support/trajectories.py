"""Trainings along the golden trajectories, in the variant of a formula that the target documents."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from keyedopt.conformance.suite.support.algorithms import (
    exact_dtype,
    known_state,
    need_dtype,
    relied_on,
    variant_of,
)
from keyedopt.conformance.suite.support.assertions import Mismatch
from keyedopt.conformance.suite.support.described import CannotRun, MissingName, held_options
from keyedopt.conformance.suite.support.device import as_tensor, tensor
from keyedopt.conformance.suite.support.draws import Steps, measure_trajectory
from keyedopt.conformance.suite.support.measured import Measuring

TRAJECTORIES = json.loads((Path(__file__).parents[2] / "golden" / "trajectories.json").read_text("utf-8"))[
    "trajectories"
]


def golden_trajectories(*names: str) -> dict[str, Any]:
    """Select golden trajectories by name, as arguments of ``parametrize``."""
    chosen = [(TRAJECTORIES[name]["algorithm"], TRAJECTORIES[name]) for name in names]
    return {"argnames": "algorithm, made", "argvalues": chosen, "ids": list(names)}


def special(which: str) -> list[str]:
    """Name the trajectories of every algorithm that are special in the same way."""
    return [name for name in TRAJECTORIES if name.partition("-")[2] == which]


def formula(impl: Any, algorithm: str, made: Any) -> None:
    """Train along a trajectory in the most precise dtype, and in float32, which may have kernels of its own.

    Precision has other clauses. A target may compute the bias correction in float32, where it cancels. If it
    follows other variants of the formula, the failure names them.
    """
    best = exact_dtype(impl)
    for dtype in dict.fromkeys((best, "float32")):
        if dtype not in impl.dtypes:
            continue
        how = (dtype, corrected_beta(algorithm, made))
        try:
            follow_trajectory(impl, algorithm, made, *how, steps=None if dtype == best else 8)
        except Mismatch as error:
            with contextlib.suppress(ImportError):  # a script that repeats the case has no other trajectories
                from keyedopt.conformance.suite.support.variants import hint

                if text := hint(impl, algorithm, made, *how):
                    error.add(text)
            raise


def corrected_beta(algorithm: str, made: Any) -> float:
    """Return the beta2 of an algorithm that corrects the bias of its second moment; else 0."""
    corrects = "Adam" in algorithm or "LAMB" in algorithm
    return float(made["options"].get("betas", (0.9, 0.999))[1]) if corrects else 0.0


def follow_trajectory(
    impl: Any, algorithm: str, made: Any, dtype: str, beta2: float | None = None, steps: int | None = None
) -> dict[str, Any]:
    """Train along a trajectory in the variant that the target documents, and return the errors.

    Every known tensor is expected within its budget; see `measure_golden`. `steps` says how many steps to
    take; None takes all.
    """
    need_dtype(impl, algorithm, dtype)
    held = held_options(impl.adapter, algorithm)
    made = in_variant(made, variant_of(impl, algorithm), dtype, beta2 is not None, held)
    return train_along(impl, algorithm, {**made, "steps": made["steps"][:steps]}, dtype, beta2)


def in_variant(
    made: Any, variant: str, dtype: str, by_bound: bool, held: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    """Return a trajectory with the oracle of a variant, which is computed now, and what it takes to judge it.

    Args:
        made: the trajectory as it is stored, or in the variant.
        variant: words of `keyedopt.conformance.golden.formulas.VARIANTS`, or an empty string.
        dtype: the tested dtype.
        by_bound: whether the bound of every order is needed, or the worst error of some.
        held: options that the target has at these values, and takes no other.

    Raises:
        CannotRun: the norms are those of whole tables, and the gradients list rows; or a sound training
            overflows the dtype.
    """
    if (variant, held) == (made.get("variant", ""), made.get("held", {})):
        return made
    from keyedopt.conformance.golden.oracle import bound, budget, oracle  # imports mpmath

    algorithm = made["algorithm"]
    if "per_tensor" in variant and made["kind"] == "sparse":
        raise CannotRun(f"{algorithm} {variant} has no rows")
    given = made["options"]
    made = oracle({**made, "variant": variant, "held": dict(held), "options": {**held, **given}})
    if dtype != "float64" and by_bound:
        made["bound"] = bound(made)
    elif dtype != "float64":
        worst = budget(made, dtype)
        if worst is None:
            raise CannotRun(f"a sound {algorithm} {variant} overflows {dtype}")
        made["worst"] = {dtype: worst}
    return {**made, "options": given}


def train_along(impl: Any, algorithm: str, made: Any, dtype: str, beta2: float | None) -> dict[str, Any]:
    """Train along a trajectory in the variant that it has; see `follow_trajectory`."""
    options = relied_on(impl, algorithm) | made["options"]
    for option in made["options"]:
        if impl.lacks(f"{algorithm}.{option}"):
            raise MissingName(f"{algorithm} has no {option}", name=f"{algorithm}.{option}")

    def train(start: Any, steps: Steps, kind: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
        weight = torch.nn.Parameter(as_tensor(start, dtype=kind))
        optimizer = getattr(impl, algorithm)([weight], **options)
        for rows, given in steps:
            grads = as_tensor(given, dtype=kind).clone()  # a step may modify the gradient
            if rows:
                listed = tensor([rows])
                grads = torch.sparse_coo_tensor(listed, grads, weight.shape, check_invariants=True)
            weight.grad = grads
            optimizer.step()
            state = known_state(impl, algorithm, optimizer, weight, made["after"]["1"])
            yield {"weight": weight.detach(), **state}

    with Measuring({"errors": []}) as measuring:
        measure_trajectory(measuring, made, dtype, train, beta2, "float64" in impl.dtypes)
    return measuring.record
