"""Custom operators for lookups, which torch.compile and torch.export take into one graph.

The checks and sums of a lookup depend on its data, so a compiler cannot trace them. An operator is opaque:
the compiler knows the shapes of its outputs from a fake kernel, and autograd knows its backward pass. Two
operators do everything: ``split_keys`` splits a `KeyedJaggedTensor`, ``look_up`` looks all features up.
``look_up`` gets the tables as arguments, so an exported model has them as its parameters. A program that
loads an exported model imports the package of its tables first, which defines the operators.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from keyedopt.reference.embedding.jagged import split_packed

#: The arguments of ``look_up``. `call` is a new tensor without elements in each forward pass: compilers merge
#: two calls with the same arguments, whose gradients would then be counted once.
SCHEMA = (
    "(Tensor call, Tensor[] leaves, Tensor[] tables, str[] names, Tensor[] values, Tensor[] offsets, "
    "Tensor[] weights, int[] places, int[] features, bool[] means, bool pools, int module) -> Tensor[]"
)
#: The modules whose lookups are traced, by the number in the graph; a graph keeps no module alive.
MODULES: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(module: Any) -> int:
    """Return the number by which graphs refer to a module."""
    number = next(_numbers)
    MODULES[number] = module
    return number


#: Of the operators; a copy of the package under another name has its own.
NAMESPACE = __name__.partition(".embedding")[0].replace(".", "_")


def _split(
    values: Tensor, offsets: Tensor, weights: Tensor | None, keys: Sequence[str], bags: int
) -> list[Tensor]:
    """Return the values of each key, then the offsets of each key, then the weights of each key."""
    parts = split_packed(list(keys), [bags] * len(keys), values, offsets, weights).values()
    rest = [] if weights is None else [one.weights.clone() for one in parts if one.weights is not None]
    return [*(one.values.clone() for one in parts), *(one.offsets.clone() for one in parts), *rest]


_split_operator = torch.library.custom_op(
    f"{NAMESPACE}::split_keys",
    _split,
    mutates_args=(),
    schema="(Tensor values, Tensor offsets, Tensor? weights, str[] keys, SymInt bags) -> Tensor[]",
)


@_split_operator.register_fake
def _(
    values: Tensor, offsets: Tensor, weights: Tensor | None, keys: Sequence[str], bags: int
) -> list[Tensor]:
    sizes = [torch.library.get_ctx().new_dynamic_size() for _ in keys]
    made = [values.new_empty(size) for size in sizes] + [offsets.new_empty(bags + 1) for _ in keys]
    return made + ([] if weights is None else [weights.new_empty(size) for size in sizes])


#: Splits the values, offsets and weights of a `KeyedJaggedTensor`.
SPLIT_KEYS = getattr(torch.ops, NAMESPACE).split_keys.default


def define(
    namespace: str, read: Callable[..., list[Tensor]], differentiate: Callable[..., Sequence[Tensor | None]]
) -> Any:
    """Define ``look_up`` of a package, and return it.

    Args:
        namespace: of the operator.
        read: takes the arguments of `SCHEMA`, and returns the outputs, which share no memory.
        differentiate: takes the shapes of the tables, values, offsets and weights, the numbers of `SCHEMA`,
            and the gradients of the outputs (None for an output that the loss does not depend on); returns
            the gradients of the leaves.
    """
    operator = torch.library.custom_op(f"{namespace}::look_up", read, mutates_args=(), schema=SCHEMA)

    @operator.register_fake
    def _(call: Tensor, leaves: Any, tables: Any, names: Any, values: Any, offsets: Any, *rest: Any) -> Any:
        _, places, features, _, pools, _ = rest
        made = []
        for place, feature in zip(places, features, strict=True):
            table = tables[place]
            count = offsets[feature].shape[0] - 1 if pools else values[feature].shape[0]
            dtype = torch.promote_types(table.dtype, torch.float32)
            made.append(table.new_empty((count, table.shape[1]), dtype=dtype))
        return made

    def set_up(ctx: Any, inputs: Any, output: Any) -> None:
        _, leaves, tables, _, values, offsets, weights, *ctx.numbers = inputs
        ctx.set_materialize_grads(False)
        ctx.shapes = [table.shape for table in tables]
        ctx.counts = [len(leaves), len(tables), len(values), len(offsets), len(weights)]
        ctx.save_for_backward(*values, *offsets, *weights)

    def backward(ctx: Any, grads: Any) -> Any:
        leaves, tables, count, _, weights = ctx.counts
        saved = list(ctx.saved_tensors)
        inputs = saved[:count], saved[count : 2 * count], saved[2 * count :]
        found = differentiate(ctx.shapes, *inputs, *ctx.numbers, grads) if leaves else []
        return (
            *(None, list(found), [None] * tables, None),
            *([None] * count, [None] * count, [None] * weights),
            *(None, None, None, None, None),
        )

    operator.register_autograd(backward, setup_context=set_up)
    return getattr(torch.ops, namespace).look_up.default
