"""What the schema of an operator says about its results, read once per overload."""

from dataclasses import dataclass
from typing import Any

import torch

#: Operators with a list of indices, some of which may be masks or on the CPU.
INDEXING = ("aten::index.", "aten::index_put", "aten::_index_put_impl", "aten::_unsafe_index")
_WAITING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
#: Operators that wait for the host on CUDA without a tag that says so.
_WAITING_NAMES = (
    "aten::_coalesce",
    "aten::_unique",
    "aten::unique_",
    "aten::masked_select",
    "aten::nonzero.out",
)


@dataclass(frozen=True)
class Plan:
    """How the device runs an operator. A written argument is known by its position, or by its name.

    Args:
        name: the name of the operator, such as ``aten::add.out``.
        view: whether the result is a view of an argument.
        written: the arguments that are written, such as ``self`` of ``add_``.
        returned: for each result the written argument that it is, or None if it is new.
        random: whether the operator draws random numbers.
        generator: whether the operator takes a generator of random numbers.
        waits: whether the host needs numbers of the device before it can go on.
        indexing: whether the second argument is a list of indices.
        tensors: the positions of tensors. The dispatcher gives a number in place of a tensor made of one.
    """

    name: str
    view: bool
    written: tuple[int | str, ...]
    returned: tuple[int | str | None, ...]
    random: bool
    generator: bool
    waits: bool
    indexing: bool
    tensors: tuple[int, ...]


def plan_of(op: Any) -> Plan:
    """Return the plan of an operator overload."""
    schema, name = op._schema, op.name()
    written: dict[frozenset[str], int | str] = {
        frozenset(argument.alias_info.before_set): argument.name if argument.kwarg_only else position
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }
    aliases = [result.alias_info for result in schema.returns]
    indexing = name.startswith(INDEXING)
    return Plan(
        name=name,
        view=any(alias is not None and not alias.is_write for alias in aliases),
        written=tuple(written.values()),
        returned=tuple(alias and written.get(frozenset(alias.before_set)) for alias in aliases),
        random=torch.Tag.nondeterministic_seeded in op.tags,
        generator=any(argument.name == "generator" for argument in schema.arguments),
        waits=not indexing and (bool(_WAITING.intersection(op.tags)) or name.startswith(_WAITING_NAMES)),
        indexing=indexing,
        tensors=tuple(i for i, argument in enumerate(schema.arguments) if str(argument.type) == "Tensor"),
    )
