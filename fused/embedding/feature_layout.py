"""Where the features of a collection are looked up, in each cluster of its tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from keyedopt.fused.backends.interface import Columns
from keyedopt.fused.embedding.inputs import Bags
from keyedopt.fused.embedding.table_groups import Cluster
from keyedopt.fused.embedding.tables import Slot


@dataclass(eq=False)
class Places:
    """The lookups of every forward in one cluster, as columns that are the same each time.

    Args:
        cluster: the tables.
        slots: the lookups.
        tables: which of the cluster's tables each is in.
    """

    cluster: Cluster
    slots: list[Slot]
    tables: list[int]

    def __post_init__(self) -> None:
        self.weights: list[Tensor] = [self.cluster.tables[table].weight for table in self.tables]
        self.outputs = [slot.output for slot in self.slots]
        self._features = [slot.feature for slot in self.slots]
        self._means = [slot.mean for slot in self.slots]

    @classmethod
    def of(cls, cluster: Cluster, slots: Sequence[Slot]) -> "Places":
        """Find the lookups in a cluster."""
        mine = [slot for slot in slots if slot.table in cluster.names]
        return cls(cluster, mine, [cluster.names.index(slot.table) for slot in mine])

    def without(self, excluded: Sequence[bool]) -> "Places":
        """Return them without some."""
        kept = [place for place, out in enumerate(excluded) if not out]
        return Places(self.cluster, [self.slots[at] for at in kept], [self.tables[at] for at in kept])

    def check_devices(self, checked: Mapping[str, Bags]) -> None:
        """Refuse values that are not where their table is.

        Raises:
            ValueError: names the feature and the table.
        """
        device = self.cluster.device
        if device.type == "cpu" and all(checked[feature][0].is_cpu for feature in self._features):
            return
        for slot in self.slots:
            if checked[slot.feature][0].device != device:
                raise ValueError(
                    f"values of feature {slot.feature!r} must be where table {slot.table!r} is, on "
                    f"{device}, not on {checked[slot.feature][0].device}"
                )

    def columns(self, checked: Mapping[str, Bags], pools: bool) -> Columns:
        """Return what is looked up; without pooling the offsets say nothing."""
        bags = [checked[feature] for feature in self._features]
        weights = [given for _, _, given in bags]
        return Columns(
            self.tables,
            [values for values, _, _ in bags],
            [offsets for _, offsets, _ in bags] if pools else None,
            weights if any(given is not None for given in weights) else None,
            self._means,
        )
