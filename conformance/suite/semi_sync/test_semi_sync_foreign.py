"""Semi-synchronous training: members that are keyed optimizers of another library."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect_equal
from keyedopt.conformance.suite.support.doubles import ForeignKeyed
from keyedopt.conformance.suite.support.foreign import (
    ForeignWithObjects,
    expect_no_save_hook_in_a_refused_load,
    expect_objects_restored_after_a_refused_load,
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


def hold_foreign(impl: Any, kind: type[ForeignKeyed] = ForeignKeyed) -> tuple[Any, list[ForeignKeyed], Any]:
    """Make a semi-synchronous optimizer of two foreign ones that share their parameters."""
    params = parameters()
    members = [kind(params), kind(params)]
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


@pytest.mark.clause("SEMI-041")
def test_a_refused_load_restores_the_objects_of_a_foreign_member(impl):
    """A load that a foreign member refuses leaves the stateful objects of the other member as they were."""
    holder, members, params = hold_foreign(impl, ForeignWithObjects)
    expect_objects_restored_after_a_refused_load(holder, members, params)


@pytest.mark.clause("SEMI-006")
@pytest.mark.plain_only("its optimizers are imitations")
@pytest.mark.needs("KeyedOptimizer")
def test_members_that_unit_tests_imitate(impl):
    """Members may be imitations of a KeyedOptimizer by unittest.mock, as in unit tests of training loops."""
    params = parameters()
    members = [Mock(spec=impl.KeyedOptimizer) for _ in range(2)]
    for member in members:
        member.params, member.state = params, {}
        member.param_groups = [{"params": list(params.values()), "lr": 0.1}]
    members[1]._optimizer = Mock()  # where torchrec looks for the global step
    optimizer = impl.SemisyncOptimizer(list(params.values()), *members, num_local_steps=2)
    for _ in range(4):
        optimizer.step()
    steps = [members[0].step.call_count, members[1]._optimizer.global_step.call_count]
    expect_equal(steps, [4, 2], "local and global steps")
