"""The variants of a formula that a target follows, if it does not follow the one that it claims."""

import math
from typing import Any

from keyedopt.conformance.golden.formulas import variants
from keyedopt.conformance.suite.support.algorithms import variant_of
from keyedopt.conformance.suite.support.described import held_options
from keyedopt.conformance.suite.support.trajectories import TRAJECTORIES, in_variant, train_along


def hint(impl: Any, algorithm: str, made: Any, dtype: str, beta2: float) -> str:
    """Name the variants, or the state, that a target may claim; return an empty text if none fits."""
    fitting = fitting_variants(impl, algorithm, made, dtype, beta2)
    if not fitting and follows(impl, algorithm, made, variant_of(impl, algorithm), dtype, beta2, state=False):
        return f"its weights follow: if another {names_of_state(made)} is documented, say '' in `state_names`"
    if fitting == [""]:
        return "the formula without a variant fits: claim none"
    names = " and ".join(map(repr, fitting))
    what = f"variants {names} fit: claim one" if fitting[1:] else f"variant {names} fits: claim it"
    return f"the {what} in `variants` if that is documented" if fitting else ""


def fitting_variants(impl: Any, algorithm: str, made: Any, dtype: str, beta2: float) -> list[str]:
    """Return the variants that the target follows here and on the most other trajectories.

    They include those on which it follows the claimed variant, so that a claim makes no other formula fail.
    A variant is left out if one with fewer of its words fits as well.
    """
    others = [one for one in TRAJECTORIES.values() if (one["algorithm"], one["kind"]) == (algorithm, "dense")]

    def followed(words: str) -> set[int]:
        fit = (follows(impl, algorithm, one, words, dtype, beta2, rough=True) for one in others)
        return {index for index, fits in enumerate(fit) if fits}

    claimed = variant_of(impl, algorithm)
    here = [one for one in ("", *variants(algorithm)) if set(one.split()) != set(claimed.split())]
    here = [one for one in here if follows(impl, algorithm, made, one, dtype, beta2)]
    kept = followed(claimed) if here else set()
    fitting = {one: followed(one) for one in here}
    fitting = {one: places for one, places in fitting.items() if places >= kept}
    most = max(map(len, fitting.values()), default=0)
    best = {one: set(one.split()) for one, places in fitting.items() if len(places) == most}
    return [one for one, words in best.items() if not any(less < words for less in best.values())]


def names_of_state(made: Any) -> str:
    """Return the names of the state in a trajectory."""
    return " or ".join(name for name in made["after"]["1"] if name != "weight")


def follows(
    impl: Any,
    algorithm: str,
    made: Any,
    variant: str,
    dtype: str,
    beta2: float,
    state: bool = True,
    rough: bool = False,
) -> bool:
    """Return whether the target follows a trajectory in a variant, whatever it claims, or its weights do.

    Most variants are far off, which is found out without the bound of a dtype: to compute one takes a second.
    """
    held = held_options(impl.adapter, algorithm)

    def judged(oracle: str) -> Any:
        found = in_variant(made, variant, oracle, True, held)
        if not state:
            weights = {step: {"weight": exact["weight"]} for step, exact in found["after"].items()}
            found = {**found, "after": weights}
        return found

    try:
        if dtype != "float64":
            exact = judged("float64")
            unbounded = {step: dict.fromkeys(names, math.inf) for step, names in exact["after"].items()}
            train_along(impl, algorithm, {**exact, "bound": unbounded}, dtype, beta2)
        if dtype == "float64" or not rough:
            train_along(impl, algorithm, judged(dtype), dtype, beta2)
    except Exception:
        return False
    return True
