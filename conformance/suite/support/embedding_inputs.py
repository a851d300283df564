"""Random inputs of an embedding module: tables, and the features of a lookup."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from keyedopt.conformance.suite.support.device import the_device
from keyedopt.conformance.suite.support.keyed_jagged import (
    in_a_column,
    keyed_jagged_tensor,
    with_inverse_indices,
)

WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 33, 64)
ROW_COUNTS = (1, 2, 3, 7, 30)
#: Lengths of bags: powers of 2, by which a mean divides without rounding.
LENGTHS = (0, 1, 1, 2, 4)
#: Numbers of bags.
BAG_COUNTS = (1, 2, 3, 5, 40)
#: Weights of lookups, and gradients of outputs.
FACTORS = (-2.0, -1.0, -0.5, -0.25, 0.25, 0.5, 1.0, 2.0)


class Table(NamedTuple):
    """A table of a program, as `collection` takes it."""

    name: str
    rows: int
    width: int
    features: tuple[str, ...]
    pooling: str
    dtype: str

    def __str__(self) -> str:
        shape = f"{self.rows}x{self.width} {self.dtype}"
        return f"{self.name}: {shape}, {self.pooling} of {', '.join(self.features)}"


@dataclass
class Batch:
    """The features of a lookup as lists: the rows of each bag, and a weight for each row."""

    bags: dict[str, list[list[int]]]
    weights: dict[str, list[list[float]]]
    #: Whether the input is a KeyedJaggedTensor, not a mapping.
    keyed: bool
    #: The bag of each row of the output, for each feature; empty if rows are bags.
    inverse: dict[str, list[int]]
    #: The weights of the input if they need a gradient, and the same weights in float64.
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    exact: dict[str, torch.Tensor] = field(default_factory=dict)

    def again(self) -> "Batch":
        """Return the same features in new lists, which the caller may change."""
        bags = {name: [list(rows) for rows in listed] for name, listed in self.bags.items()}
        weights = {name: [list(some) for some in listed] for name, listed in self.weights.items()}
        return Batch(bags, weights, self.keyed, self.inverse)

    def __str__(self) -> str:
        bags = "/".join(str(count) for count in dict.fromkeys(map(len, self.bags.values())))
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
        keyed = keyed_jagged_tensor(made, choose.choice(("lengths", "offsets", "strided")), order)
        if not self.inverse:
            return keyed
        return with_inverse_indices(keyed, [len(self.bags[name]) for name in order], self.inverse)


def draw_tables(
    choose: random.Random, count: int, dtypes: Sequence[str], pooled: bool, shared: bool
) -> list[Table]:
    """Draw tables.

    Args:
        choose: the source of randomness.
        count: of tables.
        dtypes: to choose from.
        pooled: whether bags are pooled; otherwise all tables have the same width.
        shared: whether two tables may have one feature.
    """
    width, tables = choose.choice(WIDTHS), list[Table]()
    for index in range(count):
        features = tuple(f"f{index}{place}" for place in range(choose.choice((1, 1, 2))))
        pooling = choose.choice(("SUM", "MEAN")) if pooled else "NONE"
        size = choose.choice(ROW_COUNTS), choose.choice(WIDTHS) if pooled else width
        tables.append(Table(f"t{index}", *size, features, pooling, choose.choice(dtypes)))
    if len(tables) > 1 and shared and choose.random() < 0.25:
        tables[1] = tables[1]._replace(features=(*tables[1].features, tables[0].features[0]))
    return tables


def draw_batch(
    choose: random.Random, tables: Sequence[Table], keyed: bool, earlier: Batch | None = None
) -> Batch:
    """Draw the features of a lookup.

    Args:
        choose: the source of randomness.
        tables: that look them up.
        keyed: whether the input may be a KeyedJaggedTensor.
        earlier: a batch whose lengths this one may repeat, with other rows.
    """
    if earlier and choose.random() < 0.25:
        lengths = {name: [len(bag) for bag in bags] for name, bags in earlier.bags.items()}
        keyed, inverse = earlier.keyed, earlier.inverse
    else:
        keyed = keyed and choose.random() < 0.5
        lengths, inverse = _draw_lengths(choose, tables, keyed)
    bags, weights = {}, {}
    for feature, listed in lengths.items():
        rows = range(min(table.rows for table in tables if feature in table.features))
        bags[feature] = [[choose.choice(rows) for _ in range(length)] for length in listed]
        weights[feature] = [[choose.choice(FACTORS) for _ in range(length)] for length in listed]
    return Batch(bags, weights, keyed, inverse)


def _draw_lengths(
    choose: random.Random, tables: Sequence[Table], keyed: bool
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Return the lengths of the bags of each feature, and the bags of each row of its output."""
    features = list(dict.fromkeys(feature for table in tables for feature in table.features))
    sizes = dict.fromkeys(features, choose.choice(BAG_COUNTS))
    inverse = dict[str, list[int]]()
    if keyed and tables[0].pooling != "NONE" and choose.random() < 0.3:
        sizes = {feature: choose.choice(BAG_COUNTS) for feature in features}
        outputs = range(choose.choice(BAG_COUNTS))
        inverse = {feature: [choose.randrange(sizes[feature]) for _ in outputs] for feature in features}
    lengths = {}
    for feature in features:
        some = (0,) if choose.random() < 0.15 else LENGTHS  # a feature may have no value in a batch
        lengths[feature] = [choose.choice(some) for _ in range(sizes[feature])]
    return lengths, inverse


def values_of(output: Any) -> torch.Tensor:
    """Return an output, or the values of a JaggedTensor."""
    return output if isinstance(output, torch.Tensor) else output.values()
