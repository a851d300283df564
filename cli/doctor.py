"""``keyedopt doctor``: backends, devices and versions, and whether the kernels compute what torch does."""

import platform
import time
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from keyedopt.fused.backends.interface import Backend, Step, Table

#: What is checked: an algorithm of each kind of state, and every dtype of a table.
CHECKED = (("sgd", "float32"), ("adam", "float32"), ("rowwise_adagrad", "float16"), ("adam", "bfloat16"))


def doctor() -> None:
    """Print versions, devices and backends for a bug report, and check the kernels on each device.

    Exit code 1: a kernel computes something else than torch.

    Example: keyedopt doctor
    """
    from keyedopt.conformance.targets.devices import devices
    from keyedopt.fused.backends import available, get
    from keyedopt.fused.backends.self_check import versions

    print(f"Python {platform.python_version()}, {platform.platform()}")
    print(", ".join(f"{name} {version}" for name, version in versions().items()))
    here = list(devices())
    for device in here:
        print(f"device {device.name}: {device.about}; dtypes: {', '.join(device.dtypes)}")
    _show_extensions()
    wrong = []
    for name, why in available().items():
        if why:
            print(f"backend {name}: missing: {why}")
            continue
        kernels = get(name).kernels()
        print(f"backend {name}{f' ({kernels})' if kernels else ''}")
        for device in here if name != "torch" else ():  # with which the others are compared
            wrong += _check(get(name), device.name)
    raise typer.Exit(int(bool(wrong)))


def _show_extensions() -> None:
    """Print which C++ extensions are missing, what is slower without them, and how to build them."""
    from keyedopt.fused.extensions import build_command, compiler, missing

    slower = missing()
    if not slower:
        print("C++ extensions: built")
        return
    for name, what in slower.items():
        print(f"C++ extension {name}: missing: PyTorch does {what} instead, which is slower")
    where = "" if compiler() else "install a C++17 compiler (g++ or clang++), then: "
    print(f"  to build: {where}{build_command()}")


def _check(backend: "Backend", device: str) -> list[str]:
    """Check a backend on a device, print the outcome, and return what is wrong."""
    from keyedopt.fused.backends.self_check import wrong_kernel

    begin, checked, refused = time.perf_counter(), 0, ""
    wrong: list[str] = []
    for algorithm, dtype in CHECKED:
        tables, step = _example(algorithm, dtype, device)
        why = backend.refuses(tables, step)
        if why:
            refused = why
            continue
        checked += 1
        found = wrong_kernel(backend, tables, step)
        wrong += [found] if found else []
    seconds = time.perf_counter() - begin
    if wrong:
        print("\n".join(f"  {device}: WRONG: {why}" for why in wrong))
    elif checked:
        print(f"  {device}: right in {checked} steps, compared with torch, in {seconds:.1f} s")
    else:
        print(f"  {device}: not used: {refused}")
    return wrong


def _example(algorithm: str, dtype: str, device: str) -> tuple[list["Table"], "Step"]:
    """Return tables like those of which the problem of a check is made, and a step of the algorithm."""
    import torch

    from keyedopt.fused.backends.interface import ALGORITHMS, ROW_STATE, Step, Table

    weight = torch.zeros(4, 64, dtype=getattr(torch, dtype), device=device)
    row = ROW_STATE.get(algorithm)
    shapes = [(4,) if row == index else (4, 64) for index in range(len(ALGORITHMS[algorithm]))]
    states = tuple(torch.zeros(shape, device=device) for shape in shapes)
    return [Table(weight, states)], Step(algorithm, lr=0.1, eps=1e-8)
