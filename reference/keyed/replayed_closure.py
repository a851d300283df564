"""A closure that a combination has evaluated, for the optimizers that take a closure in their step."""

from collections.abc import Callable
from typing import Any

import torch


def needs_closure(optimizer: Any) -> bool:
    """Return whether a step without a closure raises: LBFGS, by itself or inside."""
    inside = [part for _, part in getattr(optimizer, "optimizers", ())]
    inside += [optimizer._optimizer] if hasattr(optimizer, "_optimizer") else []
    return isinstance(optimizer, torch.optim.LBFGS) or any(map(needs_closure, inside))


class ReplayedClosure:
    """Return the known loss in the first call, and evaluate the original closure in later ones.

    An optimizer that needs several evaluations in a step, such as LBFGS, gets them. Before the first of them
    the gradients of the other parameters are kept, and `restore` puts them back.
    """

    def __init__(self, closure: Callable[[], Any], loss: Any, whole: Any, optimizer: Any) -> None:
        self._closure, self._loss, self._whole, self._optimizer = closure, loss, whole, optimizer
        self._called = False
        self._kept: list[tuple[torch.Tensor, torch.Tensor | None]] | None = None

    def __call__(self) -> Any:
        """Return the loss."""
        if not self._called:
            self._called = True
            return self._loss
        if self._kept is None:
            own = {id(param) for param in self._optimizer.params.values()}
            others = [param for param in self._whole.params.values() if id(param) not in own]
            self._kept = [(param, None if param.grad is None else param.grad.clone()) for param in others]
        with torch.enable_grad():
            return self._closure()

    def restore(self) -> None:
        """Give the other parameters the gradients of the first evaluation again."""
        for param, grad in self._kept or ():
            param.grad = grad
