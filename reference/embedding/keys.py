"""What the state of each algorithm is called: by the unfused optimizer, by the fused one, by FBGEMM.

=====================  ======================  =======================  ==================
state                  unfused                 fused, `<table>.` …      FBGEMM
=====================  ======================  =======================  ==================
SGD with momentum      momentum_buffer (R, D)  momentum1 (R, D)         (has no momentum)
LarsSGD                momentum_buffer (R, D)  momentum1 (R, D)         momentum1 (R, D)
Adagrad                sum (R, D)              momentum1 (R, D)         sum (R, D)
RowWiseAdagrad         sum (R, 1)              momentum1 (R,)           sum (R,)
Adam and its kin       exp_avg (R, D)          momentum1 (R, D)         exp_avg (R, D)
… in part row-wise     exp_avg_sq (R,)         exp_avg_sq (R,)          exp_avg_sq (R,)
… else                 exp_avg_sq (R, D)       exp_avg_sq (R, D)        exp_avg_sq (R, D)
count of steps         step ()                 iter (1,), int64         iter (1,), int64
counts of rows         step (R,)               row_counter (R,), int64  row_counter (R,), float32
window of Accumulate…  window                  window                   (does not accumulate)
=====================  ======================  =======================  ==================

In the fused optimizer the first state is `momentum1` and the others have FBGEMM's names, as in torchrec. Its
count is a state only where a rate depends on it, which is not so in Adagrad without `lr_decay`: there an
unfused count begins at 0. FBGEMM keeps its count in the buffer `iter` of the module, for all tables.
"""

from collections.abc import Mapping
from typing import Any

import torch

#: What can be converted into each other, and the columns of the tables below.
FORMS = ("unfused", "fused", "fbgemm")

_MOMENTUM = ("momentum_buffer", "momentum1", "momentum1")
_SUM = ("sum", "momentum1", "sum")
_ADAM = (("exp_avg", "momentum1", "exp_avg"), ("exp_avg_sq", "exp_avg_sq", "exp_avg_sq"))
#: The tensors of each algorithm, by their names in each form.
TENSORS: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "SGD": (_MOMENTUM,),
    "LarsSGD": (_MOMENTUM,),
    "Adagrad": (_SUM,),
    "RowWiseAdagrad": (_SUM,),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "SparseAdam": _ADAM,
    "PartialRowWiseAdam": _ADAM,
    "LAMB": _ADAM,
    "PartialRowWiseLAMB": _ADAM,
}
#: The algorithms that count their steps.
COUNTING = tuple(name for name, tensors in TENSORS.items() if tensors != (_MOMENTUM,))
#: The count of all steps, and that of each row, of the algorithms that count.
COUNTS = {"unfused": ("step", "step"), "fused": ("iter", "row_counter"), "fbgemm": ("iter", "row_counter")}
WINDOW = "window"


def convert(
    state: Mapping[str, Any], algorithm: str, source: str, target: str, table: str, lr_decay: float = 0.0
) -> dict[str, Any]:
    """Give the state of one table the names, shapes and dtypes of another form; nothing is lost.

    Args:
        state: the state, by name: of a parameter of an unfused optimizer; under ``<table>.weight`` in a
            fused one; an entry of FBGEMM's ``get_optimizer_state()``, with the buffer ``iter`` added.
        algorithm: a name of `TENSORS`; ``Accumulate…`` is the algorithm that it accumulates for.
        source: the form it has, one of `FORMS`.
        target: the form it is to have.
        table: the name of the table, in front of fused names.
        lr_decay: that of Adagrad, for where it is 0 there is no fused count.

    Raises:
        ValueError: a state is missing, or one has no place in the target.

    >>> convert({"t.momentum1": torch.ones(2)}, "RowWiseAdagrad", "fused", "fbgemm", "t")
    {'sum': tensor([1., 1.])}
    """
    algorithm = algorithm.removeprefix("Accumulate")
    if algorithm not in TENSORS or source not in FORMS or target not in FORMS:
        raise ValueError(f"no conversion of the state of {algorithm!r} from {source!r} to {target!r}")
    prefix = {form: f"{table}." if form == "fused" else "" for form in FORMS}
    rest = {key.removeprefix(prefix[source]): value for key, value in state.items()}
    converted: dict[str, Any] = {}
    for names in TENSORS[algorithm]:
        old, new = names[FORMS.index(source)], names[FORMS.index(target)]
        if old in rest:
            value = torch.as_tensor(rest.pop(old)).detach()
            if algorithm == "RowWiseAdagrad":
                value = value.reshape(-1, 1) if target == "unfused" else value.reshape(-1)
            converted[new] = value
        elif algorithm != "SGD":  # which has no state without momentum
            raise ValueError(f"the state of {algorithm} has {old}, but only {sorted(state)} came")
    if WINDOW in rest and target != "fbgemm":
        converted[WINDOW] = rest.pop(WINDOW)
    converted |= _count(rest, algorithm, source, target, lr_decay)
    if rest:
        raise ValueError(f"{sorted(rest)} of the state of {algorithm} has no place in the {target} form")
    return {f"{prefix[target]}{name}": value for name, value in converted.items()}


def _count(rest: dict[str, Any], algorithm: str, source: str, target: str, lr_decay: float) -> dict[str, Any]:
    """Take the count out of what is left, and return it in the other form."""
    once, per_row = COUNTS[source]
    counts = {name: torch.as_tensor(rest.pop(name)).detach() for name in {once, per_row} if name in rest}
    if algorithm not in COUNTING:
        return {}  # FBGEMM counts, but no rate depends on it
    if TENSORS[algorithm] == (_SUM,):
        if target == "fused" and not lr_decay:
            return {}
        if target == "unfused":
            counts.setdefault(once, torch.zeros(()))
    elif not counts:
        raise ValueError(f"the state of {algorithm} has a count, {once} or {per_row}")
    if per_row in counts and (source != "unfused" or counts[per_row].ndim == 1):
        dtype = {"unfused": torch.float64, "fused": torch.int64, "fbgemm": torch.float32}[target]
        return {COUNTS[target][1]: counts[per_row].to(dtype)}
    if once in counts:
        count = counts[once].reshape(())
        return {COUNTS[target][0]: count.double() if target == "unfused" else count.reshape(1).long()}
    return {}


def live(entry: Mapping[str, Any], algorithm: str, table: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a fused entry by their unfused names, to be read and written; not `iter`."""
    names = {fused: unfused for unfused, fused, _ in TENSORS[algorithm]} | {"row_counter": "step"}
    short = {key.removeprefix(f"{table}."): value for key, value in entry.items()}
    return {names[key]: value for key, value in short.items() if key in names}
