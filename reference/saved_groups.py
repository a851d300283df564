"""Convert the options of a group for saving and loading, and check the options of torch's classes."""

from collections.abc import Collection, Mapping
from typing import Any, TypedDict

from keyedopt.reference.option_checks import as_plain
from keyedopt.reference.rules.options import BiasCorrection, Decay, EpsPlacement, Rows


class TorchOptions(TypedDict, total=False):
    """Options of torch's SGD and Adagrad that choose an implementation."""

    foreach: bool | None
    fused: bool | None
    differentiable: bool


class TorchAdamOptions(TorchOptions, total=False):
    """Options of torch's Adam and AdamW that choose an implementation or the decay, and AMSGrad."""

    capturable: bool
    amsgrad: bool
    decoupled_weight_decay: bool


#: Torch's name of the option `decay`.
DECOUPLED = "decoupled_weight_decay"
#: Options of torch's optimizers that these do not have, and what to do if one is set. `foreach` and `fused`
#: choose among torch's implementations of one formula; `DECOUPLED` becomes `decay`.
TORCH_OPTIONS = {
    "foreach": "",
    "fused": "",
    DECOUPLED: "",
    "capturable": "leave it out: on CUDA the steps of keyedopt.fused can be captured, with lr as a tensor",
    "differentiable": "torch.optim has optimizers with differentiable steps",
    "amsgrad": "torch.optim has Adam and AdamW with AMSGrad",
}
#: Options that are saved as the index of a member, because tools that compare state dicts expect numbers.
ENUMERATIONS = {
    "decay": tuple(Decay),
    "eps_placement": tuple(EpsPlacement),
    "bias_correction": tuple(BiasCorrection),
    "rows": tuple(Rows),
}


def check_torch_options(options: Mapping[str, Any], accepted: Collection[str]) -> None:
    """Raise an error for an option of torch that has an effect which is not supported.

    Raises:
        TypeError: an option is not among the accepted ones.
        ValueError: an option without support is set.
        RuntimeError: both `foreach` and `fused` are set, as in torch.
    """
    for name, value in options.items():
        if name not in accepted:
            raise TypeError(f"an optimizer got an unexpected keyword argument {name!r}")
        if value and TORCH_OPTIONS[name]:
            raise ValueError(f"{name} must be False: {TORCH_OPTIONS[name]}")
    if options.get("foreach") and options.get("fused"):
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")


def as_saved(group: Mapping[str, Any], accepted: Collection[str]) -> dict[str, Any]:
    """Return the options of a group with numbers for enumerations, and torch's name of decoupled decay.

    Other names of torch are left out: a step raises if one was set that has no support.
    """
    kept = {name: value for name, value in group.items() if name not in accepted}
    if DECOUPLED in accepted and DECOUPLED in group:  # set since the last step
        kept["decay"] = decay_of(group[DECOUPLED])
    saved = {
        name: ENUMERATIONS[name].index(type(ENUMERATIONS[name][0])(value)) if name in ENUMERATIONS else value
        for name, value in kept.items()
    }
    decay = kept.get("decay", Decay.L2)  # a hook may have removed it
    is_decoupled = DECOUPLED in accepted and Decay(decay) is Decay.DECOUPLED
    return saved | ({DECOUPLED: True} if is_decoupled else {})


def as_loaded(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a saved group; old checkpoints have strings in place of numbers.

    Raises:
        ValueError: a number is not that of a member.
    """
    loaded = dict(group)
    for name in ENUMERATIONS.keys() & group.keys():
        value = group[name]
        if isinstance(value, int) and not isinstance(value, bool):
            if not 0 <= value < len(ENUMERATIONS[name]):
                raise ValueError(f"{name} must be less than {len(ENUMERATIONS[name])}, not {value}")
            loaded[name] = ENUMERATIONS[name][value].value
    return loaded


def decay_of(decoupled: bool, decay: Decay | str | None = None) -> str:
    """Return the `decay` that torch's `decoupled_weight_decay` stands for.

    Raises:
        ValueError: `decay` is given too, and says something else.
    """
    meant = Decay.DECOUPLED if decoupled else Decay.L2
    if decay is not None and Decay(decay) is not meant:
        raise ValueError(f"decay={as_plain(decay)!r} contradicts {DECOUPLED}={decoupled!r}: give one of them")
    return meant.value


def without_torch_options(group: Mapping[str, Any], accepted: Collection[str]) -> dict[str, Any]:
    """Return a group without the names of torch's options; raise if one has an effect without support."""
    found = {name: value for name, value in group.items() if name in accepted}
    check_torch_options(found, accepted)
    left = {name: value for name, value in group.items() if name not in found}
    if DECOUPLED in found:
        left["decay"] = decay_of(found[DECOUPLED], left.get("decay"))
    return left


def rename_torch_options(group: dict[str, Any], accepted: Collection[str]) -> None:
    """Replace torch's names of options that were set in a group since the last step.

    Raises:
        ValueError: an option without support is set.
    """
    if group.keys().isdisjoint(TORCH_OPTIONS):
        return
    older = "decay" if DECOUPLED in group else ""
    named = without_torch_options({name: group[name] for name in group if name != older}, accepted)
    group.clear()
    group.update(named)


def readable_group(group: Mapping[str, Any], accepted: Collection[str]) -> dict[str, Any]:
    """Return a saved group, keyedopt's or torch's, as a `RuleOptimizer` has it; its own `decay` counts."""
    loaded = as_loaded(group)
    if "decay" in loaded:
        loaded.pop(DECOUPLED, None)
    return without_torch_options(loaded, accepted)
