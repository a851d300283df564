"""Semi-synchronous training: many local steps, then a global one.

::

    for t = 1, 2, 3, …
        local optimizer: step
        if t mod num_local_steps = 0
            global optimizer: global_step(t)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import distributed

from keyedopt.fused.keyed.base import FLAG, KeyedOptimizer
from keyedopt.fused.keyed.composition import Composition
from keyedopt.fused.keyed.foreign_members import check_keyed, saves_groups
from keyedopt.fused.keyed.initialize import initialize, zero_gradients
from keyedopt.fused.keyed.loading import Load
from keyedopt.fused.semi_sync_state import GLOBAL_COUNTER, LOCAL_COUNTER, Members, unprefixed
from keyedopt.fused.semi_sync_steps import GlobalStep, find_global_step, listed, unscale


class SemisyncOptimizer(Composition):
    """Step a local optimizer each time, and a global one every `num_local_steps` times.

    Args:
        global_params: parameters of the global model, or groups of them.
        optimizer: the local optimizer, keyed.
        global_optimizer: the global optimizer, keyed. It, or the one that it wraps, has a method
            ``global_step(step, closure)``; the gradients of its parameters are set to None before.
        num_local_steps: local steps from one global step to the next.
        semi_sync_worker_shard_group: process group for whoever reports metrics; no part of a step.
        offload_global_model: keep parameters that only the global optimizer has in CPU memory between
            global steps.
        non_blocking: do not wait for the copies from the CPU.

    Raises:
        ValueError: an argument out of its range, no ``global_step``, or keys and parameters of the two
            optimizers that contradict each other.
        IndexError: no global parameters.
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
        check_keyed([optimizer, global_optimizer])
        super().__init__()
        if type(num_local_steps) is not int or num_local_steps < 1:
            raise ValueError(f"num_local_steps must be an integer of at least 1, not {num_local_steps!r}")
        find_global_step(global_optimizer)  # not only after the first local steps
        self._optimizer = optimizer
        self._global_optimizer = global_optimizer
        self._worker_model_params = listed(global_params)
        self._num_local_steps = num_local_steps
        self._worker_shard_group = semi_sync_worker_shard_group
        self._local_step_counter = torch.zeros((), dtype=torch.int64, device="cpu")
        self._global_step_counter = torch.zeros((), dtype=torch.int64, device="cpu")
        self._own_defaults[FLAG] = saves_groups(optimizer)
        self._members().check(self._own_defaults[FLAG])
        trained = set(map(id, optimizer.params.values()))
        outer = [param for param in global_optimizer.params.values() if id(param) not in trained]
        self._homes = [(param, param.device) for param in outer if offload_global_model]
        self._non_blocking = non_blocking
        self._put_away()

    def _parts(self) -> list[tuple[str, Any]]:
        return [("", self._optimizer), ("", self._global_optimizer)]

    def _members(self) -> Members:
        counters = {GLOBAL_COUNTER: self._global_step_counter, LOCAL_COUNTER: self._local_step_counter}
        return Members(self._optimizer, self._global_optimizer, counters)

    @property
    def params(self) -> Mapping[str, Any]:  # type: ignore[override]
        """Parameters of both optimizers by key, and the counters."""
        return MappingProxyType(self._members().params())

    @property
    def state(self) -> Mapping[Any, Any]:  # type: ignore[override]
        """Live state of both optimizers by parameter, under prefixed keys."""
        return MappingProxyType(self._members().state())

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """Whether groups are saved."""
        return self._own_defaults

    def __repr__(self) -> str:
        names = f"semi_sync_local_optim: {self._optimizer!r}"
        return f"{names}, semi_sync_global_optim: {self._global_optimizer!r}"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a local step and, every `num_local_steps` times, a global one.

        Args:
            closure: evaluates the model; both steps get it, with gradients enabled.

        Returns:
            What the local step returns.
        """
        if not unscale(self):
            return None
        evaluate = closure and torch.enable_grad()(closure)
        with torch.no_grad():
            result = self._optimizer.step(closure=evaluate)
            self._local_step_counter += 1
            if int(self._local_step_counter) % self._num_local_steps == 0:
                self._global_optimizer.zero_grad(set_to_none=True)
                with self._global_model():
                    find_global_step(self._global_optimizer)(self._local_step_counter, evaluate)
                self._global_step_counter += 1
        return result

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # A scaler would divide the gradient of a parameter once for each optimizer that has it.
        return self._members().overlap()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set all gradients to None, or without `set_to_none` to zero."""
        super().zero_grad(set_to_none=set_to_none)

    def init_state(self, sparse_grad_parameter_names: set[str] | None = None) -> None:
        """Create the state of both optimizers; counters stay. See `KeyedOptimizer.init_state`."""
        self._optimizer.init_state(sparse_grad_parameter_names)
        outer = self._global_optimizer
        if all(outer.state.get(param) for param in outer.params.values()):
            return
        sparse = sparse_grad_parameter_names or set()
        with self._global_model():
            initialize(GlobalStep(outer), sparse)
            zero_gradients(outer.params, sparse)  # a global step may make gradients of its own

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Refuse: options are of one optimizer, but parameters may belong to both.

        Raises:
            ValueError: always.
        """
        raise ValueError("add the group to the local optimizer, the global one, or both")

    def _save(self) -> dict[str, Any]:
        return self._members().save(self.defaults[FLAG])

    def _check(self, state_dict: Mapping[str, Any]) -> Load:
        return self._members().check_load(state_dict, self.defaults[FLAG])

    @staticmethod
    def _extract_prefixed_state(param_state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        return unprefixed(param_state, prefix)

    @contextmanager
    def _global_model(self) -> Iterator[None]:
        """Have parameters that are kept on the CPU where they came from."""
        for param, home in self._homes:
            param.data = param.data.to(home, non_blocking=self._non_blocking)
        try:
            yield
        finally:
            self._put_away()

    def _put_away(self) -> None:
        for param, _ in self._homes:
            param.data = param.data.to("cpu")  # waits: anyone may look at it from now on
