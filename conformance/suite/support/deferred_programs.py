"""Programs of an embedding module whose updates a joint norm with a dense parameter defers to the step."""

import functools
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from keyedopt.conformance.suite.support.assertions import exactly
from keyedopt.conformance.suite.support.device import as_tensor
from keyedopt.conformance.suite.support.embedding_programs import OPERATIONS, EmbeddingProgram
from keyedopt.conformance.suite.support.inputs import parameter
from keyedopt.conformance.suite.support.programs import FIRST_LR

#: The key of the dense parameter among the gradients.
DENSE_KEY = "the dense parameter"


class JointClippingError(Exception):
    """Clipping by a joint norm raises ValueError, or warns that it leaves out the tables."""


class DeferredProgram(EmbeddingProgram):
    """A program of an embedding module and a dense parameter, which are clipped by their joint norm.

    The arguments are those of `EmbeddingProgram`.

    Raises:
        JointClippingError: the implementation does not clip tables by a joint norm, and says so.
    """

    operations: ClassVar[Mapping[str, int]] = {
        **{name: often for name, often in OPERATIONS.items() if name not in ("clip", "step and zero_grad")},
        "step": 5,
        "zero_grad": 1,
    }
    share: ClassVar[float] = 0.4

    def _start(self) -> None:
        super()._start()
        bound = self.choose.choice((0.5, 2.0, 8.0))
        self._dense: Any = parameter(3, dtype=self._of)
        self._exact_dense = exactly(self._dense)
        sgd = functools.partial(torch.optim.SGD, lr=FIRST_LR)
        dense = self._impl.KeyedOptimizerWrapper({"dense": self._dense}, sgd)
        whole = self._impl.CombinedOptimizer([("tables", self._module.fused_optimizer), ("dense", dense)])
        norm = self._impl.GradientClipping.NORM
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._wrapper = self._impl.GradientClippingOptimizer(whole, norm, bound)
            except ValueError as error:
                raise JointClippingError from error
        if caught:
            raise JointClippingError
        self._clipping = [("NORM", bound)]
        self._drop()

    def _drop(self) -> None:
        """Forget the gradients since the last step."""
        self._dense.grad = None
        self._rows, self._sums = dict[str, set[int]](), dict[str, torch.Tensor]()

    def _learn(self, rows: Mapping[str, set[int]], grads: Mapping[str, torch.Tensor]) -> None:
        """Add the gradients to those of the earlier backward passes, also one of the dense parameter."""
        factors = torch.tensor([self.choose.choice((-2.0, 0.5, 4.0)) for _ in range(3)], dtype=torch.float64)
        (self._dense * as_tensor(factors).to(self.dtype)).sum().backward()
        for name, grad in {**grads, DENSE_KEY: factors}.items():
            self._rows[name] = self._rows.get(name, set()) | rows.get(name, set())
            self._sums[name] = self._sums.get(name, 0) + grad

    def _step(self) -> None:
        """Take the step of all gradients since the last one."""
        clipped = self._clipped(self._sums)
        for name in self._each.keys() & clipped.keys():
            self._each[name].train(self._lrs[name], sorted(self._rows[name]), clipped[name])
        self._exact_dense = self._exact_dense - FIRST_LR * clipped.get(DENSE_KEY, torch.zeros(3))
        self._wrapper.step()
        self._drop()

    def _zero_grad(self) -> None:
        """Drop the gradients since the last step."""
        self._wrapper.zero_grad()
        self._drop()

    def _load(self) -> None:
        if not self._sums:
            super()._load()

    def _freeze(self) -> None:
        if not self._sums:
            super()._freeze()

    def _copy(self) -> None:
        if not self._sums:
            super()._copy()
            (self._dense,) = (param for key, param in self._wrapper.params.items() if key.endswith("dense"))

    def compare(self) -> None:
        """Expect the dense parameter, too, to have taken the steps with clipped gradients."""
        super().compare()
        self.expect_close(self._dense, self._exact_dense, DENSE_KEY)
