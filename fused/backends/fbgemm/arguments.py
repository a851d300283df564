"""The arguments of FBGEMM for a step, or why FBGEMM is not used, by formula, options, dtype and device.

FBGEMM 1.8 follows the formulas of the specification, except for differences that are refused or compensated
here. Compensated:

- FBGEMM reads the learning rate in a forward pass, and counts forward passes: here both are arguments of each
  update;
- FBGEMM has no ``lr_decay``: the argument is the decayed learning rate;
- FBGEMM has no ``maximize``: gradients are negated;
- on the CPU FBGEMM adds the gradients of a row one by one in float32, which is ten ULP off for some hundred
  gradients: the argument is their sum;
- FBGEMM adds ε only after bias correction. With ε before it, as in SparseAdam,
  ``√c₂/c₁ · m / (√v + ε) = m̂ / (√v̂ + ε/√c₂)``, where ``c₂ = 1 − β₂ᵗ``: the argument is ``ε/√c₂``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from keyedopt.fused.backends.interface import Step

#: The FBGEMM lookup whose backward pass has an algorithm, by device.
LOOKUPS = {
    "cpu": {"sgd": "sgd", "adagrad": "adagrad", "rowwise_adagrad": "rowwise_adagrad"},
    "cuda": {
        "sgd": "sgd",
        "adagrad": "adagrad",
        "rowwise_adagrad": "rowwise_adagrad",
        "adam": "adam",
        "sparse_adam": "adam",
        "partial_rowwise_adam": "partial_rowwise_adam",
    },
}
#: The algorithms that FBGEMM has on CUDA but that differ from the specification, with the clause.
OTHERWISE = {
    "lamb": "a row of zeros never moves, and one without gradient becomes NaN (ALGO-032, FUSED-037)",
    "partial_rowwise_lamb": "a row of zeros never moves, and one without gradient becomes NaN "
    "(ALGO-032, FUSED-037)",
    "lars_sgd": "a row of zeros never moves, and one without gradient becomes NaN (ALGO-032, FUSED-037)",
}
#: FBGEMM's numbers of the modes of weight decay.
DECAY = {"none": 0, "l2": 1, "decoupled": 2}
DTYPES = (torch.float32, torch.float16)
#: The widest rows on CUDA, and the number of which their width must be a multiple.
WIDEST, UNIT = 1024, 4


@dataclass(frozen=True)
class Arguments:
    """The arguments of an FBGEMM lookup and its update.

    Args:
        lookup: the name of the lookup whose backward pass has the algorithm.
        rate: the learning rate.
        iteration: the count of steps, from 1.
        negate: whether gradients are to be negated.
        options: of FBGEMM's `OptimizerArgs`; missing ones are off.
    """

    lookup: str
    rate: float
    iteration: int
    negate: bool
    options: Mapping[str, float | int] = field(default_factory=dict)


def refusal(step: Step, dtype: torch.dtype, device: str, width: int = UNIT) -> str:
    """Return why FBGEMM is not used for a step; empty if it is.

    Args:
        step: the formula and its options; neither rate nor count is read.
        dtype: of the weights.
        device: its type.
        width: of the rows.
    """
    if device not in LOOKUPS:
        return f"FBGEMM has the CPU and CUDA, not {device}"
    if dtype not in DTYPES:
        return f"FBGEMM has float32 and float16, not {dtype}"
    if device == "cuda" and not (0 < width <= WIDEST and width % UNIT == 0):
        return f"on CUDA FBGEMM takes rows of a multiple of {UNIT} elements, up to {WIDEST}, not {width}"
    where = "on the CPU" if device == "cpu" else "on CUDA"
    if step.algorithm not in LOOKUPS[device]:
        if device == "cuda" and step.algorithm in OTHERWISE:
            return f"in FBGEMM's {step.algorithm} {OTHERWISE[step.algorithm]}"
        return f"{where} FBGEMM has {', '.join(LOOKUPS[device])}, not {step.algorithm}"
    if step.momentum:
        return "FBGEMM's SGD has no momentum"
    if step.seed is not None and dtype is not torch.float32:
        return f"{where} FBGEMM " + (
            "does not round stochastically"
            if device == "cpu"
            else "rounds by draws of the device, not by a seed"
        )
    if step.algorithm != "sgd" and step.eps < torch.finfo(torch.float32).tiny:
        return "without eps FBGEMM makes NaN of a row that never had a gradient (ALGO-033)"
    return _decay_refusal(step, device, where) or _limit_refusal(step, device, where)


def _decay_refusal(step: Step, device: str, where: str) -> str:
    if not step.weight_decay or step.decay == "none":
        return ""
    if device == "cpu" or step.algorithm in ("sgd", "adagrad"):
        return f"{where} FBGEMM's {step.algorithm} ignores weight decay"
    if step.algorithm != "rowwise_adagrad" and step.decay != "decoupled":
        return f"FBGEMM's {step.algorithm} has decoupled weight decay only, not {step.decay}"
    if step.lr_decay and step.decay == "decoupled":
        return "FBGEMM has one rate: decoupled weight decay would fall with lr_decay"
    return ""


def _limit_refusal(step: Step, device: str, where: str) -> str:
    if step.max_norm is None:
        return ""
    if device == "cpu" or step.algorithm != "rowwise_adagrad":
        return f"{where} FBGEMM's {step.algorithm} ignores max_norm"
    return "" if step.max_norm else "FBGEMM takes max_norm=0 for no limit"


def arguments(step: Step, dtype: torch.dtype, device: str, width: int = UNIT) -> Arguments:
    """Return the arguments of FBGEMM for a step; a learning rate or count on a device synchronizes.

    Args:
        step: the formula, its options and its numbers.
        dtype: of the weights.
        device: its type.
        width: of the rows.

    Raises:
        ValueError: FBGEMM is not used for this step; the message says why.
    """
    why = refusal(step, dtype, device, width)
    if why:
        raise ValueError(why)
    count, rate = int(step.count), float(step.lr)
    options: dict[str, float | int] = {}
    if step.algorithm != "sgd":
        options["eps"] = step.eps
    if step.lr_decay:
        rate /= 1 + (count - 1) * step.lr_decay
    if "adam" in step.algorithm:
        options["beta1"], options["beta2"] = step.betas
        if step.eps_placement == "before_bias_correction" and step.algorithm != "partial_rowwise_adam":
            options["eps"] = step.eps / (1 - step.betas[1] ** count) ** 0.5
    if step.weight_decay and step.decay != "none":
        options["weight_decay"] = step.weight_decay
        if step.algorithm == "rowwise_adagrad":
            options["weight_decay_mode"] = DECAY[step.decay]
    if step.max_norm is not None:
        options["max_norm"] = step.max_norm
    return Arguments(LOOKUPS[device][step.algorithm], rate, count, step.maximize, options)
