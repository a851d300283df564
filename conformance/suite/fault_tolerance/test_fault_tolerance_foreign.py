"""Fault tolerance: members that are keyed optimizers of another library."""

from typing import Any

import pytest

from keyedopt.conformance.suite.support.doubles import ForeignKeyed
from keyedopt.conformance.suite.support.foreign import expect_one_call_per_event
from keyedopt.conformance.suite.support.inputs import parameters
from keyedopt.conformance.suite.support.replicas import ScriptedManager


def hold_foreign(impl: Any) -> tuple[Any, list[ForeignKeyed], Any]:
    """Wrap a foreign keyed optimizer; its manager always commits."""
    params = parameters()
    member = ForeignKeyed(params)
    return impl.FaultTolerantOptimizer(ScriptedManager(), member), [member], params


@pytest.mark.clause("FT-034")
@pytest.mark.parametrize("save_groups", [False, True])
def test_a_foreign_member_gets_one_call_per_event(impl, save_groups):
    """A save asks a foreign member once; a load runs its load hooks once and no save hook."""
    holder, members, params = hold_foreign(impl)
    for member in members:
        member.save_param_groups(save_groups)
    expect_one_call_per_event(holder, members, params)
