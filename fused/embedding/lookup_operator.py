"""The operator ``look_up`` of the fused package, by the backends of the tables, and its gradients."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from keyedopt.fused.embedding.backward import ForwardPass, collect_traced
from keyedopt.fused.embedding.feature_layout import FeatureLayout, FeatureSlot
from keyedopt.fused.embedding.inputs import Inputs
from keyedopt.fused.embedding.table_groups import make_table_groups
from keyedopt.reference.embedding.operators import MODULES, define

NAMESPACE = __name__.partition(".embedding")[0].replace(".", "_")


def _read(call: Any, leaves: Any, tables: Any, names: Any, *rest: Any) -> list[Tensor]:
    """Look up with the layout of the module; in an exported model, which has none, with a new one."""
    values, offsets, weights, places, features, means, pools, number = rest
    module = MODULES.get(number)
    if module is None:
        layout = _layout(tables, names, places, features, means, pools)
    else:
        layout = module.current_layout()
        if leaves:
            module.check_replication()
    inputs = _inputs(names, values, offsets, weights)
    rows = {
        name: min(len(tables[place]) for place, one in zip(places, features, strict=True) if one == index)
        for index, name in enumerate(names)
    }
    layout.check_devices(inputs)
    if not layout.checks_contents or inputs.has_no_bags():
        inputs.check_contents(rows)
    forward = ForwardPass(None)
    for part in layout.parts:
        forward.add(part, inputs, training=False)
    try:
        layout.check_offsets(inputs)
        forward.run()
        if module is not None and module.strict:
            layout.check()
    except ValueError:  # a backend does not know which feature is wrong
        layout.forget_counts()
        inputs.check_contents(rows)
        raise
    with torch.no_grad():
        found = dict(forward.outputs())
    outputs = layout.outputs if module is not None else [str(index) for index in range(len(places))]
    # The kernels write all outputs into one memory; outputs of an operator may not share theirs.
    return [found[name].clone() for name in outputs]


def _inputs(names: Any, values: Any, offsets: Any, weights: Any) -> Inputs:
    return Inputs(
        list(names),
        [one.long().contiguous() for one in values],
        [one.long().contiguous() for one in offsets],
        list(weights) if weights else None,
    )


def _layout(tables: Any, names: Any, places: Any, features: Any, means: Any, pools: bool) -> FeatureLayout:
    known = {str(index): table.detach() for index, table in enumerate(tables)}
    slots = [
        FeatureSlot(str(index), feature, names[feature], str(place), mean)
        for index, (place, feature, mean) in enumerate(zip(places, features, means, strict=True))
    ]
    return FeatureLayout(make_table_groups(known, {}, "auto"), list(known.values()), slots, pools)


def _differentiate(shapes: Any, values: Any, offsets: Any, weights: Any, *rest: Any) -> Sequence[Tensor]:
    *_, number, grads = rest
    present = [index for index, grad in enumerate(grads) if grad is not None]
    if not present:
        return [values[0].new_empty(0, dtype=torch.float32)]
    given = [grads[index] for index in present]
    leaf: Tensor = _COLLECT(given, present, values, offsets, weights, number)
    return [leaf]


def _collect(grads: Any, present: Any, values: Any, offsets: Any, weights: Any, number: int) -> Tensor:
    """Collect the gradients of a forward pass for the update of the module; return that of the leaf."""
    module = MODULES.get(number)
    if module is None:
        raise RuntimeError("the tables of a compiled lookup no longer exist, so its gradients have no use")
    layout = module.current_layout()
    inputs = _inputs(layout.features, values, offsets, weights)
    by_output = {layout.outputs[index]: grad for index, grad in zip(present, grads, strict=True)}
    collect_traced(module.backward, layout, inputs, by_output)
    return torch.empty(0, device=grads[0].device)


_collect_operator = torch.library.custom_op(
    f"{NAMESPACE}::collect",
    _collect,
    mutates_args=(),
    schema=(
        "(Tensor[] grads, int[] present, Tensor[] values, Tensor[] offsets, Tensor[] weights, int module) "
        "-> Tensor"
    ),
)


@_collect_operator.register_fake
def _(grads: Any, *rest: Any) -> Tensor:
    return torch.empty(0, device=grads[0].device)


_COLLECT = getattr(torch.ops, NAMESPACE).collect.default
#: Looks features up in tables of the fused package.
LOOK_UP = define(NAMESPACE, _read, _differentiate)
