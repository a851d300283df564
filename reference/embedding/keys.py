"""What the state of each algorithm is called: unfused, fused, by FBGEMM, in torchrec's fused collections.

=====================  ======================  =======================  ====================  ==========
state                  unfused                 fused, `<table>.` …      FBGEMM                torchrec
=====================  ======================  =======================  ====================  ==========
SGD with momentum      momentum_buffer (R, D)  momentum1 (R, D)         (has no momentum)     momentum_1
LarsSGD                momentum_buffer (R, D)  momentum1 (R, D)         momentum1 (R, D)      momentum_1
Ftrl                   accumulator (R, D)      momentum1 (R, D)         (none)                (none)
…                      linear (R, D)           linear (R, D)            (none)                (none)
Adagrad                sum (R, D)              momentum1 (R, D)         sum (R, D)            momentum_1
RowWiseAdagrad         sum (R, 1)              momentum1 (R,)           sum (R,)              momentum_1
Adam and its kin       exp_avg (R, D)          momentum1 (R, D)         exp_avg (R, D)        momentum_1
… in part row-wise     exp_avg_sq (R,)         exp_avg_sq (R,)          exp_avg_sq (R,)       momentum_2
… else                 exp_avg_sq (R, D)       exp_avg_sq (R, D)        exp_avg_sq (R, D)     momentum_2
count of steps         step ()                 iter (1,), int64         iter (1,), int64      iter
counts of rows         step (R,)               row_counter (R,), int64  row_counter, float32  row_counter
window of Accumulate…  window                  window                   (none)                (none)
=====================  ======================  =======================  ====================  ==========

In the fused optimizer the first state is `momentum1` and the others have FBGEMM's names, as in torchrec's
sharded collections. Its count is a state only where a rate depends on it, which is not so in Adagrad without
`lr_decay`: there an unfused count begins at 0. FBGEMM keeps its count in the buffer `iter` of the module, for
all tables. The last column is `<table>.weight.` … of torchrec's `FusedEmbeddingBagCollection` and
`FusedEmbeddingCollection`, with the shapes of FBGEMM; they do not save FBGEMM's count, which the caller adds.
"""

from collections.abc import Mapping
from typing import Any

import torch

#: What can be converted into each other, and the columns of the tables below.
FORMS = ("unfused", "fused", "fbgemm", "torchrec")

_MOMENTUM = ("momentum_buffer", "momentum1", "momentum1", "momentum_1")
_SUM = ("sum", "momentum1", "sum", "momentum_1")
_ADAM = (
    ("exp_avg", "momentum1", "exp_avg", "momentum_1"),
    ("exp_avg_sq", "exp_avg_sq", "exp_avg_sq", "momentum_2"),
)
_FTRL = (("accumulator", "momentum1", "", ""), ("linear", "linear", "", ""))
#: The tensors of each algorithm, by their names in each form; empty if the form lacks the algorithm.
TENSORS: Mapping[str, tuple[tuple[str, str, str, str], ...]] = {
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
    "Ftrl": _FTRL,
}
#: The algorithms that count their steps.
COUNTING = tuple(name for name, tensors in TENSORS.items() if tensors not in ((_MOMENTUM,), _FTRL))
#: The count of all steps, and that of each row, of the algorithms that count.
COUNTS = {
    "unfused": ("step", "step"),
    "fused": ("iter", "row_counter"),
    "fbgemm": ("iter", "row_counter"),
    "torchrec": ("iter", "row_counter"),
}
WINDOW = "window"


def convert(
    state: Mapping[str, Any], algorithm: str, source: str, target: str, table: str, lr_decay: float = 0.0
) -> dict[str, Any]:
    """Give the state of one table the names, shapes and dtypes of another form; nothing is lost.

    Args:
        state: the state, by name: of a parameter of an unfused optimizer; under ``<table>.weight`` in a
            fused one; an entry of FBGEMM's ``get_optimizer_state()``, with the buffer ``iter`` added; under
            ``<table>.weight`` in torchrec's, with FBGEMM's buffer added as ``<table>.weight.iter``.
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
    prefix = dict.fromkeys(FORMS, "") | {"fused": f"{table}.", "torchrec": f"{table}.weight."}
    rest = {key.removeprefix(prefix[source]): value for key, value in state.items()}
    converted: dict[str, Any] = {}
    for names in TENSORS[algorithm]:
        old, new = names[FORMS.index(source)], names[FORMS.index(target)]
        if not (old and new):
            raise ValueError(f"{algorithm} has no {source if new else target} form, as FBGEMM lacks it")
        if old in rest:
            value = torch.as_tensor(rest.pop(old)).detach()
            if algorithm == "RowWiseAdagrad":
                value = value.reshape(-1, 1) if target == "unfused" else value.reshape(-1)
            converted[new] = value
        elif algorithm != "SGD":  # which has no state without momentum
            raise ValueError(f"the state of {algorithm} has {old}, but only {sorted(state)} came")
    if WINDOW in rest and target in ("unfused", "fused"):
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
        dtype = {"unfused": torch.float64, "fused": torch.int64}.get(target, torch.float32)
        return {COUNTS[target][1]: counts[per_row].to(dtype)}
    if once in counts:
        count = counts[once].reshape(())
        return {COUNTS[target][0]: count.double() if target == "unfused" else count.reshape(1).long()}
    return {}


def form_of(state: Mapping[str, Any], table: str) -> str:
    """Return the form of the state of one table, by its names; a state without entries is fused."""
    if any(key.startswith(f"{table}.weight.") for key in state):
        return "torchrec"
    if not state or any(key.startswith(f"{table}.") for key in state):
        return "fused"
    return "unfused" if state.keys() & {"step", "momentum_buffer", "linear"} else "fbgemm"


def live(entry: Mapping[str, Any], algorithm: str, table: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a fused entry by their unfused names, to be read and written; not `iter`."""
    names = {fused: unfused for unfused, fused, *_ in TENSORS[algorithm]} | {"row_counter": "step"}
    short = {key.removeprefix(f"{table}."): value for key, value in entry.items()}
    return {names[key]: value for key, value in short.items() if key in names}
