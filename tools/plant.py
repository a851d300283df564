"""A planted regression: the fused implementation, with one optimizer whose steps take 10 % longer.

The implementation is an object with the public names of `keyedopt.fused`, except for one that is slow: after
each step it spins for 10 % of the CPU time of the step, so that the slowdown is the same on every machine.
`keyedopt.tools.trials` measures how often the gate finds it.
"""

import time
from collections.abc import Callable
from typing import Any

from keyedopt.benchmarks.tasks.base import CLASSES
from keyedopt.conformance.targets.find import find
from keyedopt.conformance.targets.implementation import Implementation, Surface, TargetError

#: The slowdown of a planted step.
EXTRA = 0.10
#: Plants other than optimizers of tables, with the public name whose `step` is slow.
STEPPED = {"sparse_adam": "SparseAdam", "clipping": "GradientClippingOptimizer"}


def slowly(work: Callable[[], Any], extra: float = EXTRA) -> Any:
    """Call `work`, then spin for `extra` times its CPU time; return its result."""
    start = time.thread_time()
    result = work()
    end = time.thread_time()
    until = end + extra * (end - start)
    while time.thread_time() < until:
        pass
    return result


def _stepped(base: type, extra: float) -> type:
    """Return a subclass whose `step` is slow."""

    class Planted(base):  # type: ignore[misc]
        def step(self, *arguments: Any, **named: Any) -> Any:
            return slowly(lambda: super(Planted, self).step(*arguments, **named), extra)

    return Planted


def _collection(base: type, optimizer: type, extra: float) -> type:
    """Return a subclass of an embedding collection that is slow with one optimizer.

    The backward pass is timed from a hook on the gradient of the last output to a callback of the engine.
    """
    from torch.autograd import Variable

    class Planted(base):  # type: ignore[misc]
        def __init__(self, tables: Any, optimizer_type: Any = None, *arguments: Any, **named: Any) -> None:
            super().__init__(tables, optimizer_type, *arguments, **named)
            self.is_slow = optimizer_type is optimizer

        def forward(self, *arguments: Any, **named: Any) -> Any:
            if not self.is_slow:
                return super().forward(*arguments, **named)
            outputs = slowly(lambda: super(Planted, self).forward(*arguments, **named), extra)
            last = list(outputs.values())[-1]
            begun: list[float] = []

            def end() -> None:
                until = time.thread_time() + extra * (time.thread_time() - begun.pop())
                while time.thread_time() < until:
                    pass

            def begin(gradient: Any) -> None:
                begun.append(time.thread_time())
                Variable._execution_engine.queue_callback(end)

            if last.requires_grad:
                last.register_hook(begin)
            return outputs

    return Planted


class Names:
    """The public names of an implementation, with some of them replaced."""

    def __init__(self, surface: Surface, replaced: dict[str, Any]) -> None:
        self._surface = surface
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not self._surface.has(name):
            raise AttributeError(name)
        return getattr(self._surface, name)


def planted(what: str, extra: float = EXTRA) -> Implementation:
    """Return the fused implementation with one slow step.

    Args:
        what: an optimizer of tables (`CLASSES`), or a key of `STEPPED`.
        extra: the slowdown.

    Raises:
        TargetError: there is no such plant.
    """
    if what not in CLASSES and what not in STEPPED:
        raise TargetError(f"no planted regression {what!r}: give one of {', '.join((*CLASSES, *STEPPED))}")
    surface = find("fused").surface()
    if what in STEPPED:
        replaced = {STEPPED[what]: _stepped(getattr(surface, STEPPED[what]), extra)}
    else:
        tables = "EmbeddingBagCollection"
        replaced = {tables: _collection(getattr(surface, tables), getattr(surface, CLASSES[what]), extra)}
    return Implementation(name=f"fused, {what} planted", root=Names(surface, replaced))


def __getattr__(name: str) -> Implementation:
    try:
        return planted(name)
    except TargetError as error:
        raise AttributeError(str(error)) from error
