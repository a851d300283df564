"""The global step of semi-synchronous training: its method, parameters, offloading and initial state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from keyedopt.reference.keyed.initialize import initialize, sparse_rows


def find_global_step(optimizer: Any) -> Callable[[torch.Tensor, Any], object]:
    """Return ``global_step`` of a keyed optimizer, or of the optimizer that it wraps, as torchrec does.

    The search stops there, because calling a deeper method would bypass a schedule around it.
    """
    for place in (optimizer, getattr(optimizer, "_optimizer", None)):
        method = getattr(place, "global_step", None)
        if callable(method):
            return method  # type: ignore[no-any-return]
    raise ValueError(
        "global_optimizer, or the optimizer that it wraps, must have a method "
        f"global_step(step, closure), which {type(optimizer).__name__} has not"
    )


def flatten_parameters(global_params: Iterable[Any]) -> list[torch.Tensor]:
    """Return the parameters in a mix of parameters, (key, parameter) pairs, and groups."""
    if global_params is None or isinstance(global_params, str | torch.Tensor):
        raise ValueError(f"global_params must be parameters or groups of them, not {global_params!r}")
    found: list[torch.Tensor] = []
    given = list(global_params)
    for item in given:
        if isinstance(item, Mapping) and "params" in item:
            inside = item["params"]
            found += flatten_parameters([inside] if isinstance(inside, torch.Tensor) else inside)
        elif isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor):
            found.append(item[1])
        elif isinstance(item, torch.Tensor):
            found.append(item)
        else:
            raise ValueError(f"global_params must be parameters or groups of them, not {type(item).__name__}")
    if not given:
        raise IndexError("global_params is empty: there is nothing to synchronize")
    return found


class GlobalModel:
    """The parameters that only the global optimizer has, in CPU memory except during its steps.

    Args:
        local: the local optimizer.
        outer: the global optimizer.
        offload: whether to offload; without, this class does nothing.
        non_blocking: copy from the CPU without synchronizing.
    """

    def __init__(self, local: Any, outer: Any, offload: bool, non_blocking: bool) -> None:
        self._non_blocking = non_blocking
        trained = {id(param) for param in local.params.values()}
        own = [param for param in outer.params.values() if id(param) not in trained]
        self._devices = [(param, param.device) for param in own] if offload else []
        self._offload()

    @contextmanager
    def on_training_device(self) -> Iterator[None]:
        """Move the parameters to their original device for the time of a global step."""
        for param, device in self._devices:
            _replace_data(param, param.data.to(device, non_blocking=self._non_blocking))
        try:
            yield
        finally:
            self._offload()

    def _offload(self) -> None:
        for param, _ in self._devices:
            _replace_data(param, param.data.to("cpu"))  # synchronizes: code may read the parameter now


def _replace_data(param: torch.Tensor, data: torch.Tensor) -> None:
    """Give a parameter other memory and keep its identity, as ``torch.nn.Module.to`` can."""
    if torch._has_compatible_shallow_copy_type(param, data):
        param.data = data
    else:  # a device that is registered from outside of torch
        moved = torch.nn.Parameter(data, param.requires_grad)
        if param.grad is not None:
            moved.grad = param.grad.to(data.device)
        torch.utils.swap_tensors(param, moved)  # type: ignore[no-untyped-call]


@dataclass
class _OnlyGlobalStep:
    """The global optimizer, with its global step as the step that `initialize` takes."""

    optimizer: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def _dummy_step(self) -> None:
        with torch.no_grad():
            find_global_step(self.optimizer)(torch.zeros((), dtype=torch.int64), None)


def dummy_global_step(optimizer: Any, sparse: set[str]) -> None:
    """Create the state that the first global step would create; change nothing else."""
    if all(optimizer.state.get(param) for param in optimizer.params.values()):
        return
    initialize(_OnlyGlobalStep(optimizer), sparse)  # type: ignore[arg-type]  # has all that `initialize` uses
    for key, param in optimizer.params.items():  # a global step may replace gradients
        if param.requires_grad:
            zeros = torch.zeros_like(param)
            param.grad = sparse_rows(zeros) if key in sparse else zeros


def unscale_once(optimizer: Any) -> bool:
    """Divide each gradient once by the scale of a `GradScaler`; return False if the step must be skipped.

    A scaler leaves this to an optimizer with `_step_supports_amp_scaling`, and sets `found_inf` and
    `grad_scale` on the optimizer.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return True
    scale = optimizer.grad_scale
    if scale is None:
        del optimizer.found_inf, optimizer.grad_scale
        raise RuntimeError(
            "GradScaler.unscale_ has divided the gradients of parameters that both optimizers have "
            "twice: call it with the local optimizer, or leave it to GradScaler.step"
        )
    if float(found_inf):
        return False
    params = {id(param): param for group in optimizer.param_groups for param in group["params"]}
    for param in params.values():
        if param.grad is not None:
            param.grad.mul_(scale.double().reciprocal().to(param.grad.device, torch.float32))
    return True
