"""Sound targets that lack an option, ``lacking:absent_eps``, or have no default of any, ``lacking:fixed``."""

import functools
import inspect
from typing import Any

from keyedopt import reference
from keyedopt.conformance.suite.support.described import DEFAULTS, OPTIONS
from keyedopt.conformance.targets.implementation import Implementation

ALGORITHMS = (*DEFAULTS, "SparseAdam")
TAKES = {algorithm: inspect.signature(getattr(reference, algorithm)).parameters for algorithm in ALGORITHMS}


def without(saved: dict[str, Any], option: str, **instead: Any) -> dict[str, Any]:
    """Return a state dict whose groups lack an option, or have another value of it."""
    groups = [
        {name: value for name, value in group.items() if name != option} | instead
        for group in saved["param_groups"]
    ]
    return saved | {"param_groups": groups}


@functools.cache
def _class(algorithm: str, lacks: str) -> Any:
    """Return a class of the reference without an option, or without the defaults of all."""
    kind = getattr(reference, algorithm)
    takes = {
        name: one if lacks or name not in OPTIONS else one.replace(default=one.empty, kind=one.KEYWORD_ONLY)
        for name, one in TAKES[algorithm].items()
        if name != lacks
    }
    signature = inspect.Signature(sorted(takes.values(), key=lambda one: one.kind))

    def init(self: Any, *args: Any, **options: Any) -> None:
        signature.bind(*args, **options)
        kind.__init__(self, *args, **options)
        if lacks in TAKES[algorithm]:  # nor do its saved groups have the option
            default = TAKES[algorithm][lacks].default
            self.register_state_dict_post_hook(lambda _, saved: without(saved, lacks))
            self.register_load_state_dict_pre_hook(lambda _, saved: without(saved, lacks, **{lacks: default}))

    body = {"__init__": init, "__signature__": signature, "__module__": __name__}
    return type(algorithm, (kind,), body | {"__qualname__": f"{algorithm}_{lacks}"})


def __getattr__(name: str) -> Any:
    first, _, rest = name.partition("_")
    if first in ALGORITHMS:
        return _class(first, rest)
    if first not in ("absent", "fixed"):
        raise AttributeError(name)
    having = [one for one, takes in TAKES.items() if rest in takes or not rest]
    options = {
        f"{one}.{option}": TAKES[one][option].default for one in having for option in OPTIONS & {*TAKES[one]}
    }
    fixed = {option: getattr(default, "value", default) for option, default in options.items()}
    lacking = [f"{one}.{rest}" for one in having] if rest else []
    if rest in ("", "decay"):  # torch's name for it cannot be given beside one that is always given
        lacking.append("Adam.decoupled_weight_decay")
    return Implementation(
        name=name,
        root="keyedopt.reference",
        names={algorithm: f"lacking:{algorithm}_{rest}" for algorithm in having},
        areas=("algorithms", *(["sparse"] if "SparseAdam" in having else [])),
        dtypes=("float32", "float64"),
        absent=(*lacking, *(one for one in DEFAULTS if one not in having)),
        fixed_options={} if rest else fixed,
    )
