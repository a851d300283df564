"""The suites that asv runs: today's benchmarks measure old commits of keyedopt.

asv imports this folder under its bare name, `suites`, in an environment in which the commit under test is
installed. The commit may have no benchmarks, or older ones. Before anything imports them, this module
therefore makes the folder `benchmarks` of this checkout, and `conformance` on which it depends, the packages
of these names. `fused` and `reference` are those of the commit: benchmarks may use only their public names.
"""

import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path

PACKAGES = ("benchmarks", "conformance")


def use_folder_of_this_checkout(name: str) -> None:
    """Make a folder of this checkout the package of keyedopt with this name.

    Raises:
        ImportError: another package of this name was imported before.
    """
    package, folder = f"keyedopt.{name}", Path(__file__).resolve().parents[3] / name
    known = sys.modules.get(package)
    if known is None:
        spec = importlib.util.spec_from_file_location(
            package, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec
        assert spec.loader
        sys.modules[package] = known = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(known)
        with contextlib.suppress(ImportError):
            setattr(importlib.import_module("keyedopt"), name, known)
    if Path(str(known.__file__)).resolve().parent != folder:
        raise ImportError(f"{package} was already imported from {known.__file__}: import {__name__} first")


for _name in PACKAGES:
    use_folder_of_this_checkout(_name)
