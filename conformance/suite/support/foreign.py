"""Checks of a keyed optimizer of another library that is a member of a wrapper or a combination."""

import copy
from collections.abc import Sequence
from typing import Any

from keyedopt.conformance.suite.support.assertions import (
    expect_equal,
    expect_raises,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.doubles import ForeignKeyed
from keyedopt.conformance.suite.support.inputs import train


def register_event_hooks(member: ForeignKeyed, calls: list[str]) -> None:
    """Record every call of a save or load hook of a member."""
    member.register_state_dict_pre_hook(lambda optimizer: calls.append("before save"))
    member.register_state_dict_post_hook(lambda optimizer, saved: calls.append("after save"))
    member.register_load_state_dict_pre_hook(lambda optimizer, given: calls.append("before load"))
    member.register_load_state_dict_post_hook(lambda optimizer: calls.append("after load"))


def velocities(members: Sequence[ForeignKeyed]) -> list[Any]:
    """Return the live state of foreign members."""
    return [list(member.state.values()) for member in members]


def expect_one_call_per_event(holder: Any, members: Sequence[ForeignKeyed], params: Any) -> None:
    """Expect that a save asks each foreign member once, and that a load runs no save hook and loads."""
    train(holder, params, 1)
    calls: list[list[str]] = [[] for _ in members]
    for member, noted in zip(members, calls, strict=True):
        register_event_hooks(member, noted)
        member.saves = 0
    given = copy.deepcopy(holder.state_dict())
    expect_equal([member.saves for member in members], [1] * len(members), "calls of state_dict in a save")
    expect_equal(calls, [["before save", "after save"]] * len(members), "hooks in a save")
    expected = snapshot(velocities(members))
    train(holder, params, 1, seed=7)
    for noted in calls:
        noted.clear()
    holder.load_state_dict(given)
    expect_equal(calls, [["before load", "after load"]] * len(members), "hooks in a load")
    expect_unchanged(expected, velocities(members), "state after a load")


def expect_no_save_hook_in_a_refused_load(
    holder: Any, members: Sequence[ForeignKeyed], params: Any, fresh: bool = False
) -> None:
    """Expect that a load that the last foreign member refuses runs no save hook, and changes no other one.

    The load also restores groups. If the other members are `fresh`, it would create their state.
    """
    holder.save_param_groups(True)
    train(holder, params, 1)
    given = copy.deepcopy(holder.state_dict())
    train(holder, params, 1, seed=7)
    calls: list[str] = []
    for member in members:
        register_event_hooks(member, calls)
    others = members[:-1]
    for member in others:
        for group in member.param_groups:
            group["lr"] = 0.7
        if fresh:
            member.state.clear()
    members[-1].refuse = True
    before = snapshot(velocities(others))
    expect_raises(lambda: holder.load_state_dict(given), Exception, expected="an error: the member refuses")
    expect_unchanged(before, velocities(others), "state of the other members after a refused load")
    rates = [group["lr"] for member in others for group in member.param_groups]
    expect_equal(rates, [0.7] * len(rates), "learning rates of the other members after a refused load")
    expect_equal([call for call in calls if "save" in call], [], "save hooks in a refused load")
    expect_equal(calls.count("before load"), len(members), "load hooks before the refusal")
