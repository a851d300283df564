"""Wrappers: members that are keyed optimizers of another library."""

from typing import Any

import pytest

from keyedopt.conformance.suite.support.doubles import ForeignKeyed
from keyedopt.conformance.suite.support.foreign import (
    expect_no_save_hook_in_a_refused_load,
    expect_one_call_per_event,
)
from keyedopt.conformance.suite.support.inputs import parameters


def hold_foreign(impl: Any) -> tuple[Any, list[ForeignKeyed], Any]:
    """Put two plain wrappers around a foreign optimizer."""
    params = parameters()
    member = ForeignKeyed(params)
    return impl.OptimizerWrapper(impl.OptimizerWrapper(member)), [member], params


@pytest.mark.clause("WRAP-034")
@pytest.mark.parametrize("save_groups", [False, True])
def test_a_foreign_member_gets_one_call_per_event(impl, save_groups):
    """A save asks a foreign member once; a load runs its load hooks once and no save hook."""
    holder, members, params = hold_foreign(impl)
    holder.save_param_groups(save_groups)
    expect_one_call_per_event(holder, members, params)


@pytest.mark.clause("WRAP-034")
def test_a_refused_load_of_a_foreign_member_runs_no_save_hook(impl):
    """A load that a foreign member refuses runs no save hook, and changes no other member."""
    holder, members, params = hold_foreign(impl)
    expect_no_save_hook_in_a_refused_load(holder, members, params)
