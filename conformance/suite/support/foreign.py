"""Checks of a keyed optimizer of another library that is a member of a wrapper or a combination."""

import copy
from collections.abc import Sequence
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_equal,
    expect_raises,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.device import zeros
from keyedopt.conformance.suite.support.doubles import ForeignKeyed, Stateful
from keyedopt.conformance.suite.support.inputs import train


class ForeignWithObjects(ForeignKeyed):
    """A foreign optimizer whose state also contains a stateful object, and another one in a mapping."""

    def state_dict(self) -> dict[str, Any]:
        """Return the live state by key, and the state of each object."""
        saved = super().state_dict()
        for entry in saved["state"].values():
            entry["object"] = entry["object"].state_dict()
            entry["inner"] = {"object": entry["inner"]["object"].state_dict()}
        return saved

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the objects, then everything else."""
        for key, entry in state_dict["state"].items():
            live = self._entry(self.params[key])
            live["object"].load_state_dict(entry["object"])
            live["inner"]["object"].load_state_dict(entry["inner"]["object"])
        super().load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        """Step, and count the steps in the objects."""
        loss = super().step(closure)
        for one in self.objects():
            one.tensor.add_(1)
        return loss

    def objects(self) -> list[Stateful]:
        """Return the live objects."""
        entries: list[Any] = [self.state[param] for param in self.params.values()]
        return [one for entry in entries for one in (entry["object"], entry["inner"]["object"])]

    def _entry(self, param: torch.Tensor) -> dict[str, Any]:
        entry: dict[str, Any] = super()._entry(param)
        if "object" not in entry:
            entry["object"] = Stateful(zeros(2))
            entry["inner"] = {"object": Stateful(zeros(2))}
        return entry


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


def expect_objects_restored_after_a_refused_load(
    holder: Any, members: Sequence[ForeignWithObjects], params: Any
) -> None:
    """Expect that a load that the last member refuses changes no stateful object of the other members."""
    train(holder, params, 1)
    given = copy.deepcopy(holder.state_dict())
    train(holder, params, 2, seed=7)
    objects = [one for member in members[:-1] for one in member.objects()]
    before = [one.tensor.clone() for one in objects]
    members[-1].refuse = True
    expect_raises(lambda: holder.load_state_dict(given), Exception, expected="an error: the member refuses")
    now = [one for member in members[:-1] for one in member.objects()]
    same = all(one is other for one, other in zip(objects, now, strict=True))
    expect(same, "the same objects after a refused load", now)
    expect_unchanged(before, [one.tensor for one in now], "the objects after a refused load")
