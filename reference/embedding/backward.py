"""Where the backward pass of a collection reaches its tables."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import register_multi_grad_hook

from keyedopt.reference.embedding.lookup import gradient_dtype, stand_in, uncompiled

#: Tables, each once, with the gradient of each: row numbers (N,), with repetitions, and values (N, D).
Gradients = Sequence[tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]]


class Backward:
    """The stand-ins of some tables, and a hook that is called once a backward pass with all their gradients.

    A copy begins without stand-ins. They are made for the tables as they are, in the first forward.

    Args:
        update: a method that is called with the gradients, when those of all tables that the pass reaches are
            complete. If its object no longer exists, the backward pass raises RuntimeError.
    """

    def __init__(self, update: Callable[[Gradients], None]) -> None:
        self._update = update
        self._leaves: dict[str, torch.Tensor] = {}

    def leaves(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the stand-ins of these tables, the same ones as long as the tables stay what they are."""
        same = self._leaves.keys() == weights.keys()
        if not same or any(not _fits(self._leaves[name], weight) for name, weight in weights.items()):
            self._renew(weights)
        return self._leaves

    def present(self) -> Mapping[str, torch.Tensor]:
        """Return the stand-ins that the last call of `leaves` returned."""
        return self._leaves

    def _renew(self, weights: Mapping[str, torch.Tensor]) -> None:
        # The hook of former stand-ins stays: graphs of earlier forward passes may reach them.
        self._leaves = {name: stand_in(weight) for name, weight in weights.items()}
        for leaf in self._leaves.values():
            leaf.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
        # Autograd's nodes keep a hook, and Python frees no cycle through them: the hook keeps nothing alive.
        update, tables = weakref.WeakMethod(self._update), [weakref.ref(table) for table in weights.values()]

        @uncompiled
        def complete(grads: Sequence[torch.Tensor | None]) -> None:
            apply = update()
            if apply is None:
                raise RuntimeError("the module of a lookup no longer exists, so its tables cannot be updated")
            pairs = zip(tables, grads, strict=True)
            found = [(table(), _listed(grad)) for table, grad in pairs if grad is not None]
            apply([(table, rows) for table, rows in found if table is not None])

        register_multi_grad_hook(list(self._leaves.values()), complete)

    def __getstate__(self) -> dict[str, Any]:
        return {"_update": self._update, "_leaves": {}}


def _fits(leaf: torch.Tensor, weight: torch.Tensor) -> bool:
    return leaf.device == weight.device and leaf.dtype == gradient_dtype(weight.dtype)


def _listed(grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad = grad.detach()
    return grad._indices()[0], grad._values()


def _drop_gradient(leaf: torch.Tensor) -> None:
    leaf.grad = None
