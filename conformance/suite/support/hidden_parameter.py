"""Hide the parameter that a situation adds to a keyed optimizer from the case that uses the optimizer."""

from collections.abc import Mapping
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import expect_unchanged, snapshot


class WithHiddenParameter:
    """A keyed optimizer whose params, state, groups and state dicts leave out one parameter.

    A load also loads new state and options of this parameter, and expects them afterwards.

    Args:
        made: the keyed optimizer.
        key: the key of the parameter beside the others.
        beside: this parameter.
        last: whether it comes last in what is loaded, not first.
    """

    _OWN = ("_made", "_key", "_beside", "_last", "_saves_groups")

    def __init__(self, made: Any, key: str, beside: torch.nn.Parameter, last: bool) -> None:
        self._made, self._key, self._beside, self._last = made, key, beside, last
        self._saves_groups = False

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance
        return type(self._made)

    def __getattr__(self, name: str) -> Any:
        if name in self._OWN or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._made, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._made, name, value)

    def __eq__(self, other: object) -> bool:  # a hook receives the optimizer itself
        return other is self or other is self._made

    def __hash__(self) -> int:
        return hash(self._made)

    @property
    def params(self) -> Mapping[str, Any]:
        """The parameters of the case."""
        return {key: param for key, param in self._made.params.items() if key != self._key}

    @property
    def state(self) -> Mapping[Any, Any]:
        """The state of the parameters of the case."""
        return {param: entry for param, entry in self._made.state.items() if param is not self._beside}

    @property
    def param_groups(self) -> list[Any]:
        """The groups of the case, as the optimizer holds them."""
        return [group for group in self._made.param_groups if not self._is_beside(group)]

    def save_param_groups(self, save: bool) -> None:
        """Let groups be saved and loaded, too, or not."""
        self._made.save_param_groups(save)
        self._saves_groups = save

    def state_dict(self) -> Any:
        """Return what the optimizer saves, without what is beside the case."""
        saved = self._made.state_dict()
        if not isinstance(saved, dict):
            return saved
        found = {**saved, "state": {key: one for key, one in saved["state"].items() if key != self._key}}
        if "param_groups" in saved:
            found["param_groups"] = [one for one in saved["param_groups"] if one.get("params") != [self._key]]
        return found

    def load_state_dict(self, given: Any) -> Any:
        """Load state, with new state and options for the parameter beside the case."""
        before = self._saved_beside()
        loaded = _increased(before)
        result = self._made.load_state_dict(self._with_beside(given, loaded))
        if not self._saves_groups:
            loaded["groups"] = before["groups"]
        expect_unchanged(loaded, self._saved_beside(), "the parameter beside the others, after a load")
        return result

    def _saved_beside(self) -> dict[str, Any]:
        """Return a copy of the state and the group of the other parameter."""
        groups = [group for group in self._made.param_groups if self._is_beside(group)]
        options = [{name: one for name, one in group.items() if name != "params"} for group in groups]
        return {"state": snapshot(dict(self._made.state.get(self._beside, {}))), "groups": snapshot(options)}

    def _with_beside(self, given: Any, loaded: Mapping[str, Any]) -> Any:
        """Return what is to be loaded with the parts for the other parameter."""
        if not isinstance(given, dict):
            return given
        found = dict(given)
        state, groups = given.get("state"), given.get("param_groups")
        if isinstance(state, Mapping) and loaded["state"]:
            new = {self._key: loaded["state"]}
            found["state"] = {**state, **new} if self._last else {**new, **state}
        if isinstance(groups, list) and loaded["groups"]:
            added = [{"params": [self._key], **options} for options in loaded["groups"]]
            found["param_groups"] = [*groups, *added] if self._last else [*added, *groups]
        return found

    def _is_beside(self, group: Any) -> bool:
        return [id(param) for param in group["params"]] == [id(self._beside)]


def _increased(value: Any) -> Any:
    """Return a nested structure whose numbers are one more."""
    if isinstance(value, Mapping):
        return {name: _increased(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_increased(one) for one in value]
    is_number = isinstance(value, int | float | torch.Tensor) and not isinstance(value, bool)
    return value + 1 if is_number else value
