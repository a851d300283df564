"""Lookups as torch.compile and torch.export trace them: operators in place of Python."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from keyedopt.reference.embedding.config import EmbeddingConfig, PoolingType, output_names
from keyedopt.reference.embedding.inputs import parse_feature
from keyedopt.reference.embedding.jagged import Features, Jagged, is_keyed, jagged_tensors, keyed_tensor
from keyedopt.reference.embedding.operators import SPLIT_KEYS, register
from keyedopt.reference.embedding.variable_batch import has_variable_batch


@dataclass(frozen=True)
class LookupPlan:
    """The lookups of a collection, as the operator takes them.

    Args:
        names: the features.
        outputs: the name of each lookup.
        places: the index of the table of each lookup.
        features: the index of the feature of each lookup.
        means: whether bags of each lookup are divided by their lengths.
        widths: the width of each output, by name.
    """

    names: list[str]
    outputs: list[str]
    places: list[int]
    features: list[int]
    means: list[bool]
    widths: dict[str, int]


def plan_of(configs: Sequence[EmbeddingConfig]) -> LookupPlan:
    """Return the lookups of these tables, in the order of their outputs."""
    names = list(dict.fromkeys(name for config in configs for name in config.feature_names))
    outputs = list(itertools.chain(*output_names(configs)))
    each = [(place, config, name) for place, config in enumerate(configs) for name in config.feature_names]
    return LookupPlan(
        names,
        outputs,
        [place for place, _, _ in each],
        [names.index(name) for _, _, name in each],
        [getattr(config, "pooling", None) is PoolingType.MEAN for _, config, _ in each],
        {output: config.embedding_dim for output, (_, config, _) in zip(outputs, each, strict=True)},
    )


class TracedLookups(nn.Module):
    """The part of a collection that a compiler traces: `look_up_traced` does what `forward` does without one.

    A collection calls `prepare_tracing` whenever its tables or optimizers change, because a compiler cannot
    trace the creation of the tensors that autograd differentiates.
    """

    #: ``look_up`` of the package.
    look_up_operator: ClassVar[Any] = None
    #: Whether bags become one row each.
    pools: ClassVar[bool] = True
    #: The name of the child that has the tables as its children, as in torchrec.
    children_name: ClassVar[str] = ""
    _configs: list[EmbeddingConfig]
    _is_weighted: bool
    _need_indices: bool

    def prepare_tracing(self) -> None:
        """Store the plan of the lookups and the number of the module, which a compiler cannot create."""
        self._plan = plan_of(self._configs)
        self._number = register(self)
        names = [config.name for config in self._configs]
        self._without_optimizer = [name for name in names if not self.trains(self._children()[name].weight)]

    def trains(self, weight: Tensor) -> bool:
        """Return whether a table has an optimizer."""
        raise NotImplementedError

    def traced_leaves(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors by which autograd differentiates the lookups of these tables."""
        raise NotImplementedError

    def lookup_features(self) -> list[str]:
        """Return the feature of each output, in their order."""
        return [self._plan.names[index] for index in self._plan.features]

    def _children(self) -> Any:
        return getattr(self, self.children_name)

    def can_trace(self, features: Features) -> bool:
        """Return whether `look_up_traced` gives all gradients of a forward pass.

        Gradients of tables without an optimizer, and of the weights of lookups, are computed outside of a
        graph, and so are lookups with a variable batch size.
        """
        if _is_exporting():
            return True
        if is_keyed(features) and has_variable_batch(features):
            return False
        if not torch.is_grad_enabled():
            return True
        tables = self._children()
        if self.training and any(tables[name].weight.requires_grad for name in self._without_optimizer):
            return False
        if not self._is_weighted:
            return True
        if is_keyed(features):
            listed = [features.weights_or_none()]  # type: ignore[union-attr]  # of a KeyedJaggedTensor
        else:
            listed = [parse_feature(features, name, True).weights for name in self._plan.names]
        return not any(weights is not None and weights.requires_grad for weights in listed)

    def look_up_traced(self, features: Features) -> Any:
        """Look up by operators. An exported model only reads its tables."""
        plan, weighted, keyed = self._plan, self._is_weighted, is_keyed(features)
        given = _by_key(features, weighted) if keyed else features
        jagged = [parse_feature(given, name, weighted) for name in plan.names]
        children = self._children()
        tables = [children[config.name].weight for config in self._configs]
        exporting = _is_exporting()
        training = self.training and torch.is_grad_enabled() and not exporting
        outputs = self.look_up_operator(
            torch.empty(0),
            self.traced_leaves(tables) if training else [],
            tables,
            plan.names,
            [one.values for one in jagged],
            [one.offsets for one in jagged],
            [one.weights for one in jagged] if weighted else [],
            plan.places,
            plan.features,
            plan.means,
            self.pools,
            0 if exporting else self._number,
        )
        if keyed and self.pools:
            return keyed_tensor(features, plan.widths, torch.cat(outputs, dim=1))
        found = dict(zip(plan.outputs, outputs, strict=True))
        if not keyed:
            return found
        bags = [jagged[one] for one in plan.features]
        values = [one.values for one in bags] if self._need_indices else None
        return jagged_tensors(features, found, [one.offsets for one in bags], values)


_HAS_FLAG = hasattr(torch.compiler, "_is_exporting_flag")


def _is_exporting() -> bool:
    # The compiler of torch 2.11 takes `is_exporting` for True in each graph, which would train no table.
    return torch.compiler._is_exporting_flag if _HAS_FLAG else torch.compiler.is_exporting()


def _by_key(features: Any, weighted: bool) -> Mapping[str, Jagged]:
    if has_variable_batch(features):
        raise ValueError("features with a variable batch size cannot be exported: expand the features first")
    keys, bags = features.keys(), features.stride()
    weights = features.weights_or_none() if weighted else None
    parts = SPLIT_KEYS(features.values(), features.offsets(), weights, list(keys), bags)
    count = len(keys)
    of_keys = zip(
        parts[:count],
        parts[count : 2 * count],
        [None] * count if weights is None else parts[2 * count :],
        strict=True,
    )
    return dict(zip(keys, (Jagged(*each) for each in of_keys), strict=True))
