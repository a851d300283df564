"""Test doubles of the cases: a recording optimizer, a stateful object, a single rank."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch


class Recorder(torch.optim.Optimizer):
    """An optimizer that changes nothing and records the gradients and learning rates of each step.

    ``received`` contains, for each step, a clone of every gradient (None if it is missing), and ``rates`` the
    ``lr`` of every group. The closure, if any, is called ``evaluations`` times.
    """

    def __init__(self, params: Any, lr: float = 0.1, evaluations: int = 1) -> None:
        super().__init__(params, {"lr": lr})
        self.evaluations = evaluations
        self.received: list[list[torch.Tensor | None]] = []
        self.rates: list[list[Any]] = []

    def step(self, closure: Any = None) -> Any:
        """Record the gradients after each evaluation of the closure."""
        loss = None
        for _ in range(self.evaluations if closure is not None else 1):
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self.received.append(
                [
                    None if param.grad is None else param.grad.detach().clone()
                    for group in self.param_groups
                    for param in group["params"]
                ]
            )
        self.rates.append([group["lr"] for group in self.param_groups])
        return loss


def recording(impl: Any, params: Mapping[str, Any], **options: Any) -> tuple[Any, Any]:
    """Make a keyed optimizer around a `Recorder`, and return both."""
    made: list[Recorder] = []

    def factory(listed: Any) -> Recorder:
        made.append(Recorder(listed, **options))
        return made[0]

    keyed = impl.KeyedOptimizerWrapper(params, factory)
    return keyed, made[0]


def clipping(
    impl: Any, params: Mapping[str, Any], kind: str = "NORM", max_gradient: float = 1.0, **options: Any
) -> tuple[Any, Any]:
    """Make a clipping optimizer around a `Recorder`, and return both."""
    keyed, recorder = recording(impl, params)
    chosen = getattr(impl.GradientClipping, kind)
    return impl.GradientClippingOptimizer(keyed, chosen, max_gradient, **options), recorder


class Stateful:
    """An object that follows PyTorch's stateful protocol; it can be set to raise in a load."""

    def __init__(self, tensor: torch.Tensor, refuse: bool = False) -> None:
        self.tensor = tensor
        self.refuse = refuse

    def state_dict(self) -> dict[str, Any]:
        """Return the live tensor."""
        return {"tensor": self.tensor}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy the tensor in place; an object that is set to raise does so after the copy."""
        self.tensor.detach().copy_(state_dict["tensor"])
        if self.refuse:
            raise RuntimeError("this object refuses to load")


@contextlib.contextmanager
def single_rank() -> Iterator[None]:
    """Set up torch.distributed with one gloo rank, in memory and without a network."""
    from torch import distributed

    store = distributed.HashStore()  # type: ignore[attr-defined]  # public, but not in __all__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            distributed.destroy_process_group()
