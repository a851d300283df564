"""The options of the algorithms: two values of each that lead to different weights."""

from typing import Any

from keyedopt.conformance.suite.support.described import OTHER
from keyedopt.conformance.suite.support.inputs import set_grads

ADAMS = ("Adam", "AdamW", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB")
ADAGRADS = ("Adagrad", "RowWiseAdagrad")
#: Two values of an option that lead to different weights.
TWO: dict[str, tuple[Any, Any]] = {
    "lr": (0.1, 0.25),
    "betas": ((0.9, 0.999), (0.5, 0.75)),
    "eps": (1e-8, 8.0),  # more than any root, as some formulas take the larger of both
    "momentum": (0.5, 0.75),
    "dampening": (0.0, 0.25),
    "nesterov": (False, True),
    "lr_decay": (0.0, 0.5),
    "initial_accumulator_value": (0.0, 0.25),
    "eta": (1e-3, 0.25),
    "maximize": (False, True),
    "max_norm": (None, 0.5),
    "lr_power": (-0.5, -0.75),
    "l1": (0.0, 0.5),
    "l2": (0.0, 0.5),
    "l2_shrinkage": (0.0, 0.5),
    "beta": (0.0, 0.5),
    "decay": ("l2", "decoupled"),
    "decoupled_weight_decay": (False, True),
    "rows": ("given", "nonzero"),
    "eps_placement": ("inside_denominator", "before_bias_correction"),
    "bias_correction": ("global", "per_row"),
}
#: The options of each algorithm beside lr and weight_decay.
OTHER_OPTIONS = {
    "SGD": "momentum dampening nesterov maximize decay rows",
    "Adagrad": "eps lr_decay initial_accumulator_value maximize decay rows",
    "RowWiseAdagrad": "eps lr_decay initial_accumulator_value maximize max_norm decay rows",
    "Adam": "betas eps maximize eps_placement bias_correction decay decoupled_weight_decay rows",
    "AdamW": "betas eps maximize eps_placement bias_correction rows",
    "PartialRowWiseAdam": "betas eps maximize max_norm bias_correction decay rows",
    "LAMB": "betas eps maximize bias_correction decay rows",
    "PartialRowWiseLAMB": "betas eps maximize max_norm bias_correction decay rows",
    "LarsSGD": "momentum eta maximize rows",
    "Ftrl": "lr_power initial_accumulator_value l1 l2 l2_shrinkage beta maximize rows",
}
#: The algorithms with an argument that selects the kind of decay.
WITH_DECAY = [name for name, options in OTHER_OPTIONS.items() if "decay" in options.split()]
EACH = [(algorithm, option) for algorithm, options in OTHER_OPTIONS.items() for option in options.split()]
#: The algorithms with sums that start at an option.
WITH_START = (*ADAGRADS, "Ftrl")
#: Where sums start.
START = "initial_accumulator_value"
#: What shapes the state when it is made.
AT_FIRST = ("initial_accumulator_value", "bias_correction")
#: What can be set between two steps.
SET = [(algorithm, "lr") for algorithm in (*OTHER_OPTIONS, OTHER)] + [
    pair for pair in EACH if pair[1] not in AT_FIRST
]
#: The options that may be 0. (LARS counts a ratio of 0, as with eta = 0, as 1, and some implementations of it
#: adapt only the rates of weights that decay; an lr_power of 0 makes another formula.)
FROM_ZERO = [
    *((name, "weight_decay") for name in OTHER_OPTIONS if name != "LarsSGD"),
    *(
        pair
        for pair in EACH
        if pair[1] not in ("eta", "lr_power") and isinstance(TWO[pair[1]][1], float | tuple)
    ),
]


def with_required_options(option: str, value: Any) -> dict[str, Any]:
    """Return an option together with the options that it needs to have an effect."""
    more = {"dampening": {"momentum": 0.5}, "nesterov": {"momentum": 0.5}, "eps_placement": {"eps": 0.125}}
    return {"lr": 0.1, "weight_decay": 0.125, **more.get(option, {}), option: value}


def with_zeros(weights: Any, seed: int) -> None:
    """Give each weight a gradient whose third row is zero."""
    set_grads(weights, seed=seed)
    for weight in weights:
        weight.grad[2] = 0


def zero_and_tiny(option: str) -> list[dict[str, Any]]:
    """Return an option as 0 and as a tiny value, each time with the options that it needs."""
    values = (0.0, 1e-30)
    return [with_required_options(option, (one, one) if option == "betas" else one) for one in values]
