"""Combined optimizers: members that are keyed optimizers of another library."""

from typing import Any

import pytest

from keyedopt.conformance.suite.support.doubles import ForeignKeyed
from keyedopt.conformance.suite.support.foreign import (
    ForeignWithObjects,
    expect_no_save_hook_in_a_refused_load,
    expect_objects_restored_after_a_refused_load,
    expect_one_call_per_event,
)
from keyedopt.conformance.suite.support.inputs import parameters, sgd


def hold_foreign(impl: Any, kind: type[ForeignKeyed] = ForeignKeyed) -> tuple[Any, list[ForeignKeyed], Any]:
    """Combine two foreign optimizers, the first with two groups, and one of the implementation."""
    params = parameters(4)
    members = [kind({"p": params["p0"], "q": params["p3"]}), kind({"p": params["p1"]})]
    own = sgd(impl, {"p": params["p2"]}, momentum=0.9)
    return impl.CombinedOptimizer([("a", members[0]), ("own", own), ("b", members[1])]), members, params


@pytest.mark.clause("COMB-045")
@pytest.mark.parametrize("save_groups", [False, True])
def test_a_foreign_member_gets_one_call_per_event(impl, save_groups):
    """A save asks a foreign member once; a load runs its load hooks once and no save hook."""
    holder, members, params = hold_foreign(impl)
    holder.save_param_groups(save_groups)
    expect_one_call_per_event(holder, members, params)


@pytest.mark.clause("COMB-045")
def test_a_refused_load_of_a_foreign_member_runs_no_save_hook(impl):
    """A load that a foreign member refuses runs no save hook, and changes no other member."""
    for fresh in (False, True):
        holder, members, params = hold_foreign(impl)
        expect_no_save_hook_in_a_refused_load(holder, members, params, fresh)


@pytest.mark.clause("COMB-045")
def test_a_refused_load_restores_the_objects_of_a_foreign_member(impl):
    """A load that a foreign member refuses leaves the stateful objects of the other members as they were."""
    holder, members, params = hold_foreign(impl, ForeignWithObjects)
    expect_objects_restored_after_a_refused_load(holder, members, params)
