"""``keyedopt list``: list the targets, the clauses, the areas or the devices."""

from collections.abc import Sequence

from keyedopt.conformance import spec


def listing(what: str, imports: Sequence[str] = ()) -> None:
    """Import modules, then print one line for each target, clause, area or device."""
    from keyedopt.conformance.targets.implementation import load

    for module in imports:
        load(module)
    {"targets": _targets, "clauses": _clauses, "areas": _areas, "devices": _devices}[what]()


def _targets() -> None:
    from importlib import metadata, util

    from keyedopt.conformance.targets.find import find, registered
    from keyedopt.conformance.targets.implementation import TargetError

    for name in sorted(registered()):
        try:
            implementation = find(name)
        except TargetError as error:
            print(f"{name:12} broken: {error}")
            continue
        root = implementation.root
        package = root.partition(":")[0].partition(".")[0] if isinstance(root, str) else None
        if package and util.find_spec(package) is None:
            how = f"; install it with: {implementation.install}" if implementation.install else ""
            print(f"{name:12} not installed{how}")
            continue
        try:
            version = metadata.version(implementation.distributions[0])
        except (IndexError, metadata.PackageNotFoundError):
            version = "unknown version"
        print(f"{name:12} {version}; areas: {', '.join(implementation.areas or ('as found',))}")
        if root == "keyedopt.fused":
            _backends()


def _backends() -> None:
    from keyedopt.fused.backends import available

    for name, why in available().items():
        print(f"  backend {name:8} {f'missing: {why}' if why else 'available'}")


def _clauses() -> None:
    for clause in spec.clauses().values():
        print(f"{clause.id:10} {clause.level:8} {clause.statement}")


def _areas() -> None:
    for area in spec.areas().values():
        print(f"{area.name:10} {len(area.clauses):3} clauses  {area.title}: {', '.join(area.names)}")


def _devices() -> None:
    from keyedopt.conformance.targets.devices import devices

    for device in devices():
        print(f"{device.name:10} {device.about}; dtypes: {', '.join(device.dtypes) or 'none'}")
