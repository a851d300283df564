"""Find the one cause of many failures: a class that cannot take a first step."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from keyedopt.conformance import spec
from keyedopt.conformance.results.untrusted import error_text, one_line
from keyedopt.conformance.suite.support.algorithms import make_algorithm
from keyedopt.conformance.suite.support.assertions import Mismatch
from keyedopt.conformance.suite.support.described import MissingName
from keyedopt.conformance.suite.support.inputs import parameter, set_sparse_grad


class Causes:
    """The errors of the first steps with the classes of a target, each tried once, after a first failure."""

    def __init__(self, surface: Any) -> None:
        self._surface = surface
        self._errors: dict[str, BaseException | None] = {}

    def of(self, clauses: Sequence[str], inputs: Mapping[str, Any], error: BaseException) -> dict[str, str]:
        """Return the class and the error that a failure follows from, or nothing.

        A failure follows if it ended in an error of the type that a first step raises too.

        Args:
            clauses: of the failing case.
            inputs: of the case.
            error: that ended the case.
        """
        areas = {spec.clauses()[clause].area for clause in clauses if clause in spec.clauses()}
        name = "SparseAdam" if areas == {"sparse"} else inputs.get("algorithm")
        if name not in ("SparseAdam", *spec.areas()["algorithms"].names):
            return {}
        if name not in self._errors:
            self._errors[name] = self._first_step(name)
        cause = self._errors[name]
        if cause is None:
            return {}
        kind = type(cause).__name__
        seen = error.seen if isinstance(error, Mismatch) else f"{type(error).__name__}: "
        return (
            {"class": name, "error": one_line(error_text(cause), 300)} if seen.startswith(f"{kind}: ") else {}
        )

    def _first_step(self, name: str) -> BaseException | None:
        """Return the error of a step with the smallest table, or None."""
        dtype = self._surface.dtypes[0]
        weight = parameter(4, 3, dtype=dtype)
        try:
            with contextlib.suppress(MissingName):
                if name == "SparseAdam":
                    optimizer = self._surface.SparseAdam([weight])
                    set_sparse_grad(weight, [0, 2])
                else:
                    optimizer = make_algorithm(self._surface, name, [weight])
                    weight.grad = parameter(4, 3, dtype=dtype, seed=1).detach()
                optimizer.step()
        except BaseException as error:
            return error
        return None
