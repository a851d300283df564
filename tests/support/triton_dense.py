"""What the Triton kernel for dense gradients is held to: parameters, and torch's operators in float64."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.backends import torch_rules
from keyedopt.fused.backends.interface import Step

ADAM: dict[str, Any] = {"algorithm": "adam", "eps": 1e-8}
#: The options of a step, and what else a case of it needs.
DENSE_STEPS: dict[str, dict[str, Any]] = {
    "adam": ADAM,
    "adam_l2": {**ADAM, "weight_decay": 0.1, "decay": "l2"},
    "adam_decoupled": {**ADAM, "weight_decay": 0.1, "decay": "decoupled"},
    "adam_maximize": {**ADAM, "weight_decay": 0.1, "decay": "l2", "maximize": True},
    "adam_before": {**ADAM, "eps_placement": "before_bias_correction"},
    "adam_no_eps": {**ADAM, "eps": 0.0},
    "adam_betas": {**ADAM, "betas": (0.0, 0.5), "eps": 0.01},
    "adam_scaled": {**ADAM, "scale": 3.0},
    "adam_everything": {**ADAM, "scale": 3.0, "weight_decay": 0.1, "decay": "decoupled", "maximize": True},
    "adam_lr_on_device": {**ADAM, "lr": torch.tensor(0.1)},
    "adam_counts_in_float32": {**ADAM, "counts": torch.float32},
    "adam_unaligned": {**ADAM, "offset": 1},
    "adam_half_aligned": {**ADAM, "offset": 2},
    "sgd": {"algorithm": "sgd", "weight_decay": 0.1, "decay": "decoupled", "maximize": True},
    "sgd_momentum": {"algorithm": "sgd", "momentum": 0.9, "dampening": 0.2, "scale": 3.0},
    "sgd_nesterov": {
        "algorithm": "sgd",
        "momentum": 0.9,
        "nesterov": True,
        "weight_decay": 0.1,
        "decay": "l2",
    },
    "adagrad": {"algorithm": "adagrad", "lr_decay": 0.5, "weight_decay": 0.1, "decay": "decoupled"},
    "adagrad_eps": {"algorithm": "adagrad", "eps": 1e-8},
}
SIZES = (0, 1, 3, 1024, 1025, 0, 2500, 7, 0)
KINDS = ("scale", "counts", "offset")


def ulp(values: Tensor) -> Tensor:
    """Return one unit in the last place of float32 at numbers in float64."""
    size = values.abs().clamp(min=torch.finfo(torch.float32).tiny)
    return torch.exp2(torch.floor(torch.log2(size)) - 23)


def parameters(options: dict[str, Any], sizes: Sequence[int] = SIZES, seed: int = 0) -> Any:
    """Return parameters, gradients, states and counts of a case; the counts differ."""
    from keyedopt.fused.backends.triton.dense_launch import Dense

    generator = torch.Generator().manual_seed(seed)
    offset, algorithm = options.get("offset", 0), options["algorithm"]

    def numbers(least: float) -> list[Tensor]:
        made = [torch.empty(size + offset).uniform_(least, 1, generator=generator) for size in sizes]
        return [one[offset:] for one in made]

    number = {"adam": 2, "adagrad": 1}.get(algorithm, int("momentum" in options))
    states = [numbers(0) for _ in range(number)]
    if algorithm == "adam":
        states[0] = numbers(-1)
    dtype = options.get("counts", torch.float64)
    counts = [torch.tensor(1 + place % 5, dtype=dtype) for place in range(len(sizes))]
    return Dense(numbers(-1), numbers(-1), states, [] if algorithm == "sgd" else counts)


def check_dense(options: dict[str, Any], sizes: Sequence[int] = SIZES, first: bool = False) -> None:
    """Take two steps, and compare with float64: to 2 ULP, and rounding of parts of a sum that cancel.

    Raises:
        AssertionError: says which parameter differs, and by how much.
    """
    from keyedopt.fused.backends.triton.dense_launch import prepare, run

    given = {key: value for key, value in options.items() if key not in KINDS}
    scale = options.get("scale")
    dense, sgd = parameters(options, sizes), options["algorithm"] == "sgd"
    for step in (Step(**{"lr": 0.1, **given}, first=first), Step(**{"lr": 0.01, **given})):
        before = [dense.params, dense.grads, *dense.states]
        exact, olds = ([[one.double() for one in listed] for listed in before] for _ in range(2))
        grads = [one.clone() for one in dense.grads]
        for place, (weight, grad, *states) in enumerate(zip(*exact, strict=True)):
            count = int(dense.counts[place]) if dense.counts else 1
            numbers = Step(**{**vars(step), "lr": float(step.lr), "count": count})
            torch_rules.update(numbers, weight, grad / (scale or 1.0), states)
        run(prepare(step, dense, None if scale is None else torch.tensor(scale)))
        for place, right in enumerate(zip(*exact, strict=True)):
            assert torch.equal(dense.grads[place], grads[place]), "a gradient was written"
            for index, states in enumerate(dense.states):
                # β m and (1 − β) g may cancel, and their rounding stays
                wide, old = right[2 + index], olds[2 + index][place]
                room = 2 * ulp(wide) + (0 if index else 2 * ulp(old)) + (2 * ulp(right[1]) if sgd else 0)
                off = (states[place].double() - wide).abs() / room
                assert not off.numel() or off.max() <= 1, f"state {index} of {place}: {float(off.max())}"
            added = (right[0] - olds[0][place]).abs()
            room = 2 * ulp(right[0]) + 16 * ulp(added) + 2 * ulp(olds[0][place])
            off = (dense.params[place].double() - right[0]).abs() / room
            assert not off.numel() or off.max() <= 1, f"weight {place}: {float(off.max())} of the bound"
        for count in set(dense.counts):
            count += 1
