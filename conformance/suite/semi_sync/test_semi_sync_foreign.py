"""Semi-synchronous training: members that are keyed optimizers of another library."""

from typing import Any

import pytest

from keyedopt.conformance.suite.support.doubles import ForeignKeyed
from keyedopt.conformance.suite.support.foreign import (
    expect_one_call_per_event,
    expect_rollback_without_hooks,
)
from keyedopt.conformance.suite.support.inputs import parameters


def hold_foreign(impl: Any) -> tuple[Any, list[ForeignKeyed], Any]:
    """Make a semi-synchronous optimizer of two foreign ones that share their parameters."""
    params = parameters()
    members = [ForeignKeyed(params), ForeignKeyed(params)]
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
    """A load that a foreign member refuses changes nothing, and runs none of its save hooks."""
    holder, members, params = hold_foreign(impl)
    expect_rollback_without_hooks(holder, members, params)
