"""Options and step counts of tables that are set by name, as torchrec's optimizers of tables set them."""

from collections.abc import Mapping
from typing import Any

import torch


def check_step(step: Any) -> None:
    """Raise ValueError unless a step count is a whole number of at least 0."""
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise ValueError(f"step must be a whole number of at least 0, not {step!r}")


def changed_options(group: Mapping[str, Any], given: Mapping[str, Any], optimizer: Any) -> dict[str, Any]:
    """Return new options of a group; ``beta1`` and ``beta2`` become ``betas``.

    Raises:
        ValueError: the group does not have an option, or a value is out of range.
    """
    new = dict(given)
    for index, name in enumerate(("beta1", "beta2")):
        if name in new and "betas" in group:
            betas = list(new.get("betas", group["betas"]))
            betas[index] = new.pop(name)
            new["betas"] = tuple(betas)
    unknown = sorted(new.keys() - (group.keys() - {"params"}))
    if unknown:
        raise ValueError(f"the optimizer of a table does not have the options {unknown}")
    optimizer.check_options({**group, **new})
    return new


def set_options(group: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Set options of a group; a learning rate that is a tensor is changed in place.

    A schedule or a CUDA graph may have the tensor.
    """
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and "lr" in new:
        lr.fill_(new["lr"])
        new = {**new, "lr": lr}
    group.update(new)
