"""Train torchrec's tables, sharded by its `DistributedModelParallel`, with FBGEMM's kernels.

torchrec chooses FBGEMM's kernel of a table by the class in ``param._optimizer_classes``. It knows only
torch's classes and its own. It passes ``param._optimizer_kwargs`` to FBGEMM unchanged. FBGEMM ignores some of
these arguments, and gives others another meaning. So keyedopt's classes and arguments are translated before
the model is sharded.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from keyedopt.fused import optimizers, rowwise_adagrad, sparse_adam
from keyedopt.fused.backends.fbgemm.arguments import arguments
from keyedopt.fused.embedding.table_optimizers import make_optimizer
from keyedopt.reference import rule_optimizer

__all__ = ["use_fbgemm_kernels"]

#: The class of torchrec for each algorithm that FBGEMM has as the specification says.
CLASSES = {
    "sgd": "SGD",
    "adagrad": "Adagrad",
    "rowwise_adagrad": "RowWiseAdagrad",
    "adam": "Adam",
    "partial_rowwise_adam": "PartialRowWiseAdam",
}
#: Options that FBGEMM's module lacks, with their values that change nothing.
NEUTRAL: Mapping[str, Any] = {
    "lr_decay": 0.0,
    "maximize": False,
    "nesterov": False,
    "dampening": 0.0,
    "initial_accumulator_value": 0.0,
    "rows": "given",
    "bias_correction": "global",
    "eps_placement": "inside_denominator",
    "error_if_nonfinite": False,
}


def use_fbgemm_kernels(model: nn.Module, device: torch.device | str) -> None:
    """Let `DistributedModelParallel` train tables with FBGEMM's kernel of their keyedopt optimizer.

    Call this function between `apply_optimizer_in_backward`, keyedopt's or torchrec's, and the planner.
    Tables whose optimizer is a class of torch or torchrec are not changed. Sharded tables use the formula and
    the options of the optimizer; options that are left out have the defaults of tables
    (`EmbeddingBagCollection`). Weights in half precision are rounded to nearest. State that was made before
    sharding is lost, as with torchrec's classes.

    Args:
        model: has torchrec's collections of tables, not yet sharded.
        device: of the sharded tables: FBGEMM has fewer kernels and options on the CPU.

    Raises:
        ValueError: FBGEMM has no equal of an optimizer or of an option; nothing is changed.
        ModuleNotFoundError: torchrec is not installed.

    Source: torchrec.distributed.utils.optimizer_type_to_emb_opt_type.

    >>> from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    >>> from keyedopt.fused import RowWiseAdagrad, apply_optimizer_in_backward, use_fbgemm_kernels
    >>> table = EmbeddingBagConfig(num_embeddings=4, embedding_dim=4, name="t", feature_names=["f"])
    >>> bags = EmbeddingBagCollection([table])
    >>> apply_optimizer_in_backward(RowWiseAdagrad, bags.parameters(), {"lr": 0.5})
    >>> use_fbgemm_kernels(bags, "cpu")
    >>> bags.embedding_bags["t"].weight._optimizer_classes[0].__module__
    'torchrec.optim.rowwise_adagrad'
    """
    changes = []
    for name, param in model.named_parameters():
        classes = getattr(param, "_optimizer_classes", [])
        if any(issubclass(one, rule_optimizer.RuleOptimizer) for one in classes):
            if len(classes) > 1:
                raise ValueError(f"{name} has {len(classes)} optimizers, but FBGEMM's kernels have one")
            given: Any = param
            try:
                found = translated(classes[0], given._optimizer_kwargs[0], param, torch.device(device).type)
            except ValueError as error:
                raise ValueError(
                    f"{classes[0].__name__} of {name} has no equal in FBGEMM: {error}"
                ) from error
            changes.append((given, found))
    for param, (kind, kwargs) in changes:
        param._optimizer_classes, param._optimizer_kwargs = [kind], [kwargs]


def translated(
    kind: type[torch.optim.Optimizer], kwargs: Mapping[str, Any], param: torch.Tensor, device: str
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """Return the class of torchrec and the arguments of FBGEMM's module for one table.

    Raises:
        ValueError: FBGEMM has no equal on this type of device.
    """
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
    from torchrec import optim as torchrec_optim

    optimizer = make_optimizer(_own_class(kind), kwargs)
    group = optimizer.param_groups[0]
    step = optimizer.make_step(group)
    found = arguments(step, param.dtype, device)
    if step.algorithm not in CLASSES:
        raise ValueError(f"its module has no {step.algorithm}")
    for option, neutral in NEUTRAL.items():
        if option in group and group[option] != neutral:
            raise ValueError(f"its module has no argument for {option}={group[option]!r}")
    options = {"lr": found.rate, **found.options}
    if "weight_decay_mode" in options:
        options["weight_decay_mode"] = WeightDecayMode(options["weight_decay_mode"])
    if param.dtype is not torch.float32:
        options["stochastic_rounding"] = False
    return getattr(torchrec_optim, CLASSES[step.algorithm]), options


def _own_class(kind: type[torch.optim.Optimizer]) -> type[rule_optimizer.RuleOptimizer]:
    """Return the class in `fused` of one in `reference` or `fused`."""
    for module in (optimizers, rowwise_adagrad, sparse_adam):
        own = getattr(module, kind.__name__, None)
        if own is not None and kind in own.__mro__:
            return own  # type: ignore[no-any-return]
    raise ValueError("only keyedopt's own classes without accumulation are translated")
