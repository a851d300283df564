"""The optimizer of tables on the host, whose rows are updated on a device."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from keyedopt.reference.embedding.host_table import HostTable, state_on_host
from keyedopt.reference.embedding.row_cache import RowCache
from keyedopt.reference.fused import FusedOptimizer
from keyedopt.reference.rules.options import Rows


class ForwardRows:
    """The rows of one forward pass, which stay on the device until a backward pass has updated them.

    Args:
        used: for each cache distinct rows, their places, and `RowCache.changes` at the time.
    """

    def __init__(self, used: Sequence[tuple[RowCache, Tensor, Tensor, int]]) -> None:
        self.used, self.reached, self.updated = used, False, False

    def reach(self, grad: Tensor) -> None:
        """Check in a backward pass that the rows are where they were; a hook of each output.

        Raises:
            RuntimeError: they are not, after an earlier backward pass or a load.
        """
        for cache, rows, places, changes in self.used:
            if cache.changes != changes and not torch.equal(cache.row_of[places], rows):
                raise RuntimeError(
                    f"rows of table {cache.name!r} have left the device since this forward pass: repeat it"
                )
        self.reached = True

    def mark_updated(self) -> None:
        """Note that all rows differ from those on the host."""
        for cache, _, places, _ in self.used:
            cache.mark_updated(places)


def check_rows(options: Mapping[str, Any]) -> None:
    """Raise a ValueError if a step would update rows without a gradient, which may not be on the device."""
    if Rows(options.get("rows", Rows.GIVEN)) is Rows.ALL:
        raise ValueError("rows must be 'given' or 'nonzero': 'all' would need every row on the device")


class CachedOptimizer(FusedOptimizer):
    """The keyed optimizer of tables on the host: the tables by key, their state, the options of their groups.

    Reading ``state`` first writes the newer rows of all tables back.

    Args:
        inner: the optimizer of the rows on the device.
        tables: by name.

    Raises:
        ValueError: an optimizer that accumulates gradients, or updates rows without a gradient.
    """

    def __init__(self, inner: Any, tables: Mapping[str, HostTable]) -> None:
        self.params = {f"{name}.weight": table.get_parameter("weight") for name, table in tables.items()}
        self.defaults = {"_save_param_groups": False}
        self.param_groups: list[dict[str, Any]] = []
        self.caches: dict[str, RowCache] = {}
        self._inner, self._state = inner, {}
        self._forward_rows: Any = weakref.WeakSet()
        self._deferred: list[ForwardRows] = []
        for name, table in tables.items():
            weight = inner.params[f"{name}.weight"]
            entry = {key: state_on_host(key, value, table) for key, value in inner.state[weight].items()}
            by_row = [key for key, value in entry.items() if value is not inner.state[weight][key]]
            table.cache = self.caches[name] = RowCache(
                name,
                [table.get_parameter("weight"), *(entry[key] for key in by_row)],
                [weight, *(inner.state[weight][key] for key in by_row)],
            )
            self._state[table.get_parameter("weight")] = entry
        self.show_groups()

    @property
    def state(self) -> Any:  # type: ignore[override]  # an attribute of torch's optimizer
        """State by table, on the host."""
        self.flush()
        return self._state

    @property
    def deferred(self) -> Any:
        """The gradients that are deferred to `step`; see `EmbeddingOptimizerBase.defer_updates`."""
        return self._inner.deferred

    def show_groups(self) -> None:
        """Make the groups those of the inner optimizer, with the tables on the host."""
        hosts = {self._inner.params[key]: host for key, host in self.params.items()}
        self.param_groups[:] = [
            {**group, "params": [hosts[weight] for weight in group["params"]]}
            for group in self._inner.param_groups
        ]
        self._pass_options()

    def on_device(self, tables: Sequence[Tensor]) -> list[Tensor]:
        """Return the rows on the device of some tables, after passing on the options that are set now.

        Raises:
            ValueError: one of these is not a table, or is there twice.
        """
        self._pass_options()
        keys = [key for key, host in self.params.items() if any(host is table for table in tables)]
        if not keys or len(keys) != len(tables):
            raise ValueError("params must be weights of the tables of this module, each once")
        return [self._inner.params[key] for key in keys]

    def _pass_options(self) -> None:
        for shown, group in zip(self.param_groups, self._inner.param_groups, strict=True):
            check_rows(shown)
            group.update({key: value for key, value in shown.items() if key != "params"})

    def flush(self) -> None:
        """Write the newer rows of all tables, and of their state, back to the host."""
        for cache in self.caches.values():
            cache.write_back()

    def explain(self) -> str:
        """Return how many rows of each table the device holds, and how many came from the host."""
        inner = [self._inner] if hasattr(self._inner, "explain") else []
        return "\n".join(one.explain() for one in [*self.caches.values(), *inner])

    def watch(self, rows: ForwardRows, outputs: Sequence[Tensor]) -> None:
        """Keep rows on the device as long as the graph of outputs may lead to an update."""
        self._forward_rows.add(rows)
        for output in outputs:
            output.register_hook(rows.reach)  # type: ignore[no-untyped-call]

    def places_in_use(self, cache: RowCache) -> Iterator[Tensor]:
        """Yield places of a cache whose rows must stay."""
        waiting = [one for one in self._forward_rows if not one.updated]
        for rows in (*waiting, *self._deferred):
            yield from (places for each, _, places, _ in rows.used if each is cache)

    @torch.no_grad()
    def update(self, gradients: Any) -> None:
        """Take a step with the gradients of one backward pass, as the inner optimizer does."""
        self._pass_options()
        reached = [one for one in self._forward_rows if one.reached and not one.updated]
        for rows in (*reached, *self._deferred):
            rows.mark_updated()
        self._inner.update(gradients)
        for rows in reached:
            rows.updated = True
        self._deferred = [*self._deferred, *reached] if self.deferred.sums else []

    def step(self, closure: Any = None) -> Any:
        """Evaluate the closure, and apply the deferred update, if any; the backward pass does all others."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._pass_options()
        for rows in self._deferred:
            rows.mark_updated()
        self._inner.apply_deferred()
        self._deferred = []
        return loss

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop the deferred gradients, if any: the backward pass has used all others."""
        self._inner.zero_grad(set_to_none)
        self._deferred = []

    def set_optimizer_step(self, step: int) -> None:
        """Set the step count of all tables; see `EmbeddingOptimizerBase.set_optimizer_step`."""
        self._inner.set_optimizer_step(step)

    def update_hyper_parameters(self, params_dict: Mapping[str, Any]) -> None:
        """Set options in all groups; see `EmbeddingOptimizerBase.update_hyper_parameters`."""
        self._pass_options()
        self._inner.update_hyper_parameters(params_dict)
        for shown, group in zip(self.param_groups, self._inner.param_groups, strict=True):
            shown.update({**group, "params": shown["params"]})

    def clip_in_backward(self, *args: Any, **kwargs: Any) -> None:
        """Clip the gradients of every later step; see `EmbeddingOptimizerBase.clip_in_backward`."""
        self._inner.clip_in_backward(*args, **kwargs)

    def defer_updates(self, *args: Any, **kwargs: Any) -> None:
        """Defer updates to `step`; see `EmbeddingOptimizerBase.defer_updates`."""
        self._inner.defer_updates(*args, **kwargs)

    def add_param_group(self, param_group: Any) -> None:
        """Raise a ValueError: only the tables of the module have a backward pass that updates them.

        Raises:
            ValueError: always.
        """
        self._inner.add_param_group(param_group)

    def _dummy_step(self) -> None:
        """Do nothing: state exists, and a deferred update is left to its step."""

    def _check_complete(self) -> None:
        """Do nothing: the keys of state are always the same."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_forward_rows": None, "_deferred": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_forward_rows": weakref.WeakSet()})
