"""The state of tables under the names of other optimizers: torchrec's, FBGEMM's and unfused ones."""

from collections.abc import Mapping
from typing import Any

import torch

from keyedopt.reference.embedding.keys import FORMS, TENSORS, convert, form_of
from keyedopt.reference.embedding.table_optimizers import algorithm


class StateForms:
    """The part of an optimizer of tables that loads and saves its state in the forms of `keys`."""

    params: Any
    state: Any
    param_groups: list[dict[str, Any]]
    #: The unfused optimizer of each table, which has its options.
    _table_optimizers: dict[torch.Tensor, Any]
    #: The name of each table.
    _names: dict[torch.Tensor, str]

    def state_dict_in(self, form: str) -> dict[str, Any]:
        """Return the state by table, with the names and shapes of another optimizer of the same tables.

        `load_state_dict` recognizes these forms and takes them all.

        Args:
            form: ``"unfused"`` for a keyed optimizer of the weights; ``"fbgemm"`` for the entries of FBGEMM's
                ``get_optimizer_state()``; ``"torchrec"`` for torchrec's `FusedEmbeddingBagCollection`. The
                names of ``"fused"``, which `state_dict` returns, are those of torchrec's sharded collections.
                See `keyedopt.reference.embedding.keys`.

        Raises:
            ValueError: the state has no place in the form.
        """
        saved = self.state_dict()["state"]  # type: ignore[attr-defined]
        weights = {f"{name}.weight": weight for weight, name in self._names.items()}
        state = {key: self._converted(saved[key], weight, "fused", form) for key, weight in weights.items()}
        if form == "torchrec":  # which lists no table without state
            state = {key: entry for key, entry in state.items() if entry}
        return {"state": state}

    def _check_load(self, state_dict: Any) -> Any:
        """Check a state dict in any of the forms of `keys`, also under the names of a module around this."""
        return super()._check_load(self._in_own_names(state_dict))  # type: ignore[misc]

    def _in_own_names(self, state_dict: Any) -> Any:
        state = state_dict.get("state") if isinstance(state_dict, Mapping) else None
        if not isinstance(state, Mapping) or not all(isinstance(key, str) for key in state):
            return state_dict
        found = dict(state)
        if not state and not any(self.state.values()):  # torchrec lists no table without state
            found = {key: {} for key in self.params}
        for weight, name in self._names.items():
            own = f"{name}.weight"
            longer = [key for key in state if key.endswith(f".{own}")] if own not in state else []
            if len(longer) == 1:  # the path of a module is in front
                found = {own if key == longer[0] else key: entry for key, entry in found.items()}
            entry = found.get(own)
            named = isinstance(entry, Mapping) and all(isinstance(key, str) for key in entry)
            form = form_of(entry, name) if isinstance(entry, Mapping) and named else "fused"
            if form != "fused" and self._has_names(entry, weight, form):
                found[own] = self._converted(entry, weight, form, "fused")
        return {**state_dict, "state": found}

    def _has_names(self, entry: Any, weight: torch.Tensor, form: str) -> bool:
        """Return whether an entry has the state of the algorithm of a table, by the names of a form."""
        tensors = TENSORS.get(algorithm(self._table_optimizers[weight]), ())
        names = {each[FORMS.index(form)] for each in tensors}
        return bool(names & {key.rpartition(".")[2] for key in entry})

    def _converted(self, entry: Any, weight: torch.Tensor, source: str, target: str) -> dict[str, Any]:
        kind, decay = algorithm(self._table_optimizers[weight]), self._group(weight).get("lr_decay", 0.0)
        return convert(entry, kind, source, target, self._names[weight], lr_decay=decay)

    def _group(self, weight: torch.Tensor) -> dict[str, Any]:
        """Return the options of a table."""
        return next(group for group in self.param_groups if any(weight is param for param in group["params"]))
