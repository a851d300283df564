"""Random inputs of an embedding module: tables, and the features of a lookup."""

import random
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from keyedopt.conformance.suite.support.device import the_device
from keyedopt.conformance.suite.support.keyed_jagged import in_a_column, keyed_jagged_tensor


class Table(NamedTuple):
    """A table of a program, as `collection` takes it."""

    name: str
    rows: int
    width: int
    features: tuple[str, ...]
    pooling: str

    def __str__(self) -> str:
        return f"{self.name}: {self.rows}x{self.width}, {self.pooling} of {', '.join(self.features)}"


@dataclass
class Batch:
    """The features of a lookup as lists: the rows of each bag, and a weight for each row."""

    bags: dict[str, list[list[int]]]
    weights: dict[str, list[list[float]]]
    #: Whether the input is a KeyedJaggedTensor, not a mapping.
    keyed: bool
    #: The weights of the input if they need a gradient, and the same weights in float64.
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    exact: dict[str, torch.Tensor] = field(default_factory=dict)

    def __str__(self) -> str:
        bags = len(next(iter(self.bags.values())))
        return f"{bags} bags of a {'KeyedJaggedTensor' if self.keyed else 'mapping'}"

    def features(self, weighted: bool, dtype: torch.dtype, choose: random.Random, learn: bool = False) -> Any:
        """Return the input of a module; if ``learn`` the weights need a gradient."""
        kinds = [choose.choice((torch.int64, torch.int32)) for _ in range(2)]
        made = {}
        for name, listed in self.bags.items():
            ends = torch.tensor([0, *map(len, listed)]).cumsum(0)
            parts = [torch.tensor([row for bag in listed for row in bag]).to(kinds[0]), ends.to(kinds[1])]
            if weighted:
                weights = torch.tensor(
                    [one for bag in self.weights[name] for one in bag], dtype=torch.float64
                )
                self.exact[name] = weights.requires_grad_()
                parts.append(weights.detach().to(dtype))
            made[name] = [part.to(the_device()) for part in parts]
            if learn:
                self.given[name] = made[name][2].requires_grad_()
        if not self.keyed:
            changed = choose.choice((torch.clone, in_a_column))
            return {name: (*map(changed, parts[:2]), *parts[2:]) for name, parts in made.items()}
        order = choose.sample(list(made), len(made))
        return keyed_jagged_tensor(made, choose.choice(("lengths", "offsets", "strided")), order)


def values_of(output: Any) -> torch.Tensor:
    """Return an output, or the values of a JaggedTensor."""
    return output if isinstance(output, torch.Tensor) else output.values()
