"""A planted regression: the fused implementation, with one optimizer whose steps take a tenth longer.

What is under test is not changed: the implementation is an object of its own, whose names are those of
`keyedopt.fused` but for one. After each step it computes nothing for a part of the time that the step took,
so that it is slow on every machine alike. ``keyedopt bench --implementation
keyedopt.benchmarks.plant:adam --gate FILE`` should find it.
"""

import time
from collections.abc import Callable
from typing import Any

from keyedopt.benchmarks.tasks.base import CLASSES
from keyedopt.conformance.targets.implementation import Implementation, Surface, TargetError, find

#: How much longer a planted step takes.
EXTRA = 0.10
#: What can be planted besides the optimizers of tables, by the public name that does the step.
STEPPED = {"sparse_adam": "SparseAdam", "clipping": "GradientClippingOptimizer"}


def slowly(work: Callable[[], Any], extra: float = EXTRA) -> Any:
    """Do some work, then compute for a part of the processor time that it took; return what it gave."""
    start = time.thread_time()
    result = work()
    end = time.thread_time()
    until = end + extra * (end - start)
    while time.thread_time() < until:
        pass
    return result


def _stepped(base: type, extra: float) -> type:
    """Return a class whose `step` is slow."""

    class Planted(base):  # type: ignore[misc]
        def step(self, *arguments: Any, **named: Any) -> Any:
            return slowly(lambda: super(Planted, self).step(*arguments, **named), extra)

    return Planted


def _collection(base: type, optimizer: type, extra: float) -> type:
    """Return a class of tables whose forward, backward and update are slow with one optimizer.

    The time of the backward is taken by hooks on the first and on the last thing that it does: the gradient
    of the outputs comes in, the engine ends.
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
    """The public names of an implementation, with some replaced."""

    def __init__(self, surface: Surface, replaced: dict[str, Any]) -> None:
        self._surface = surface
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not self._surface.has(name):
            raise AttributeError(name)
        return getattr(self._surface, name)


def planted(what: str, extra: float = EXTRA) -> Implementation:
    """Return the fused implementation with one slow step: an optimizer of tables, or one of `STEPPED`."""
    if what not in CLASSES and what not in STEPPED:
        raise TargetError(f"nothing to plant is called {what!r}: {', '.join((*CLASSES, *STEPPED))}")
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
