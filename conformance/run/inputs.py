"""The inputs of cases: noted before a case runs, and drawn alike wherever it runs."""

from collections.abc import Callable, Mapping
from typing import Any

import hypothesis
from hypothesis.internal.conjecture import providers

from keyedopt.conformance.results.untrusted import plain


def fix_draws() -> None:
    """Have cases draw the same examples in each run; to be called before the suite, whose draws read it.

    Hypothesis tries the constants in the source of every module that is not installed in site-packages. So
    the examples would depend on how keyedopt and the target are installed and on what earlier cases have
    imported, and each process would parse hundreds of files.
    """
    if hasattr(providers, "_get_local_constants"):  # older versions draw without these constants
        providers._get_local_constants = lambda: providers._local_constants
    hypothesis.settings.register_profile(
        "keyedopt",
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=25,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    hypothesis.settings.load_profile("keyedopt")


class Inputs:
    """Turns inputs into data for records, once each: several cases may have one long trajectory as input."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # by the identity of the value, which is kept

    def data_of(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a case other than the implementation and the dtype."""
        return {name: self._data(value) for name, value in arguments.items() if name not in ("impl", "dtype")}

    def _data(self, value: Any) -> Any:
        if not isinstance(value, dict | list):
            return plain(value)
        if id(value) not in self._known:
            self._known[id(value)] = value, plain(value)
        return self._known[id(value)][1]


def note_draws(function: Any, note: Callable[[dict[str, Any]], None]) -> None:
    """Note each drawn input of a case before the case runs, so that the record of a crash has it."""
    handle = function.hypothesis
    inner = getattr(handle, "keyedopt_inner", handle.inner_test)
    handle.keyedopt_inner = inner

    def noted(*args: Any, **kwargs: Any) -> Any:
        note(kwargs)
        return inner(*args, **kwargs)

    handle.inner_test = noted
