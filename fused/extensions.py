"""The C++ extensions: which are missing, what is slower without them, and the command that builds them."""

import importlib.metadata
import json
import os
import shlex
import shutil
import sys
import urllib.parse
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
    """Return the command that builds the extensions: of a checkout in place, otherwise of a new install.

    A new install is made from the folder from which keyedopt was installed, or from the sources in the index.
    """
    if (_ROOT / "pyproject.toml").exists():
        source = ["-e", str(_ROOT)]
    elif folder := _installed_from():
        source = [folder]
    else:
        source = ["--no-binary", "keyedopt", "keyedopt"]
    return shlex.join([sys.executable, "-m", "pip", "install", "--force-reinstall", "--no-deps", *source])


def _installed_from() -> str:
    """Return the folder from which pip installed keyedopt (PEP 610); empty if it was not a folder."""
    # A build leaves metadata without this file in its folder, which Python may find first.
    found = importlib.metadata.distributions(name="keyedopt")
    about = json.loads(next(filter(None, (one.read_text("direct_url.json") for one in found)), "{}"))
    folder = urllib.parse.unquote(about["url"].removeprefix("file://")) if "dir_info" in about else ""
    return folder if Path(folder, "pyproject.toml").exists() else ""
