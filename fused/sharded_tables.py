"""Train the tables that torchrec has sharded with keyedopt's kernels.

torchrec's sharded modules look up in a module of FBGEMM. Input distribution, checkpoints and the optimizer of
the sharded tables only read and write the memory of that module. So its ``forward`` is the narrowest seam: a
backend looks up and updates the same memory. torchrec's planner has no seam: ``_create_embedding_kernel``, a
private method, compares a fixed list of compute kernels, and it raises ValueError for ``CUSTOMIZED_KERNEL``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from keyedopt.fused.backends import check_name, choose
from keyedopt.fused.backends.interface import Lookup, Step, Table, Tables
from keyedopt.fused.backends.packed import PackedLayout, PackedLookups

__all__ = ["use_keyedopt_kernels"]

#: The algorithm of each optimizer of FBGEMM, by the name of its `OptimType`.
ALGORITHMS = {"EXACT_SGD": "sgd", "EXACT_ADAGRAD": "adagrad", "EXACT_ROWWISE_ADAGRAD": "rowwise_adagrad"}
#: The tensors of FBGEMM's module that have the rows and states of its tables.
MEMORY = ("weights_host", "weights_dev", "momentum1_host", "momentum1_dev")


def use_keyedopt_kernels(model: nn.Module, backend: str = "auto") -> None:
    """Let the sharded tables of a `DistributedModelParallel` train with a backend of keyedopt.

    Call this function after `DistributedModelParallel`, on all ranks. Sharding, input distribution, names and
    shards of checkpoints, and ``fused_optimizer`` stay torchrec's: the backend updates the rows and states of
    FBGEMM's modules in place. A backward pass uses the learning rate of that moment. Row numbers that a table
    does not have raise ValueError, where FBGEMM warns and returns zeros.

    Args:
        model: has tables that are sharded by tables, rows or columns.
        backend: the name of a backend, see `keyedopt.fused.backends`; ``"auto"`` chooses the fastest one.

    Raises:
        ValueError: the model has no sharded tables, or a backend cannot do what FBGEMM does for one: the
            optimizer is not SGD, Adagrad or RowWiseAdagrad; an option such as weight decay is set; weights
            are not in float32 or float16 in the memory of one device. Nothing is changed.
        RuntimeError: the backend cannot run here; the message says what to install.

    Source: torchrec.distributed.batched_embedding_kernel;
    fbgemm_gpu.split_table_batched_embeddings_ops_training.

    >>> import torch
    >>> from keyedopt.fused import use_keyedopt_kernels
    >>> use_keyedopt_kernels(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
    ...
    ValueError: the model has no tables that DistributedModelParallel has sharded with fused kernels
    """
    check_name(backend)
    found = [(one, TableKernels(one, backend)) for one in _fbgemm_modules(model)]
    if not found:
        raise ValueError(
            "the model has no tables that DistributedModelParallel has sharded with fused kernels"
        )
    for one, kernels in found:
        one.forward = kernels


class TableKernels:
    """The lookup of a module of FBGEMM, which a backend does; called as the module's ``forward``.

    Args:
        module: a `SplitTableBatchedEmbeddingBagsCodegen`.
        backend: the name of a backend.

    Raises:
        ValueError: no backend does what the module does.
    """

    def __init__(self, module: Any, backend: str) -> None:
        why = _refusal(module)
        if why:
            raise ValueError(f"keyedopt's kernels have no equal of FBGEMM's module: {why}")
        self._module = module
        self._algorithm = ALGORITHMS[module.optimizer.name]
        self._of_feature = tuple(module.feature_table_map)
        self._pools = module.pooling_mode.name != "NONE"
        self._memory: list[int] = []
        self._tables = Tables([])
        self._layout = self._make_layout(module.pooling_mode.name == "MEAN")
        self._backend = choose(backend, self._current_tables(), self._step())

    def __call__(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None, **others: Any
    ) -> Tensor:
        """Return the joined output (B, sum of widths), or (N, width) without pooling.

        Raises:
            ValueError: an argument is not supported, or a row number or offset is invalid; no table is read.
        """
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ValueError(
                f"keyedopt's kernels do not support the argument {given[0]}: use FBGEMM's kernels"
            )
        if per_sample_weights is not None:
            if per_sample_weights.requires_grad or not self._pools:
                raise ValueError(
                    "weights of row numbers need pooling and no gradient: use FBGEMM's kernels for others"
                )
            per_sample_weights = per_sample_weights.detach().float().contiguous()
        bags = (offsets.numel() - 1) // len(self._of_feature)
        values = indices.to(torch.int64).contiguous(), offsets.to(torch.int64).contiguous()
        lookups = PackedLookups(self._layout, *values, per_sample_weights, bags)
        if not torch.is_grad_enabled():
            return self._look_up(lookups, training=False)
        output: Tensor = _LookUp.apply(torch.empty(0, requires_grad=True), self, lookups)  # type: ignore[no-untyped-call]
        return output

    def _look_up(self, lookups: PackedLookups, training: bool) -> Tensor:
        tables = self._current_tables()
        if self._pools and lookups.bags and self._backend.packs_tables(tables):
            return self._backend.look_up_packed(tables, lookups, training)
        _check_offsets(lookups)
        listed = self._listed(lookups, None)
        if not self._backend.checks_lookups:
            for one in listed:
                _check_rows(one.values, len(tables[one.table].weight))
        found = self._backend.look_up(tables, listed)
        return torch.cat(found, dim=1 if self._pools else 0).float()

    def _update(self, lookups: PackedLookups, grad: Tensor) -> None:
        tables = self._current_tables()
        packs = self._pools and lookups.bags and self._backend.packs_tables(tables)
        given: Any = lookups.with_grad(grad) if packs else self._listed(lookups, grad)
        self._backend.update(tables, given, self._step())
        torch.autograd.graph.increment_version([one for table in tables for one in table.tensors])

    def _listed(self, lookups: PackedLookups, grad: Tensor | None) -> list[Lookup]:
        """Return the lookups of a packed input one by one, which synchronizes."""
        if self._pools and lookups.bags:
            return list(lookups if grad is None else lookups.with_grad(grad))
        bags = lookups.bags
        edges = lookups.offsets[::bags].tolist() if bags else [0] * (len(self._of_feature) + 1)
        offsets = torch.zeros(1, dtype=torch.int64, device=lookups.offsets.device) if self._pools else None
        found = []
        for table, begin, end in zip(self._of_feature, edges[:-1], edges[1:], strict=True):
            part = None if grad is None else grad[begin:end]
            if grad is not None and self._pools:  # an empty batch
                part = grad.new_zeros(0, self._tables[table].weight.shape[1])
            found.append(Lookup(table, lookups.values[begin:end], offsets, grad=part))
        return found

    def _step(self) -> Step:
        eps = 0.0 if self._algorithm == "sgd" else self._module.optimizer_args.eps
        return Step(self._algorithm, lr=float(self._module.learning_rate_tensor), eps=eps)

    def _current_tables(self) -> Tables:
        """Return views of the tables, made anew if the module has other memory, as after a move."""
        module = self._module
        memory = [getattr(module, name).data_ptr() for name in MEMORY if hasattr(module, name)]
        if memory != self._memory:
            states = module.split_optimizer_states() if self._algorithm != "sgd" else []
            tables = []
            for index, weight in enumerate(module.split_embedding_weights()):
                shape = weight.shape[:1] if self._algorithm == "rowwise_adagrad" else weight.shape
                tables.append(
                    Table(weight, tuple(one.detach().view(shape) for [one] in states[index : index + 1]))
                )
            self._tables, self._memory = Tables(tables), memory
        return self._tables

    def _make_layout(self, mean: bool) -> PackedLayout:
        count, begin, columns = len(self._of_feature), 0, []
        for table in self._of_feature:
            width = self._module.embedding_specs[table][1]
            columns.append(slice(begin, begin + width))
            begin += width
        return PackedLayout(self._of_feature, (mean,) * count, tuple(range(count)), tuple(columns), count)


class _LookUp(torch.autograd.Function):
    """The lookup, whose backward pass updates the tables."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, kernels: TableKernels, lookups: PackedLookups) -> Tensor:
        ctx.kernels, ctx.lookups = kernels, lookups
        return kernels._look_up(lookups, training=True)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.kernels._update(ctx.lookups, grads[0])
        return None, None, None


def _check_rows(values: Tensor, rows: int) -> None:
    wrong = values[(values < 0) | (values >= rows)]
    if wrong.numel():
        raise ValueError(f"row numbers must be from 0 to {rows - 1}, not {int(wrong[0])}")


def _check_offsets(lookups: PackedLookups) -> None:
    offsets, count = lookups.offsets, lookups.values.numel()
    if int(offsets[0]) or int(offsets[-1]) != count or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(f"offsets must rise from 0 to the number of row numbers, {count}")


def _refusal(module: Any) -> str:
    """Return why no backend does what a module of FBGEMM does; empty if one may."""
    options, name = module.optimizer_args, module.optimizer.name
    if name not in ALGORITHMS:
        return f"its optimizer is {name}, not {', '.join(ALGORITHMS)}"
    for option in ("gradient_clipping", "weight_decay", "max_norm", "use_rowwise_bias_correction"):
        if getattr(options, option):
            return f"{option}={getattr(options, option)!r}"
    if module.weights_precision.name not in ("FP32", "FP16") or module.output_dtype != 0:
        return "weights must be float32 or float16, and the output float32"
    if module.weights_precision.name == "FP16" and options.stochastic_rounding and not module.use_cpu:
        return "it rounds stochastically: pass stochastic_rounding=False to the optimizer"
    if not {location.name for _, _, location, _ in module.embedding_specs} <= {"HOST", "DEVICE"}:
        return "tables must be in the memory of one device"
    return ""


def _fbgemm_modules(module: nn.Module) -> Iterator[Any]:
    """Yield FBGEMM's modules; torchrec's sharded modules hide theirs from `torch.nn.Module.modules`."""
    if type(module).__name__ == "SplitTableBatchedEmbeddingBagsCodegen":
        yield module
    for child in (*module._modules.values(), *getattr(module, "_lookups", ())):
        if child is not None:
            yield from _fbgemm_modules(child)
