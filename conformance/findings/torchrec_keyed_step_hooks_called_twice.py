"""Step hooks run twice if the step of a subclass calls the step of its base class.

If hooks work at all (see torchrec_keyed_step_hooks_not_called.py), each class in the chain whose `step` is
patched calls them: a hook that counts steps, or steps a scheduler, counts twice as soon as an instance of
the base class has been patched, too.

Clauses: KEYED-066, COMB-043.
"""

import sys

from torchrec.optim.keyed import KeyedOptimizer


class Base(KeyedOptimizer):
    """A keyed optimizer with a step of its own."""

    def step(self, closure: object = None) -> None:
        """Do nothing."""


class Sub(Base):
    """One that adds to it."""

    def step(self, closure: object = None) -> None:
        """Do what the base does."""
        super().step(closure)


calls = []
for kind in (Base, Sub):
    optimizer = kind({}, {}, [])
    optimizer.zero_grad()  # prepares the class for hooks
optimizer.register_step_post_hook(lambda *given: calls.append("after"))
optimizer.step()
expected = "1 call"
seen = f"{len(calls)} calls"
defect = len(calls) != 1
print(f"{'defect' if defect else 'fixed'}: expected {expected}, seen {seen}")
sys.exit(1 if defect else 0)
