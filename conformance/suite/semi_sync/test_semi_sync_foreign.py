"""Semi-synchronous training: members that are keyed optimizers of another library."""

from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.doubles import ForeignKeyed
from keyedopt.conformance.suite.support.foreign import (
    expect_no_save_hook_in_a_refused_load,
    expect_one_call_per_event,
)
from keyedopt.conformance.suite.support.inputs import parameters


class GlobalStep:
    """The inner object of a global optimizer: its ``global_step`` sets gradients of one and steps."""

    def __init__(self, optimizer: ForeignKeyed) -> None:
        self.optimizer = optimizer

    def global_step(self, step: torch.Tensor, closure: Any = None) -> Any:
        """Take a global step."""
        for param in self.optimizer.params.values():
            param.grad = torch.ones_like(param)
        return self.optimizer.step(closure)


def hold_foreign(impl: Any) -> tuple[Any, list[ForeignKeyed], Any]:
    """Make a semi-synchronous optimizer of two foreign ones that share their parameters."""
    params = parameters()
    members = [ForeignKeyed(params), ForeignKeyed(params)]
    members[1]._optimizer = GlobalStep(members[1])  # type: ignore[attr-defined]  # where torchrec looks for it
    whole = impl.SemisyncOptimizer(list(params.values()), *members, num_local_steps=1)
    return whole, members, params


@pytest.mark.clause("SEMI-041")
@pytest.mark.parametrize("save_groups", [False, True])
def test_a_foreign_member_gets_one_call_per_event(impl, save_groups):
    """A save asks a foreign member once; a load runs its load hooks once and no save hook."""
    holder, members, params = hold_foreign(impl)
    holder.save_param_groups(save_groups)
    expect_one_call_per_event(holder, members, params)


@pytest.mark.clause("SEMI-041")
def test_a_refused_load_of_a_foreign_member_runs_no_save_hook(impl):
    """A load that a foreign member refuses runs no save hook, and changes no other member."""
    holder, members, params = hold_foreign(impl)
    expect_no_save_hook_in_a_refused_load(holder, members, params)
