"""Which features are looked up in which table groups; the same until a table changes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from keyedopt.fused.backends.interface import Columns
from keyedopt.fused.backends.packed import PackedLayout
from keyedopt.fused.bulk import count_trained, held
from keyedopt.fused.embedding.inputs import Inputs
from keyedopt.fused.embedding.table_groups import TableGroup
from keyedopt.reference.embedding.config import EmbeddingConfig, PoolingType, output_names


class FeatureSlot(NamedTuple):
    """One lookup of every forward pass.

    Args:
        output: the name of its output.
        feature: the index of the feature in `Inputs`.
        name: of the feature.
        table: the name of the table.
        mean: whether bags are divided by their lengths.
    """

    output: str
    feature: int
    name: str
    table: str
    mean: bool


def make_slots(configs: Sequence[EmbeddingConfig], features: Sequence[str], pools: bool) -> list[FeatureSlot]:
    """Return the lookups of some tables, in the order of the outputs."""
    return [
        FeatureSlot(
            output,
            features.index(feature),
            feature,
            config.name,
            pools and getattr(config, "pooling", PoolingType.SUM) is PoolingType.MEAN,
        )
        for config, outputs in zip(configs, output_names(configs), strict=True)
        for feature, output in zip(config.feature_names, outputs, strict=True)
    ]


@dataclass(eq=False)
class GroupLayout:
    """The lookups of every forward pass in one table group.

    Args:
        group: the tables.
        slots: the lookups.
        pools: whether bags become one row each.
    """

    group: TableGroup
    slots: list[FeatureSlot]
    pools: bool

    def __post_init__(self) -> None:
        self.tables = [self.group.names.index(slot.table) for slot in self.slots]
        self.weights: list[Tensor] = [self.group.tables[table].weight for table in self.tables]
        self.outputs = [slot.output for slot in self.slots]
        self._features = [slot.feature for slot in self.slots]
        self._means = [slot.mean for slot in self.slots]

    def check_devices(self, inputs: Inputs) -> None:
        """Check that values are on the device of their table.

        Raises:
            ValueError: names the feature and the table.
        """
        device = self.group.device
        for slot in self.slots:
            values = inputs.values[slot.feature]
            if values.device != device:
                raise ValueError(
                    f"values of feature {slot.name!r} must be where table {slot.table!r} is, on "
                    f"{device}, not on {values.device}"
                )

    def columns(self, inputs: Inputs, offsets: bool) -> Columns:
        """Return the lookups of a forward pass, with or without offsets."""
        weights = None if inputs.weights is None else [inputs.weights[index] for index in self._features]
        return Columns(
            self.tables,
            [inputs.values[index] for index in self._features],
            [inputs.offsets[index] for index in self._features] if offsets else None,
            weights,
            self._means,
        )

    def trains_by_autograd(self) -> bool:
        """Return whether tables without an optimizer need a gradient; torch looks these up."""
        return self.group.optimizer is None and count_trained(self.weights) > 0

    def why_split(self) -> str:
        """Return why `requires_grad` of the tables needs a packed input to be split; empty if it does not."""
        number = count_trained(self.weights)
        if 0 < number < len(self.weights):
            return "some tables are frozen and others are not"
        if self.group.optimizer is None and number:
            return "tables without an optimizer are differentiated by torch"
        return ""

    def look_up_by_autograd(self, inputs: Inputs) -> Iterator[tuple[str, Tensor]]:
        """Yield the outputs of the tables that autograd differentiates, as plain parameters."""
        for slot, weight in zip(self.slots, self.weights, strict=True):
            if weight.requires_grad:
                yield slot.output, _look_up(weight, inputs, slot, self.pools)

    def without_autograd(self) -> "GroupLayout":
        """Return the layout of the tables that need no gradient."""
        frozen = [
            slot for slot, weight in zip(self.slots, self.weights, strict=True) if not weight.requires_grad
        ]
        return GroupLayout(self.group, frozen, self.pools)


class FeatureLayout:
    """The lookups of every forward pass, by table group.

    Args:
        groups: all tables.
        weights: of all tables.
        slots: all lookups.
        pools: whether bags become one row each.
    """

    def __init__(
        self,
        groups: Sequence[TableGroup],
        weights: Sequence[Tensor],
        slots: Sequence[FeatureSlot],
        pools: bool,
    ) -> None:
        self.groups, self._weights = list(groups), list(weights)
        self.pools = pools
        self.parts = [
            GroupLayout(group, [slot for slot in slots if slot.table in group.names], pools)
            for group in groups
        ]
        #: The outputs in the order of the lookups, and the features in the order of `Inputs`.
        self.outputs = [slot.output for slot in slots]
        self.features = list(dict.fromkeys(slot.name for slot in slots))
        self._packed: dict[tuple[str, ...], PackedLayout | None] = {}
        self._on_cpu = all(group.device.type == "cpu" for group in groups)
        #: Whether one tensor can have all outputs of a forward pass.
        self.joins_outputs = (
            pools and len({torch.promote_types(group.dtype, torch.float32) for group in groups}) == 1
        )
        backends = [group.backend for group in groups]
        #: Whether the backends check the contents of inputs.
        self.checks_contents = all(
            backend.checks_lookups and (pools or backend.checks_offsets) for backend in backends
        )

    def packed(self, keys: Sequence[str]) -> PackedLayout | None:
        """Return the layout of a packed input; None if the input has to be split, see `why_split`."""
        known = tuple(keys)
        if known not in self._packed:
            self._packed[known] = self._packed_layout(keys)
        found = self._packed[known]
        return None if found is None or self.parts[0].why_split() else found

    def why_split(self, keys: Sequence[str]) -> str:
        """Return why a packed input of these keys has to be split; empty if it does not."""
        return self._why_never_packed(keys) or self.parts[0].why_split()

    def _why_never_packed(self, keys: Sequence[str]) -> str:
        """Return why a packed input of these keys has to be split for any `requires_grad`; empty if not."""
        if not self.pools:
            return "rows are not pooled"
        if len(self.parts) != 1:
            return "the tables differ in parameter group, dtype or device"
        (part,) = self.parts
        backend, names = part.group.backend, [slot.name for slot in part.slots]
        if not backend.packs_tables(part.group.tables):
            return f"the backend {backend.name!r} takes each feature separately"
        if len(set(keys)) < len(keys) or not set(names) <= set(keys):
            return "a key is missing or occurs twice"
        if sorted(keys) != sorted(names) and not backend.packs_any_keys:
            return f"the backend {backend.name!r} needs each key to be looked up once"
        return ""

    def _packed_layout(self, keys: Sequence[str]) -> PackedLayout | None:
        if self._why_never_packed(keys):
            return None
        (part,) = self.parts
        ends = list(accumulate((weight.shape[1] for weight in part.weights), initial=0))
        return PackedLayout(
            tuple(part.tables),
            tuple(slot.mean for slot in part.slots),
            tuple(keys.index(slot.name) for slot in part.slots),
            tuple(slice(begin, end) for begin, end in pairwise(ends)),
            len(keys),
        )

    def is_current(self, tables: dict[str, Any], param_groups: Sequence[object]) -> bool:
        """Return whether weights, states and parameter groups are still those of the layout."""
        same = len(tables) > 0 and held(tables, "weight", self._weights)
        return same and all(group.is_current(param_groups) for group in self.groups)

    def check(self) -> None:
        """Synchronize, and raise what was wrong with lookups since the last call.

        Raises:
            ValueError: says what was wrong.
        """
        for group in self.groups:
            try:
                group.backend.check(group.device)
            except ValueError:
                self.forget_counts()
                raise

    def forget_counts(self) -> None:
        """Drop the known step counts: the counters on the device differ after suppressed updates."""
        for group in self.groups:
            group.forget_counts()

    def check_devices(self, inputs: Inputs) -> None:
        """Check that values are on the device of their table, or raise ValueError."""
        if not (self._on_cpu and inputs.on_cpu()):
            for part in self.parts:
                part.check_devices(inputs)

    def check_offsets(self, inputs: Inputs) -> None:
        """Let the backends check offsets that their lookups do not use."""
        if self.checks_contents and not self.pools:
            for part in self.parts:
                part.group.backend.check_offsets(part.group.tables, part.columns(inputs, offsets=True))


def _look_up(weight: Tensor, inputs: Inputs, slot: FeatureSlot, pools: bool) -> Tensor:
    """Look up and pool by operators that autograd differentiates: (B, D) with pooling, (N, D) without."""
    values, offsets = inputs.values[slot.feature], inputs.offsets[slot.feature]
    weights = None if inputs.weights is None else inputs.weights[slot.feature]
    rows = functional.embedding(values, weight, sparse=True)
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    if weights is not None:
        rows = rows * weights.to(rows.dtype)[:, None]
    if not pools:
        return rows
    lengths = offsets.diff()
    bags = torch.repeat_interleave(lengths, output_size=len(rows))
    pooled = rows.new_zeros(len(lengths), rows.shape[1]).index_add(0, bags, rows)
    return pooled / lengths.clamp(min=1)[:, None] if slot.mean else pooled
