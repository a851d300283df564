"""The smoke stage: find, import and build the target.

Runs as ``python -m keyedopt.conformance.targets.smoke REQUEST`` in a process of its own, because a target
may end the interpreter when it is imported. ``REQUEST`` is JSON: target, imports, device, dtypes, seconds.
The number of the descriptor for two messages follows it: the claimed areas, and the report. In the report,
``problem`` is one line that says what to do, or empty; the rest identifies the implementation and its
environment.
"""

import contextlib
import faulthandler
import functools
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

from keyedopt.conformance.results.digest import digest
from keyedopt.conformance.results.untrusted import error_text, one_line
from keyedopt.conformance.run.protocol import sender
from keyedopt.conformance.suite.support.described import MissingName
from keyedopt.conformance.targets.devices import check_device, description
from keyedopt.conformance.targets.implementation import (
    Implementation,
    Surface,
    TargetError,
    find,
    with_nameless,
)


def versions(implementation: Implementation) -> dict[str, str]:
    """Return the versions of the distributions that identify the implementation, the main one first."""
    names = list(implementation.distributions)
    if not names and isinstance(implementation.root, str):
        package = implementation.root.partition(":")[0].partition(".")[0]
        names = list(importlib.metadata.packages_distributions().get(package, ()))
    found = {}
    for name in names:
        try:
            found[name] = str(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def environment(device: str) -> dict[str, Any]:
    """Describe the machine, the libraries and the device of the cases."""
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
    if name := description(device):
        described["gpu"] = name
    if device.startswith("cuda"):
        described["cuda"] = torch.version.cuda
    return described


def build(surface: Surface, name: str, device: str) -> None:
    """Build the smallest optimizer and take a step with it.

    Raises:
        TargetError: the target has none of the public names, or cannot be built, or cannot step.
    """
    import torch

    from keyedopt.conformance import spec

    if not surface.claimed():
        names = ", ".join(spec.areas()["keyed"].names)
        raise TargetError(
            f"{name} has none of the public names ({names}, …): see `keyedopt list areas`. "
            f"`keyedopt init-adapter NAME --from {name}` proposes an adapter for classes with common names"
        )
    try:
        parameter = torch.nn.Parameter(torch.ones(2, device=device))
    except (RuntimeError, AssertionError) as error:
        text = one_line(error_text(error), 200)
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
        raise TargetError(
            f"{name} cannot be built: KeyedOptimizerWrapper around torch.optim.SGD and one step "
            f"give {one_line(error_text(error), 500)}"
        ) from error


def compile_steps(surface: Surface, device: str) -> None:
    """Take a step with each claimed algorithm, so what it compiles is there when cases run."""
    import torch

    from keyedopt.conformance import spec

    for name in filter(surface.claims, spec.areas()["algorithms"].names):
        parameter = torch.nn.Parameter(torch.ones(2, device=device))
        parameter.grad = torch.ones_like(parameter)
        with contextlib.suppress(Exception):  # the suite reports it, clause by clause
            getattr(surface, name)([parameter], lr=0.1).step()


def examine(
    target: str,
    device: str | None,
    dtypes: Sequence[str],
    imports: Sequence[str],
    report_areas: Callable[[Sequence[str]], None],
) -> dict[str, Any]:
    """Find, import and build a target; report its areas as soon as they are known, and return the rest."""
    hint = ""
    try:
        implementation = find(target, imports)
        chosen = implementation.supported(device, dtypes)
        hint = implementation.install and f"; install it with: {implementation.install}"
        if implementation.areas is not None:  # before the import, which may take seconds
            report_areas(with_nameless(implementation.areas))
        surface = implementation.surface()
        areas = surface.claimed()
        if implementation.areas is None:
            report_areas(areas)
        hint = ""
        check_device(chosen)
        build(surface, implementation.name, chosen)
        if implementation.compiles:
            compile_steps(surface, chosen)
    except TargetError as error:
        return {"problem": f"{error}{hint}"}
    found = versions(implementation)
    return {
        "problem": "",
        "compiles": implementation.compiles,
        "implementation": {
            "name": one_line(implementation.name),
            "target": target,
            "version": next(iter(found.values()), "unknown"),
            "versions": found,
            "build": digest(implementation.root),
            "areas": list(areas),
            "dtypes": list(implementation.dtypes_on(chosen)),
            "variants": dict(implementation.variants),
            "adapter": surface.adapter,
            "places": surface.places(),
        },
        "environment": {
            **environment(chosen),
            "backend": os.environ.get(implementation.backend_variable or "") or None,
        },
    }


def main() -> None:
    """Examine the target that the request names."""
    request = json.loads(sys.argv[1])
    faulthandler.dump_traceback_later(request["seconds"], exit=True)
    send = sender(int(sys.argv.pop()))  # claimed before the target's code runs
    send(
        examine(
            request["target"],
            request["device"],
            request["dtypes"],
            request["imports"],
            lambda areas: send({"areas": areas}),
        )
    )
    os._exit(0)  # without waiting for threads of the target


if __name__ == "__main__":
    main()
