"""The C++ extensions: which are missing, what is slower without them, and the command that builds them."""

import os
import shlex
import shutil
import sys
import warnings
from pathlib import Path

import torch

#: What PyTorch does instead, and slower, if an extension was not built.
SLOWER = {
    "keyedopt.fused.bulk._bulk": "steps, clipping and checkpoints of many parameters",
    "keyedopt.fused.backends.native._kernels": "embedding tables on the CPU",
}
_ROOT = Path(__file__).resolve().parents[1]
_warned = False

__all__ = ["SLOWER", "build_command", "compiler", "missing", "warn_if_missing"]


def missing() -> dict[str, str]:
    """Return what is slower by the name of each extension that was not built, or from older sources."""
    from keyedopt.fused.backends.native import NativeBackend  # which imports the modules that warn
    from keyedopt.fused.bulk import native

    built = dict(zip(SLOWER, (native is not None, bool(NativeBackend.instruction_sets())), strict=True))
    return {name: slower for name, slower in SLOWER.items() if not built[name]}


def warn_if_missing() -> None:
    """Warn of missing extensions, at the first call in a process.

    The warning is a `RuntimeWarning` that begins with ``keyedopt's C++ extensions``.
    """
    global _warned
    if _warned or torch.compiler.is_compiling():
        return
    _warned = True
    slower = missing()
    if slower:
        warnings.warn(
            f"keyedopt's C++ extensions are missing: PyTorch does {' and '.join(slower.values())} instead, "
            "which is slower; `keyedopt doctor` shows the command that builds them",
            RuntimeWarning,
            stacklevel=3,
        )


def compiler() -> str | None:
    """Return the path of the compiler that the environment variable CXX names, or of c++; None if missing."""
    return shutil.which((shlex.split(os.environ.get("CXX", "")) or ["c++"])[0])


def build_command() -> str:
    """Return the command that builds the extensions: of a checkout in place, otherwise of a new install."""
    checkout = (_ROOT / "pyproject.toml").exists()
    source = ["-e", str(_ROOT)] if checkout else ["--no-binary", "keyedopt", "keyedopt"]
    return shlex.join([sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-deps", *source])
