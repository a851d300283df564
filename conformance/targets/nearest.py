"""Names like a module or an attribute that is missing."""

import contextlib
import pkgutil
import sys
from typing import Any

from keyedopt.conformance.results.errors import did_you_mean


def near_module(name: str) -> str:
    """Return a question about modules like one that is missing, or an empty string.

    >>> near_module("json.scaner").startswith("; did you mean json.scanner")
    True
    """
    parent = name.rpartition(".")[0]
    places = getattr(sys.modules.get(parent), "__path__", ()) if parent else None
    with contextlib.suppress(Exception):  # untrusted: a package chooses what its path is
        prefix = f"{parent}." if parent else ""
        return did_you_mean(name, [f"{prefix}{one.name}" for one in pkgutil.iter_modules(places)])
    return ""


def near_attribute(owner: Any, name: str) -> str:
    """Return a question about attributes like one that an imported object lacks, or an empty string.

    >>> near_attribute(sys, "version_info.micr"), near_attribute(sys, "version_info.xyz")
    ('; did you mean micro, minor?', '')
    """
    with contextlib.suppress(Exception):  # untrusted: a module chooses what its attributes are
        for part in name.split("."):
            if not hasattr(owner, part):
                return did_you_mean(part, dir(owner))
            owner = getattr(owner, part)
    return ""
