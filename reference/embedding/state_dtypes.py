"""State of tables in half precision, where the algorithm allows it."""

from collections.abc import Mapping
from typing import Any

import torch

from keyedopt.reference.embedding.keys import TENSORS

#: The argument of an optimizer of tables, as FBGEMM's module calls it: the dtype of each state by its name.
NAME = "optimizer_state_dtypes"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: What the first state of an algorithm is called if it is a running mean of gradients or steps.
MEANS = ("momentum_buffer", "exp_avg")


def split_dtypes(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
    """Return the other arguments of an optimizer, and the dtypes of states.

    Raises:
        ValueError: a state or a dtype that is not supported.
    """
    others = {key: value for key, value in kwargs.items() if key != NAME}
    given = kwargs.get(NAME) or {}
    if not isinstance(given, Mapping) or any(dtype not in DTYPES for dtype in given.values()):
        raise ValueError(
            f"{NAME} must be a mapping of names to float32, float16 or bfloat16 of torch, not {given!r}"
        )
    if given.keys() - {"momentum1"}:
        raise ValueError(
            f"{NAME} must name no state but momentum1, not {sorted(given)}: a mean of squares changes by "
            "less than half precision can show"
        )
    return others, dict(given)


def narrowed(
    state: dict[str, Any], table: str, algorithm: str, dtypes: Mapping[str, torch.dtype]
) -> dict[str, Any]:
    """Return the state of a table, by fused keys, with momentum1 in its dtype.

    The mean of gradients moves by a tenth of its distance in a step (β₁ = 0.9), which half precision can
    show. A mean of squares moves by a thousandth, and the sum of Adagrad by less in each step: rounded to
    nearest, both would stand still.

    Raises:
        ValueError: the algorithm has no such state.
    """
    dtype = dtypes.get("momentum1", torch.float32)
    if dtype is torch.float32:
        return state
    known = TENSORS.get(algorithm, (("",),))  # a user's class may have another name
    if f"{table}.momentum1" not in state or known[0][0] not in MEANS:
        raise ValueError(
            f"{NAME} applies to the momentum of SGD, LarsSGD, Adam, LAMB and their variants. {algorithm} has "
            "no momentum with these options, or a sum, which half precision cannot add small squares to"
        )
    return {**state, f"{table}.momentum1": state[f"{table}.momentum1"].to(dtype)}
