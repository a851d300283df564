"""The smoke stage: can the target be found, imported and built at all?

Run as ``python -m keyedopt.conformance.smoke TARGET REPORT [DEVICE]`` in a process of its own, since a
target may end the interpreter when it is imported. The report is a JSON file: ``problem`` is one line
that says what to do, or empty; the rest identifies the implementation and its environment.
"""

import functools
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

from keyedopt.conformance.implementation import (
    Implementation,
    MissingName,
    Surface,
    TargetError,
    find,
)


def versions(implementation: Implementation) -> dict[str, str]:
    """Return the versions of the distributions that identify the implementation; best first."""
    names = list(implementation.distributions)
    if not names and isinstance(implementation.root, str):
        package = implementation.root.partition(":")[0].partition(".")[0]
        names = list(importlib.metadata.packages_distributions().get(package, ()))
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment(device: str) -> dict[str, Any]:
    """Describe what the cases run on."""
    import torch

    described: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processors": os.cpu_count(),
        "torch": torch.__version__,
        "keyedopt": importlib.metadata.version("keyedopt"),
        "device": device,
    }
    if device.startswith("cuda"):
        described["gpu"] = torch.cuda.get_device_name(device)
        described["cuda"] = torch.version.cuda
    return described


def build(surface: Surface, device: str) -> None:
    """Build the smallest optimizer and take a step with it.

    Raises:
        TargetError: it has none of the names of the surface, or cannot be built, or cannot step.
    """
    import torch
    from keyedopt.conformance import spec

    name = surface._implementation.name
    if not surface.claimed():
        names = ", ".join(spec.areas()["keyed"].names)
        raise TargetError(f"{name} has none of the public names ({names}, …): see `keyedopt list areas`")
    try:
        parameter = torch.nn.Parameter(torch.ones(2, device=device))
    except (RuntimeError, AssertionError) as error:
        text = str(error).splitlines()[0]
        raise TargetError(f"the device {device!r} cannot be used here: {text}") from error
    if "keyed" not in surface.claimed():
        return
    try:
        factory = functools.partial(torch.optim.SGD, lr=0.1)
        optimizer = surface.KeyedOptimizerWrapper({"p": parameter}, factory)
        parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    except MissingName:
        return  # the suite reports a claimed name that is missing, clause by clause
    except Exception as error:
        text = " ".join(str(error).split())
        raise TargetError(
            f"{name} cannot be built: KeyedOptimizerWrapper around torch.optim.SGD and one step "
            f"give {type(error).__name__}: {text}"
        ) from error


def examine(target: str, device: str | None) -> dict[str, Any]:
    """Find, import and build a target; return the report."""
    hint = ""
    try:
        implementation = find(target)
        hint = implementation.install and f"; install it with: {implementation.install}"
        surface = implementation.surface()
        chosen = device or implementation.devices[0]
        if chosen.partition(":")[0] not in {item.partition(":")[0] for item in implementation.devices}:
            raise TargetError(
                f"{implementation.name} supports {', '.join(implementation.devices)}, not {chosen!r}"
            )
        hint = ""
        build(surface, chosen)
    except TargetError as error:
        return {"problem": f"{error}{hint}"}
    found = versions(implementation)
    return {
        "problem": "",
        "implementation": {
            "name": implementation.name,
            "target": target,
            "version": next(iter(found.values()), "unknown"),
            "versions": found,
            "areas": list(surface.claimed()),
            "dtypes": list(implementation.dtypes),
            "variants": dict(implementation.variants),
        },
        "environment": environment(chosen),
    }


def main() -> None:
    """Examine the target named on the command line."""
    target, report, *rest = sys.argv[1:]
    outcome = examine(target, rest[0] if rest else None)
    Path(report).write_text(json.dumps(outcome), encoding="utf-8")


if __name__ == "__main__":
    main()
