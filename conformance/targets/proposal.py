"""Propose an adapter for a library: classes with common names, missing options, other defaults."""

import inspect
from dataclasses import dataclass
from typing import Any

from keyedopt.conformance.suite.support.described import DEFAULTS
from keyedopt.conformance.targets.implementation import load

#: Names under which libraries have the algorithms, the most literal first.
COMMON = {
    "SGD": ("SGD", "SGDW", "SGD32bit"),
    "Adagrad": ("Adagrad", "AdaGrad", "Adagrad32bit"),
    "RowWiseAdagrad": ("RowWiseAdagrad", "RWSAdagrad", "RowwiseAdagrad"),
    "Adam": ("Adam", "Adam8bit", "Adam32bit", "CPUAdam", "DeepSpeedCPUAdam"),
    "AdamW": ("AdamW", "AdamW8bit", "AdamW32bit"),
    "LAMB": ("LAMB", "Lamb", "LAMB32bit"),
    "LarsSGD": ("LarsSGD", "LARS", "Lars", "LARS32bit"),
}
#: Options of the reference, and what cases need from other libraries.
NOT_SHOWN = (
    "decay",
    "rows",
    "bias_correction",
    "eps_placement",
    "error_if_nonfinite",
    "positional",
    "dtensor",
)


@dataclass(frozen=True)
class Proposal:
    """What an adapter says about the classes of a library, as far as signatures show it."""

    names: dict[str, str]
    absent: tuple[str, ...]
    fixed_options: dict[str, Any]
    defaults: dict[str, Any]
    variants: dict[str, str]


def _own(kind: Any, library: str) -> bool:
    """Whether an object is a class that the library does not only borrow from torch."""
    borrowed = not library.startswith("torch.") and str(getattr(kind, "__module__", "")).startswith("torch.")
    return isinstance(kind, type) and not borrowed


def propose(library: str) -> Proposal:
    """Import a library, and read the signatures of its classes.

    Raises:
        TargetError: the library cannot be imported.
    """
    root = load(library)
    names: dict[str, str] = {}
    absent, fixed, defaults, variants = [], {}, {}, {}
    for algorithm, options in DEFAULTS.items():
        common = COMMON.get(algorithm, (algorithm,))
        chosen = [name for name in common if _own(getattr(root, name, None), library)]
        if not chosen:
            absent.append(algorithm)
            continue
        names[algorithm] = f"{library}:{chosen[0]}"
        if "SGDW" in chosen[0]:
            variants[algorithm] = "decoupled"
        takes = inspect.signature(getattr(root, chosen[0])).parameters
        for option, documented in options.items():
            if option not in takes:
                absent.append(f"{algorithm}.{option}")
            elif takes[option].default is inspect.Parameter.empty:
                fixed[f"{algorithm}.{option}"] = documented
            elif takes[option].default != documented:
                defaults[f"{algorithm}.{option}"] = takes[option].default
        absent += [f"{algorithm}.{name}" for name in ("maximize", "fused", "foreach") if name not in takes]
    absent += [f"*.{name}" for name in ("sparse", *NOT_SHOWN)]
    return Proposal(names, tuple(dict.fromkeys(absent)), fixed, defaults, variants)
