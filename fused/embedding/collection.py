"""The collections of embedding tables, updated in the backward pass by the fastest backend for each table."""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, optim
from torch._compile import _disable_dynamo

from keyedopt.fused.backends import check_name
from keyedopt.fused.backends.packed import PackedLookups
from keyedopt.fused.dense.state_memory import empty
from keyedopt.fused.embedding.backward import Backward, ForwardPass
from keyedopt.fused.embedding.feature_layout import FeatureLayout, make_slots
from keyedopt.fused.embedding.inputs import parse, parse_packed
from keyedopt.fused.embedding.lookup_operator import LOOK_UP
from keyedopt.fused.embedding.optimizer import EmbeddingFusedOptimizer
from keyedopt.reference.embedding.config import EmbeddingBagConfig, EmbeddingConfig
from keyedopt.reference.embedding.jagged import Features, is_keyed, jagged_tensors, keyed_tensor
from keyedopt.reference.embedding.table_collection import Table, TableCollection
from keyedopt.reference.embedding.variable_batch import bags_of_rows, join


class LargePageTable(Table):
    """A table in large pages of memory."""

    empty = staticmethod(empty)


class FusedCollection(TableCollection):
    """Embedding tables that are updated in the backward pass.

    A backward pass, through any number of forward passes, is one step: the gradients of all lookups of a row
    are summed, and the row is updated once, with the present options in ``fused_optimizer.param_groups``.
    Nothing is written before everything is checked. Tables that the loss does not depend on, and tables with
    ``requires_grad=False``, are not updated. In eval mode and without grad mode the tables are only read.
    ``torch.autograd.grad`` updates nothing. A gradient that is inf or NaN changes only its own rows.

    Without an optimizer the tables are plain parameters with sparse gradients.

    Args:
        tables: their configurations, keyedopt's or torchrec's.
        optimizer_type: the class of the optimizer of all tables: torch's SGD, Adagrad, Adam, AdamW or
            SparseAdam, torchrec's RowWiseAdagrad, or one of keyedopt's.
        optimizer_kwargs: its arguments, as the reference's: ``error_if_nonfinite``, the dtype of momentum, ….
        is_weighted: whether each row that is looked up has a weight.
        device: of the tables.
        backend: the name of a backend, see `keyedopt.fused.backends`; ``"auto"`` chooses by device, dtype and
            algorithm.
        rounding_seed: of stochastic rounding of tables in float16 and bfloat16, an integer in [0, 2⁶³); None
            rounds to nearest. To resume SGD, Adagrad, row-wise Adagrad or LARS bit for bit, save
            ``fused_optimizer.rounding_steps`` with the checkpoint, and restore it.
        strict: whether invalid row numbers and offsets raise at once on every device. On CUDA this
            synchronizes in each forward pass. Without it invalid lookups read and write nothing, every later
            update is suppressed, and `check` raises the error.
        process_group: the ranks with replicas of the tables, which begin with the rows of the first rank. A
            backward pass updates all replicas alike, by the mean over the ranks of their gradients, as
            DistributedDataParallel does. All ranks of the group take part in each backward pass.
        location: where torchrec's collections would place the tables: FBGEMM's `EmbeddingLocation`. HOST
            requires the device "cpu", DEVICE an accelerator; None accepts every device.
        need_indices: whether the `JaggedTensor` of each output of an `EmbeddingCollection` has the row
            numbers as its weights, as in torchrec.

    Raises:
        ValueError: names the argument that is not valid.
        RuntimeError: the backend cannot run here; the message says what to install.
    """

    table_class = LargePageTable
    look_up_operator = LOOK_UP

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        optimizer_type: type[optim.Optimizer] | None = None,
        optimizer_kwargs: Mapping[str, Any] | None = None,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        backend: str = "auto",
        rounding_seed: int | None = None,
        strict: bool = False,
        process_group: Any = None,
        location: Any = None,
        need_indices: bool = False,
    ) -> None:
        check_name(backend)
        optimizer = EmbeddingFusedOptimizer(backend, rounding_seed)
        super().__init__(tables, optimizer, is_weighted, device, process_group, location, need_indices)
        self._strict = strict
        self._rows: dict[str, int] = {}
        for table in self._configs:
            for feature in table.feature_names:
                self._rows[feature] = min(table.num_embeddings, self._rows.get(feature, table.num_embeddings))
        self._features = list(self._rows)
        self._slots = make_slots(self._configs, self._features, self.pools)
        widths = {table.name: table.embedding_dim for table in self._configs}
        self._widths = {slot.output: widths[slot.table] for slot in self._slots}
        self._backward = Backward(self._optim.update)
        self._layout: FeatureLayout | None = None
        self.set_first_optimizer(optimizer_type, optimizer_kwargs)

    def set_optimizer(
        self,
        optimizer_class: type[optim.Optimizer],
        weights: Sequence[Tensor],
        optimizer_kwargs: Mapping[str, Any],
    ) -> None:
        """Update some of the tables with an optimizer of this class; see `TableCollection.set_optimizer`."""
        super().set_optimizer(optimizer_class, weights, optimizer_kwargs)
        self._layout = None

    def forward(self, features: Features) -> Any:
        """Look up, and pool in an `EmbeddingBagCollection`.

        Args:
            features: for each feature ``(values, offsets)``, with weights ``(values, offsets, weights)``, or
                a `JaggedTensor`; or torchrec's `KeyedJaggedTensor`, whose weights are ignored if
                `is_weighted` is False. A `KeyedJaggedTensor` is looked up by one call without being split if
                `explain` says so and no weight needs a gradient; Triton does not synchronize then.

        Returns:
            The output by feature, or by ``feature@table`` if several tables have the feature. With pooling it
            is (B, D); without, (N, D), with the offsets of the input. For a `KeyedJaggedTensor` a
            `KeyedTensor` with pooling, whose one tensor (B, sum of D) the kernels write; a `JaggedTensor` by
            name without.
            A variable batch size is split: pooled bags are repeated in the rows that ``inverse_indices`` say.

        Raises:
            ValueError: names the feature and what is wrong with it; no table is read.
        """
        if torch.compiler.is_compiling():
            traced = self.can_trace(features)
            return self.look_up_traced(features) if traced else _look_up(self, features)
        return self._look_up(features)

    def _look_up(self, features: Features) -> Any:
        keyed = is_keyed(features)
        if keyed and self.pools:
            found = self._look_up_packed(features)
            if found is not None:
                return keyed_tensor(features, self._widths, found)
        inputs = parse(features, self._features, self._is_weighted)
        bags = bags_of_rows(features, self.lookup_features()) if keyed and self.pools else None
        layout = self.current_layout()
        layout.check_devices(inputs)
        training = self.training and torch.is_grad_enabled()
        if training:
            self.check_replication()
        by_autograd = training and any(part.trains_by_autograd() for part in layout.parts)
        if by_autograd or not layout.checks_contents or inputs.has_no_bags():
            inputs.check_contents(self._rows)
        outputs: dict[str, Any] = dict.fromkeys(self._widths)
        forward = ForwardPass(self._backward)
        for part in layout.parts:
            if by_autograd and part.trains_by_autograd():
                outputs.update(part.look_up_by_autograd(inputs))
                forward.add(part.without_autograd(), inputs, training=False)
            else:
                forward.add(part, inputs, training)
        try:
            layout.check_offsets(inputs)
            joins = layout.joins_outputs and not by_autograd and keyed and bags is None
            forward.run(self._widths if joins else None)
            if self._strict:
                self.check()
        except ValueError:  # a backend does not know which feature is wrong
            layout.forget_counts()
            inputs.check_contents(self._rows)
            raise
        if joins:
            return keyed_tensor(features, self._widths, *forward.differentiable())
        outputs.update(forward.outputs())
        if not keyed:
            return outputs
        if self.pools:
            return keyed_tensor(features, self._widths, join(list(outputs.values()), bags))
        offsets = [inputs.offsets[slot.feature] for slot in self._slots]
        values = [inputs.values[slot.feature] for slot in self._slots] if self.need_indices() else None
        return jagged_tensors(features, outputs, offsets, values)

    def _look_up_packed(self, features: Any) -> Tensor | None:
        """Return the joined output without splitting the input; None if the input has to be split."""
        inputs = parse_packed(features, self._is_weighted)
        layout = self.current_layout()
        packed = None if inputs is None else layout.packed(inputs[0])
        if inputs is None or packed is None or inputs[1].device != layout.parts[0].group.device:
            return None
        part = layout.parts[0]
        training = self.training and torch.is_grad_enabled()
        if training:
            self.check_replication()
        lookups = PackedLookups(packed, *inputs[1:])
        try:
            output = ForwardPass(self._backward).run_packed(
                part.group, lookups, training and part.weights[0].requires_grad
            )
            if self._strict:
                self.check()
        except ValueError:  # a backend does not know which feature is wrong
            layout.forget_counts()
            parse(features, self._features, self._is_weighted).check_contents(self._rows)
            raise
        return output

    def explain(self) -> str:
        """Return which backend and kernels run for which tables, and why no other backend does.

        The last line says whether one call looks up a `KeyedJaggedTensor`, or why it is split by key. Tables
        without an optimizer that need a gradient are looked up by torch's operators, whatever the backend.
        """
        layout = self.current_layout()
        why = layout.why_split(self._features)
        packed = f"a KeyedJaggedTensor is split: {why}" if why else "a KeyedJaggedTensor is not split"
        return "\n".join([*(group.explain() for group in layout.groups), packed])

    def extra_repr(self) -> str:
        """Return the backend of the tables, for ``repr``; see `explain`."""
        groups = self.current_layout().groups
        return "\n".join(f"{', '.join(group.names)}: backend={group.backend.name!r}" for group in groups)

    def check(self) -> None:
        """Synchronize, and raise what was wrong with lookups since the last call.

        Raises:
            ValueError: says what was wrong; no table on that device was updated since.
        """
        self.current_layout().check()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state of the module as torch does, after `check`: invalid lookups suppress updates.

        Raises:
            ValueError: earlier lookups were invalid.
        """
        if self._layout is not None:
            self._layout.check()
        return super().state_dict(*args, **kwargs)

    @property
    def strict(self) -> bool:
        """Whether invalid row numbers and offsets raise at once on every device."""
        return self._strict

    @property
    def backward(self) -> Backward:
        """The leaf by which autograd differentiates the module."""
        return self._backward

    def prepare_tracing(self) -> None:
        """Make the leaf of the module before a compiler traces a forward pass."""
        super().prepare_tracing()
        self._backward.leaf(self.device)

    def traced_leaves(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the leaf of the module, if a table needs a gradient."""
        return [self._backward.present()] if any(weight.requires_grad for weight in weights) else []

    def current_layout(self) -> FeatureLayout:
        """Return the layout, made anew if a tensor or a parameter group was replaced."""
        children: Any = self._modules[self.children_name]
        tables = children._modules
        if self._layout is None or not self._layout.is_current(tables, self._optim.param_groups):
            weights = [table._parameters["weight"] for table in tables.values()]
            groups = self._optim.table_groups(self._weights())
            self._layout = FeatureLayout(groups, weights, self._slots, self.pools)
            self._optim.layout = weakref.ref(self._layout)
        return self._layout

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._layout = None
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_layout": None}


#: Called by a compiled model between two of its graphs: tracing the launches of kernels takes seconds. (The
#: public ``torch.compiler.disable`` imports the compiler at once.)
_look_up = _disable_dynamo(FusedCollection._look_up)


class EmbeddingBagCollection(FusedCollection):
    """Tables whose rows are pooled, bag by bag: for each feature and table one output (B, D).

    Output is float32 at least; an empty bag gives zeros.

    >>> import torch
    >>> from keyedopt.fused import EmbeddingBagCollection, EmbeddingBagConfig
    >>> table = EmbeddingBagConfig(3, 1, name="t", feature_names=["f"], init_fn=torch.nn.init.ones_)
    >>> bags = EmbeddingBagCollection([table], torch.optim.SGD, {"lr": 0.1})
    >>> pooled = bags({"f": (torch.tensor([0, 2, 2]), torch.tensor([0, 1, 3]))})["f"]
    >>> pooled.detach()
    tensor([[1.],
            [2.]])
    >>> pooled.sum().backward()
    >>> bags.embedding_bags["t"].weight.data
    tensor([[0.9000],
            [1.0000],
            [0.8000]])
    """

    children_name = "embedding_bags"

    def embedding_bag_configs(self) -> Sequence[EmbeddingBagConfig]:
        """Return the configurations of the tables, as torchrec's collection does."""
        return self._configs  # type: ignore[return-value]  # a table without pooling type is summed


class EmbeddingCollection(FusedCollection):
    """Tables whose rows are not pooled: for each feature and table one output (N, D), a row for each value.

    Output is float32 at least; weights multiply the rows.

    >>> import torch
    >>> from keyedopt.fused import EmbeddingCollection, EmbeddingConfig
    >>> table = EmbeddingConfig(3, 1, name="t", feature_names=["f"], init_fn=torch.nn.init.ones_)
    >>> tables = EmbeddingCollection([table], torch.optim.SGD, {"lr": 0.25})
    >>> rows = tables({"f": (torch.tensor([0, 2, 2]), torch.tensor([0, 1, 3]))})["f"]
    >>> rows.sum().backward()
    >>> rows.tolist(), tables.embeddings["t"].weight.tolist()
    ([[1.0], [1.0], [1.0]], [[0.75], [1.0], [0.5]])
    """

    children_name = "embeddings"
    pools = False

    def embedding_configs(self) -> Sequence[EmbeddingConfig]:
        """Return the configurations of the tables, as torchrec's collection does."""
        return self._configs
