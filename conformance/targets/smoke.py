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
import inspect
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from keyedopt.conformance import spec
from keyedopt.conformance.results.digest import digest
from keyedopt.conformance.results.untrusted import error_text, one_line
from keyedopt.conformance.run.protocol import sender
from keyedopt.conformance.suite.support.described import MissingName
from keyedopt.conformance.targets.devices import check_device, description
from keyedopt.conformance.targets.find import find
from keyedopt.conformance.targets.implementation import (
    OWNERS,
    Implementation,
    Surface,
    TargetError,
    with_nameless,
)
from keyedopt.conformance.targets.meaning import CLAIM


def versions(implementation: Implementation, more: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions of the distributions that identify the implementation, the main one first.

    They are followed by those of the libraries whose classes its description names, and of `more` packages.
    If a package was not imported from its distribution, but from a source checkout, the version is its
    ``__version__``.
    """
    names = list(_distributions(implementation))
    packages = dict.fromkeys([*map(_package, implementation.names.values()), *more])
    if packages:
        installed = importlib.metadata.packages_distributions()
        names += [name for package in packages for name in installed.get(package, ())]
    found = {}
    for name in names:
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        other = _imported_from_elsewhere(distribution)
        found[name] = str(getattr(other, "__version__", "unknown") if other else distribution.version)
    return found


def _distributions(implementation: Implementation) -> Sequence[str]:
    """Return the distributions that identify the implementation, the main one first."""
    if implementation.distributions or not isinstance(implementation.root, str):
        return implementation.distributions
    return importlib.metadata.packages_distributions().get(_package(implementation.root), ())


def _package(place: str) -> str:
    return place.partition(":")[0].partition(".")[0]


def _imported_from_elsewhere(distribution: importlib.metadata.Distribution) -> Any:
    """Return a module that has the name of one of a distribution, and another file; None without one."""
    for file in distribution.files or ():
        if file.suffix == ".py" and (len(file.parts) == 1 or file.parts[1:] == ("__init__.py",)):
            module = sys.modules.get(file.parts[0].removesuffix(".py"))
            origin = getattr(module, "__file__", None)
            if origin and not os.path.samefile(origin, str(distribution.locate_file(file))):
                return module
    return None


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

    if not surface.claimed():
        names = ", ".join(spec.areas()["keyed"].names)
        if others := surface.other_meanings:
            said = "; ".join(f"its {one} {why}" for one, why in others.items())
            raise TargetError(f"{name} has nothing to judge: {said}. {CLAIM}")
        raise TargetError(
            f"{name} has none of the public names ({names}, …): see `keyedopt list areas`. "
            f"`keyedopt init-adapter --from {name}` proposes an adapter for classes with common names"
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

    for name in filter(surface.claims, spec.areas()["algorithms"].names):
        parameter = torch.nn.Parameter(torch.ones(2, device=device))
        parameter.grad = torch.ones_like(parameter)
        with contextlib.suppress(Exception):  # the suite reports it, clause by clause
            getattr(surface, name)([parameter], lr=0.1).step()


def _claimed(surface: Surface, areas: Iterable[str]) -> dict[str, Any]:
    """Return what the claimed names of some areas mean, without those that are missing."""
    names = dict.fromkeys(name for area in areas for name in spec.areas()[area].names)
    return {name: getattr(surface, name) for name in names if surface.claims(name) and surface.has(name)}


def extended(surface: Surface) -> list[str]:
    """Return the packages among `OWNERS` whose classes the claimed ones extend; torch is in every result."""
    claimed = _claimed(surface, spec.areas()).values()
    bases = [base for one in claimed for base in getattr(one, "__mro__", ())]
    packages = {_package(str(getattr(base, "__module__", ""))) for base in bases} - {"torch"}
    return [owner for owner in OWNERS if owner in packages]


def not_optimizers(surface: Surface) -> list[str]:
    """Return the claimed algorithms that are classes without `torch.optim.Optimizer` as a base."""
    import torch

    return [
        name
        for name, one in _claimed(surface, ["algorithms"]).items()
        if isinstance(one, type) and not issubclass(one, torch.optim.Optimizer)
    ]


#: What Python and torch write into a class beside what its body says.
OF_EVERY_CLASS = (
    *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slotnames__"),
    *("__firstlineno__", "__static_attributes__", "__annotations__"),
)


def unchanged(surface: Surface) -> dict[str, str]:
    """Return the claimed names whose class changes nothing of a class of one of `OWNERS`, with that owner."""
    found = {}
    for name, one in _claimed(surface, spec.areas()).items():
        kind = getattr(one, "kind", one)
        mro = getattr(kind, "__mro__", ())
        owned = [_package(str(base.__module__)) in OWNERS for base in mro]
        if True in owned:
            first = owned.index(True)
            base = mro[first]
            if base.__name__ == name and all(_changes_nothing(each, base) for each in mro[:first]):
                found[name] = _package(str(base.__module__))
    return found


def _changes_nothing(kind: type, base: type) -> bool:
    """Whether a class has no attribute of its own; torch wraps the `step` of each class anew."""
    own = {name: value for name, value in vars(kind).items() if name not in OF_EVERY_CLASS}
    theirs: dict[str, Any] = {name: getattr(base, name, None) for name in own}
    return all(
        callable(value) and inspect.unwrap(value) is inspect.unwrap(theirs[name])
        for name, value in own.items()
    )


def examine(
    target: str,
    device: str | None,
    dtypes: Sequence[str],
    imports: Sequence[str],
    report_areas: Callable[[Sequence[str]], None],
) -> dict[str, Any]:
    """Find, import and build a target; pass its areas on as soon as they are known; return the report."""
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
    found = versions(implementation, extended(surface))
    main = next((name for name in _distributions(implementation) if name in found), "")
    return {
        "problem": "",
        "compiles": implementation.compiles,
        "implementation": {
            "name": one_line(implementation.name),
            "target": target,
            "version": found.get(main, "unknown"),
            "versions": found,
            "build": digest(implementation.root),
            "areas": list(areas),
            "dtypes": list(implementation.dtypes_on(chosen)),
            "variants": dict(implementation.variants),
            "adapter": surface.adapter,
            "places": surface.places(),
            "not_optimizers": not_optimizers(surface),
            "restrictions": surface.restrictions(),
            "unchanged": unchanged(surface),
            "other_meanings": {name: one_line(why, 200) for name, why in surface.other_meanings.items()},
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
