"""The base class of the optimizers: the class of the reference, with kernels for the steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from keyedopt.fused.backends.interface import ALGORITHMS, Step
from keyedopt.fused.bulk import native, places
from keyedopt.fused.dense import cpu_fast_path, dense_step, state_memory
from keyedopt.fused.dense.step_hooks import with_step_hooks
from keyedopt.fused.explanation import explain_steps
from keyedopt.fused.sharded_arguments import ShardedArguments
from keyedopt.fused.sparse import sparse_step
from keyedopt.reference import rule_optimizer
from keyedopt.reference.option_checks import as_plain
from keyedopt.reference.rules.options import Rows

#: Options of a group that are fields of a `Step` under the same name.
NUMBERS = (
    *("eps", "weight_decay", "momentum", "dampening", "nesterov", "eta", "lr_decay", "max_norm"),
    *("lr_power", "l1", "l2", "l2_shrinkage", "beta"),
)


class RuleOptimizer(rule_optimizer.RuleOptimizer):
    """An optimizer of the reference whose steps, checks of indices and state memory are replaced.

    A subclass extends this class and then the reference's optimizer, and names the algorithm. The embedding
    modules use its `check_options` and `make_step`.
    """

    #: A key of `ALGORITHMS`.
    algorithm: ClassVar[str]
    #: Set in the body of a class whose steps `cpu_fast_path` may do; not inherited.
    has_fast_path: ClassVar[bool]
    #: A divisor of all gradients while it is set: a tensor with one element on the device of the gradients.
    #: Clipping then needs no separate pass over memory. Some kernels overwrite dense gradients.
    grad_scale: Tensor

    profile_hook_step = staticmethod(with_step_hooks)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; see `keyedopt.reference`."""
        if closure is None and not cpu_fast_path.try_step(self):
            return None
        return rule_optimizer.RuleOptimizer.step(self, closure)  # `super().step` may call hooks again

    def noted_arguments(self, param: Tensor, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of an optimizer in the backward pass, for torchrec's sharding."""
        return ShardedArguments(type(self), param, given)

    def explain(self) -> str:
        """Return which backend or kernels do a step, and why no others do.

        The gradients and the state are those of the moment; if a parameter has none, dense gradients (sparse
        gradients for SparseAdam) and the state after the first step are assumed. Clipping may do more.
        """
        return explain_steps(self)

    def check_gradients(self) -> None:
        """Raise what `step` raises if a gradient cannot be used; an accelerator synchronizes at most once."""
        flags: dict[torch.device, list[Tensor]] = {}
        dense: list[tuple[Tensor, Tensor]] = []
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad
                if grad is not None and (grad.is_cpu or isinstance(grad, DTensor)):
                    self.check_gradient(group, param)
                elif grad is not None and not (grad.is_sparse or group["error_if_nonfinite"]):
                    dense.append((param, grad))
                elif grad is not None:
                    self.check_layout(grad)
                    self.check_shapes(param, grad)
                    found = sparse_step.conditions(grad, group["error_if_nonfinite"])
                    flags.setdefault(grad.device, []).extend(found)
        self._check_dense(dense)
        if not all(torch.stack(found).all() for found in flags.values() if found):
            super().check_gradients()  # which says what is wrong

    def _check_dense(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Check parameters with dense gradients, unless nothing has moved or changed since the last check."""
        states = [value for param, _ in pairs for value in self.state.get(param, {}).values()]
        given = [*chain.from_iterable(pairs), *states]
        found = places([one for one in given if isinstance(one, Tensor)])
        if found == getattr(self, "_checked_places", None):
            return
        for param, grad in pairs:
            self.check_layout(grad)
            self.check_shapes(param, grad)
        self._checked_places = found

    def check_indices(self, indices: Tensor, sizes: Sequence[int]) -> None:
        """Raise ValueError unless the indices (dimensions, N) of a sparse gradient are within the sizes."""
        if native is None or native.outside(indices, tuple(sizes)) is not None:
            super().check_indices(indices, sizes)

    def count_device(self, param: Tensor) -> torch.device:
        """Return the device on which a step reads the count of a parameter without synchronizing."""
        return state_memory.count_device(param)

    def full_state(self, param: Tensor, start: float = 0.0) -> Tensor:
        """Return a state with one number for each element of the parameter."""
        return state_memory.full_state(param, start)

    def row_state(
        self, param: Tensor, *columns: int, start: float = 0.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a state with one number for each row of the parameter, sharded as the rows are."""
        return state_memory.row_state(param, *columns, start=start, dtype=dtype)

    def make_step(self, group: Mapping[str, Any], count: int | Tensor = 1, first: bool = False) -> Step:
        """Return the step of a backend for the parameters of a group.

        Args:
            group: the current options.
            count: t of the next step, at least 1.
            first: whether the state was created for this step.
        """
        options = {name: group[name] for name in NUMBERS if name in group}
        options |= {name: as_plain(group[name]) for name in ("decay", "eps_placement") if name in group}
        if "betas" in group:
            options["betas"] = tuple(group["betas"])
        lr = group["lr"]
        if isinstance(lr, Tensor):  # reading it synchronizes, except on the CPU
            lr = float(lr) if lr.device.type == "cpu" else lr.detach().reshape(())
        return Step(self.algorithm, lr=lr, count=count, first=first, maximize=group["maximize"], **options)

    def update(self, group: dict[str, Any], gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Update parameters of one group; parameters with the same count share a call."""
        same_step: dict[Any, list[dense_step.Work]] = {}
        on_devices: list[Tensor] = []
        repeated: dict[Tensor, int] = {}
        for param, grad in gradients:
            state = self.state.get(param, {})
            first = not state
            if first:
                state.update(self.initial_state(param, group))
            if first and state:  # as in torch, there is no empty entry
                self.state[param] = state
            count: Any = state.get("step")
            if isinstance(count, int):  # in SparseAdam
                count = state["step"] = count + 1
            elif not isinstance(count, Tensor) or count.ndim:  # the backend increments a count of each row
                count = 1
            elif count.device.type == "cpu":
                count += 1
                count = int(count)
            else:
                on_devices.append(count)
                count = None
            # A parameter that is listed twice is updated twice, one update after the other.
            again = repeated[param] = repeated.get(param, -1) + 1
            key = (count, first, self._state_names(state), again)
            same_step.setdefault(key, []).append((param, grad, state))
        if on_devices:
            torch._foreach_add_(on_devices, 1)
        for (count, first, names, _), work in same_step.items():
            step = self.make_step(group, work[0][2]["step"] if count is None else count, first)
            self._update_alike(step, work, names, Rows(group["rows"]))

    def _state_names(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the names of the state tensors, in the order of the backends' arguments."""
        return ("momentum_buffer",) if "momentum_buffer" in state else ALGORITHMS[self.algorithm]

    def _update_alike(
        self, step: Step, work: list[dense_step.Work], names: tuple[str, ...], which: Rows
    ) -> None:
        """Apply one step to parameters; sparse gradients go through a backend."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        dense = [item for item in work if not item[1].is_sparse and which is not Rows.NONZERO]
        sparse = [item for item in work if item[1].is_sparse or which is Rows.NONZERO]
        if scale is not None:
            sparse = [(param, grad / scale.to(grad.device), state) for param, grad, state in sparse]
        if dense:
            dense_step.update(step, dense, names, scale)
        if isinstance(step.count, Tensor):
            for item in sparse:
                sparse_step.update(replace(step, count=item[2]["step"]), [item], names, which)
        elif sparse:
            sparse_step.update(step, sparse, names, which)
