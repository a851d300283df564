"""Helpers for cases of embedding modules: tables, features, lookups."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from keyedopt.conformance.suite.support.described import unwrapped
from keyedopt.conformance.suite.support.device import as_tensor, the_device
from keyedopt.conformance.suite.support.inputs import _numbers

#: Two tables: name, rows, width, features.
TABLES = (("t", 6, 4, ("f", "g")), ("u", 5, 8, ("h",)))
#: Two bags for each of their features: duplicates within a bag, between bags and features, an empty bag.
BAGS = {"f": [[0, 1, 1], [2]], "g": [[], [1, 5]], "h": [[3, 3], [0]]}
#: One table with one feature.
ONE_TABLE = (("t", 6, 4, ("f",)),)
#: Whether the running case has made an embedding module.
MADE = [False]
#: Every optimizer that an embedding module may have.
FUSED_OPTIMIZERS = (
    "SGD",
    "Adagrad",
    "RowWiseAdagrad",
    "Adam",
    "SparseAdam",
    "PartialRowWiseAdam",
    "LAMB",
    "PartialRowWiseLAMB",
    "LarsSGD",
    "Ftrl",
)


def _filled(seed: int) -> Callable[[torch.Tensor], None]:
    def fill(weight: torch.Tensor) -> None:
        with torch.no_grad():
            weight.copy_(_numbers(weight.shape, seed))

    return fill


def collection(
    impl: Any,
    optimizer: str | None = "SGD",
    options: Mapping[str, Any] | None = None,
    tables: Sequence[Any] = TABLES,
    kind: str = "EmbeddingBagCollection",
    pooling: str = "SUM",
    dtype: str = "float32",
    weighted: bool = False,
    device: Any = None,
    **arguments: Any,
) -> Any:
    """Make the implementation's embedding module, with fixed weights; ``lr`` is 0.125 unless given.

    A table that is listed with a fifth and a sixth item has this pooling and dtype.
    """
    MADE[0], bags = True, kind == "EmbeddingBagCollection"
    config = impl.EmbeddingBagConfig if bags else impl.EmbeddingConfig
    configs = [
        config(
            num_embeddings=rows,
            embedding_dim=width,
            name=name,
            feature_names=list(features),
            data_type=getattr(torch, own[1] if own[1:] else dtype),
            init_fn=_filled(seed),
            **({"pooling": impl.PoolingType[own[0] if own else pooling]} if bags else {}),
        )
        for seed, (name, rows, width, features, *own) in enumerate(tables)
    ]
    chosen = None if optimizer is None else getattr(impl, optimizer)
    chosen, kwargs = unwrapped(chosen, {"lr": 0.125, **(options or {})} if optimizer else {})
    arguments = {"is_weighted": weighted, "device": device or the_device(), **arguments}
    return getattr(impl, kind)(configs, chosen, kwargs, **arguments)


def jagged(
    bags: Mapping[str, Any], weights: Mapping[str, Any] | None = None, device: Any = None
) -> dict[str, Any]:
    """Make features from bags of row numbers: values, offsets, and weights if given."""
    device, made = device or the_device(), dict[str, Any]()
    for name, listed in bags.items():
        values = torch.tensor([row for bag in listed for row in bag], dtype=torch.int64, device=device)
        ends = list(itertools.accumulate(map(len, listed), initial=0))
        parts = [values, torch.tensor(ends, dtype=torch.int64, device=device)]
        if weights is not None:
            parts.append(torch.tensor([w for bag in weights[name] for w in bag], device=device))
        made[name] = tuple(parts)
    return made


def tables_of(module: Any) -> dict[str, torch.Tensor]:
    """Return the live tables of an embedding module by name, also of one without an optimizer."""
    params = module.fused_optimizer.params or dict(module.named_parameters())
    return {key.removesuffix(".weight").rpartition(".")[-1]: weight for key, weight in params.items()}


def tables_and_state(module: Any) -> dict[str, Any]:
    """Return all live data that a step may change: tables and state."""
    return {"tables": tables_of(module), "state": module.fused_optimizer.state_dict()["state"]}


def lookups(module: Any, features: Any, seed: int = 1) -> torch.Tensor:
    """Look up, and return a loss with a different gradient for each output and seed."""
    outputs = module(features)
    loss = torch.zeros((), dtype=torch.float64)
    for index, name in enumerate(sorted(outputs)):
        output = outputs[name]
        factor = _numbers(output.shape, 31 * seed + index).to(output.device, output.dtype)
        loss = loss + (output * factor).sum().double().cpu()
    return loss


def fit(module: Any, features: Any, steps: int = 1, seed: int = 1) -> None:
    """Train an embedding module with a different gradient in each step."""
    for step in range(steps):
        lookups(module, features, seed + step).backward()


def train_rows(module: Any, rows: Sequence[int], grads: Any) -> None:
    """Train these rows of the only table with these gradients, one bag per row."""
    output = module(jagged({"f": [[row] for row in rows]}))["f"]
    (output * as_tensor(grads).to(output.dtype)).sum().backward()
