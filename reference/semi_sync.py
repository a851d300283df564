"""Semi-synchronous training: many local steps, then one global step.

Workers in different regions cannot exchange gradients at each step. Each worker trains its own copy of the
model with a local optimizer. Every `num_local_steps` steps a global optimizer, for example DiLoCo, combines
the copies::

    for t = 1, 2, 3, …
        local optimizer: step
        if t mod num_local_steps = 0
            global optimizer: global_step(t)

The saved state has torchrec's format, see :mod:`keyedopt.reference.semi_sync_state`.

Differences from torchrec 1.8:

- The two counters are saved from the start, so training resumes at the right distance from the next global
  step.
- `init_state` creates the state for a checkpoint without taking a step.
- A load fills both optimizers, including numbers and groups, or neither.
- Counters increase only with steps that were taken.
- Hooks and copies work.
- A `GradScaler` unscales parameters that both optimizers have once.
- `offload_global_model` offloads.
- The constructor raises ValueError for arguments that cannot work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import distributed

from keyedopt.reference.keyed.base import KeyedOptimizer
from keyedopt.reference.keyed.composition import Composition
from keyedopt.reference.keyed.foreign_members import FLAG, check_keyed, saves_groups
from keyedopt.reference.keyed.pending import PendingLoad
from keyedopt.reference.semi_sync_load import check_load
from keyedopt.reference.semi_sync_state import (
    GLOBAL_COUNTER,
    LOCAL_COUNTER,
    Counters,
    Members,
    extract_prefixed,
)
from keyedopt.reference.semi_sync_steps import (
    GlobalModel,
    dummy_global_step,
    find_global_step,
    flatten_parameters,
    unscale_once,
)


class SemisyncOptimizer(Composition):
    """Step a local optimizer each time, and a global optimizer every `num_local_steps` times.

    Args:
        global_params: parameters of the global model, or groups of parameters.
        optimizer: the local keyed optimizer, for example Adam or Shampoo.
        global_optimizer: the global keyed optimizer. This optimizer, or the optimizer that it wraps, has a
            method ``global_step(step, closure)``; `step` is the number of local steps (a tensor). Before each
            call the gradients of its parameters are set to None.
        num_local_steps: local steps from one global step to the next, at least 1.
        semi_sync_worker_shard_group: process group for code that reports metrics; a step does not use it.
        offload_global_model: keep parameters that only the global optimizer has in CPU memory between
            global steps. Parameters of both optimizers stay on their device.
        non_blocking: copy from the CPU without synchronizing.

    Raises:
        ValueError: an argument is out of range, ``global_step`` is missing, or the two optimizers have
            different parameters under one key or one parameter under two keys.
        IndexError: there are no global parameters, as in torchrec.

    Source: torchrec.optim.semi_sync.SemisyncOptimizer.

    >>> import torch
    >>> from keyedopt.reference import KeyedOptimizerWrapper, SemisyncOptimizer
    >>> class Outer(KeyedOptimizerWrapper):
    ...     def global_step(self, step, closure=None):
    ...         print(f"global step after {int(step)} local steps")
    >>> weight = torch.nn.Parameter(torch.ones(1))
    >>> local = KeyedOptimizerWrapper({"weight": weight}, lambda params: torch.optim.SGD(params, lr=0.5))
    >>> outer = Outer({"weight": weight}, lambda params: torch.optim.SGD(params, lr=0.5))
    >>> optimizer = SemisyncOptimizer([weight], local, outer, num_local_steps=2)
    >>> for _ in range(4):
    ...     optimizer.step()
    global step after 2 local steps
    global step after 4 local steps
    """

    def __init__(
        self,
        global_params: Iterable[Any],
        optimizer: KeyedOptimizer,
        global_optimizer: KeyedOptimizer,
        num_local_steps: int = 16,
        semi_sync_worker_shard_group: distributed.ProcessGroup | None = None,
        offload_global_model: bool = False,
        non_blocking: bool = False,
    ) -> None:
        check_keyed(optimizer)
        check_keyed(global_optimizer)
        super().__init__()
        if isinstance(num_local_steps, bool) or not isinstance(num_local_steps, int) or num_local_steps < 1:
            raise ValueError(f"num_local_steps must be an integer of at least 1, not {num_local_steps!r}")
        find_global_step(global_optimizer)  # raises now, not after the first local steps
        self._optimizer = optimizer
        self._global_optimizer = global_optimizer
        self._worker_model_params = flatten_parameters(global_params)
        self._num_local_steps = num_local_steps
        self._worker_shard_group = semi_sync_worker_shard_group
        self._local_step_counter = torch.zeros((), dtype=torch.int64, device="cpu")
        self._global_step_counter = torch.zeros((), dtype=torch.int64, device="cpu")
        self._own_defaults[FLAG] = bool(saves_groups(optimizer))
        self._members().check(self._own_defaults[FLAG])
        self._global_model = GlobalModel(optimizer, global_optimizer, offload_global_model, non_blocking)

    def _parts(self) -> list[tuple[str, Any]]:
        return [("", self._optimizer), ("", self._global_optimizer)]

    def _members(self) -> Members:
        counters: Counters = {
            GLOBAL_COUNTER: self._global_step_counter,
            LOCAL_COUNTER: self._local_step_counter,
        }
        return Members(self._optimizer, self._global_optimizer, counters)

    # Views

    @property
    def params(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Parameters of both optimizers by key, and the two counters."""
        return MappingProxyType(self._members().params())

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """State of both optimizers by parameter, with prefixed keys; the tensors are live."""
        return MappingProxyType(self._members().state())

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Whether groups are saved."""
        return self._own_defaults

    def __repr__(self) -> str:
        return (
            f"semi_sync_local_optim: {self._optimizer!r}, semi_sync_global_optim: {self._global_optimizer!r}"
        )

    # Stepping

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a local step, and a global step after every `num_local_steps` local steps.

        Args:
            closure: evaluates the model. Both optimizers get it, and call it with gradients enabled.

        Returns:
            The result of the local step.
        """
        if not unscale_once(self):
            return None  # a GradScaler found an infinite gradient
        evaluate = None if closure is None else torch.enable_grad()(closure)
        with torch.no_grad():
            result = self._optimizer.step(closure=evaluate)
            self._local_step_counter += 1
            if int(self._local_step_counter) % self._num_local_steps == 0:
                self._global_optimizer.zero_grad(set_to_none=True)
                with self._global_model.on_training_device():
                    find_global_step(self._global_optimizer)(self._local_step_counter, evaluate)
                self._global_step_counter += 1
        return result

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # Without this a GradScaler divides a gradient once for each group that contains the parameter.
        return self._members().overlap()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of all parameters to None, or to zero without `set_to_none`."""
        super().zero_grad(set_to_none=set_to_none)

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Create the state of both optimizers; counters do not change. See `KeyedOptimizer.init_state`."""
        self._optimizer.init_state(sparse_grad_parameter_names)
        with self._global_model.on_training_device():
            dummy_global_step(self._global_optimizer, sparse_grad_parameter_names or set())

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Raise ValueError: a group has options of one optimizer, and its parameters may belong to both.

        Raises:
            ValueError: always.
        """
        raise ValueError("add the group to the local optimizer, the global one, or both")

    # Saving and loading

    def _save(self) -> dict[str, Any]:
        return self._members().save(self.defaults[FLAG])

    def _check_load(self, state_dict: Mapping[str, Any]) -> PendingLoad:
        return check_load(self._members(), state_dict, self.defaults[FLAG])

    @staticmethod
    def _extract_prefixed_state(param_state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        return extract_prefixed(param_state, prefix)
