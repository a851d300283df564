"""What one case may change and the next must not see: streams, seeds, settings of torch, patched classes."""

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from keyedopt.conformance import spec
from keyedopt.conformance.suite.support.device import seed_torch
from keyedopt.conformance.targets.implementation import Surface


@contextlib.contextmanager
def null_device() -> Iterator[Callable[[], None]]:
    """Return a function that points the streams to the null device, for all cases until the end.

    A case may print megabytes. It may also close or replace the streams, so each case gets new ones.
    """
    usual = sys.stdout, sys.stderr
    saved = os.dup(1), os.dup(2)
    null = os.open(os.devnull, os.O_WRONLY)

    def redirect() -> None:
        os.dup2(null, 1)
        os.dup2(null, 2)
        sys.stdout, sys.stderr = (os.fdopen(stream, "w", closefd=False) for stream in (1, 2))

    try:
        yield redirect
    finally:
        sys.stdout, sys.stderr = usual
        for number, stream in enumerate(saved, 1):
            os.dup2(stream, number)
            os.close(stream)
        os.close(null)


def steps_of(surface: Surface) -> dict[Any, Any]:
    """Return `step` of the classes of an implementation and of their bases; None if a class inherits it."""
    every = dict.fromkeys(name for area in spec.areas().values() for name in area.names)
    names = [name for name in every if surface.has(name) and not surface.borrows(name)]
    classes = {base for name in names for base in getattr(getattr(surface, name), "__mro__", ())}
    return {base: base.__dict__.get("step") for base in classes}


#: The smallest number of float32, which is zero where the processor flushes denormal numbers.
_DENORMAL = torch.tensor(2.0**-149)


@contextlib.contextmanager
def keep_settings() -> Iterator[None]:
    """Undo what the code inside sets for the whole process.

    A library may set torch's default dtype or device when it is imported. Cases are written for torch's own.
    """
    folder, dtype = os.getcwd(), torch.get_default_dtype()
    try:
        yield
    finally:
        os.chdir(folder)
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
        if _DENORMAL * 1 == 0:
            torch.set_flush_denormal(False)


@contextlib.contextmanager
def fresh(steps: Mapping[Any, Any]) -> Iterator[None]:
    """Seed a case, and undo its changes to settings and to `step` of the target's classes.

    torch patches `step` of a class permanently when its base is initialized or a copy is unpickled.
    """
    seed_torch(0)
    random.seed(0)
    try:
        with keep_settings():
            yield
    finally:
        for base, step in steps.items():
            if base.__dict__.get("step") is step:
                continue
            if step is None:
                del base.step
            else:
                base.step = step
