"""Test doubles of the cases: a recording optimizer, a foreign one, a stateful object, a single rank."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from keyedopt.conformance.suite.support.device import the_device
from keyedopt.conformance.suite.support.inputs import MARK
from keyedopt.conformance.suite.support.mirror import mirrored_ranks
from keyedopt.conformance.suite.support.sharded import process_group


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
                    if not hasattr(param, MARK)
                ]
            )
        self.rates.append(
            [
                group["lr"]
                for group in self.param_groups
                if not any(hasattr(param, MARK) for param in group["params"][:1])
            ]
        )
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


class ForeignKeyed(torch.optim.Optimizer):
    """A keyed optimizer of another library: SGD with momentum that calls its own save and load hooks.

    Each parameter has a group of its own. ``saves`` counts the calls of `state_dict`. With ``refuse``, a load
    writes and then raises an error.
    """

    def __init__(self, params: Mapping[str, Any], lr: float = 0.1) -> None:
        super().__init__([{"params": [param]} for param in params.values()], {"lr": lr})
        self.defaults["_save_param_groups"] = False
        self.params = dict(params)
        self.saves = 0
        self.refuse = False

    def save_param_groups(self, save: bool) -> None:
        """Choose whether groups are saved and loaded."""
        self.defaults["_save_param_groups"] = save

    def state_dict(self) -> dict[str, Any]:
        """Return the live state by key."""
        self.saves += 1
        for before in list(self._optimizer_state_dict_pre_hooks.values()):
            before(self)
        keys = {id(param): key for key, param in self.params.items()}
        saved: dict[str, Any] = {
            "state": {keys[id(param)]: dict(entry) for param, entry in self.state.items()}
        }
        if self.defaults["_save_param_groups"]:
            saved["param_groups"] = [
                {**group, "params": sorted(keys[id(param)] for param in group["params"])}
                for group in self.param_groups
            ]
        for after in list(self._optimizer_state_dict_post_hooks.values()):
            changed = after(self, saved)
            saved = saved if changed is None else changed
        return saved

    def load_state_dict(self, state_dict: Any) -> None:
        """Fill the state in place, create what is missing, and set the options of its groups."""
        for before in list(self._optimizer_load_state_dict_pre_hooks.values()):
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        for key, entry in state_dict["state"].items():
            param = self.params[key]
            live = self._entry(param)
            for name in ("velocity", "steps"):
                live[name].copy_(entry[name])
        if self.defaults["_save_param_groups"]:
            for group, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
                group["lr"] = given["lr"]
        if self.refuse:
            raise RuntimeError("this optimizer refuses to load")
        for after in list(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    def init_state(self, sparse_grad_parameter_names: Any = None) -> None:
        """Create the state and zero gradients."""
        for param in self.params.values():
            param.grad = torch.zeros_like(param)
            self._entry(param)

    def post_load_state_dict(self) -> None:
        """Do nothing."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Evaluate the closure, then step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    entry = self._entry(param)
                    entry["steps"].add_(1)
                    entry["velocity"].mul_(0.9).add_(param.grad)
                    param.sub_(entry["velocity"], alpha=group["lr"])
        return loss

    def _entry(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the state of a parameter; create it if it is missing."""
        entry: dict[str, torch.Tensor] = self.state[param]
        if not entry:
            entry.update(velocity=torch.zeros_like(param, requires_grad=False), steps=torch.zeros(()))
        return entry


@contextlib.contextmanager
def single_rank() -> Iterator[None]:
    """Set up torch.distributed with one rank, in memory and without a network: gloo, on a CPU."""
    if the_device().type != "cpu":
        with mirrored_ranks(1):
            yield
        return
    with process_group("gloo", 1):
        yield
