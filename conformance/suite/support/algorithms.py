"""Helpers for cases of the algorithms: their names, fixed gradients, training."""

from collections.abc import Sequence
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import Mismatch, expect_within, same_bits, snapshot
from keyedopt.conformance.suite.support.described import (
    DEFAULTS,
    OTHER,
    CannotRun,
    Described,
    MissingName,
    documented_state,
    entries_of,
    held_options,
    named,
    said,
)
from keyedopt.conformance.suite.support.inputs import parameter, set_grads, train
from keyedopt.conformance.suite.support.torch_optimizers import torch_factory

ROW_WISE = ("RowWiseAdagrad", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB", "LarsSGD")
ALGORITHMS = ("SGD", "Adagrad", "Adam", "AdamW", "Ftrl", *ROW_WISE)
#: Algorithms that divide by a root plus eps.
WITH_EPS = tuple(name for name in ALGORITHMS if name not in ("SGD", "Ftrl", "LarsSGD"))
WITH_OTHER = (*ALGORITHMS, OTHER)
#: The options of `OTHER` that cases use, if its class has them.
OF_OTHERS = ("lr", "weight_decay", "maximize", "fused", "foreach")
#: ULPs per step by which two trainings with an algorithm may differ: each may be off by twice the worst error
#: of its formula in any order, which the golden trajectories record. Others may differ by 4.
ROUNDED_APART = {
    "Adagrad": 12.9,
    "RowWiseAdagrad": 7.4,
    "Adam": 11.6,
    "AdamW": 6.8,
    "PartialRowWiseAdam": 5.4,
    "LAMB": 6.9,
    "PartialRowWiseLAMB": 11.3,
    "Ftrl": 6.2,
}
#: Options with which an algorithm has state.
MOMENTUM = {"SGD": {"momentum": 0.9}}


def make_algorithm(impl: Any, algorithm: str, weights: Any, lr: float = 0.1, **options: Any) -> Any:
    """Make an optimizer of an algorithm that has state."""
    return getattr(impl, algorithm)(weights, lr=lr, **{**MOMENTUM.get(algorithm, {}), **options})


#: The other name by which a group may have an option.
KEPT_AS = {"decoupled_weight_decay": "decay"}


def resumed_with(kind: Any, old: Any, weight: Any, **options: Any) -> Any:
    """Make an optimizer with other options that resumes from the state of an old one.

    Cases compare an option that is set between two steps with this optimizer. Comparing two optimizers in
    which the option is set would pass if neither read it. Everything else in a group, such as a step count,
    comes from the old optimizer.
    """
    fresh = kind([weight], **options)
    saved = snapshot(old.state_dict())
    own = kind.renamed(options) if isinstance(kind, Described) else options
    for group, new in zip(saved["param_groups"], fresh.param_groups, strict=True):
        names = [name if name in new else KEPT_AS.get(name, name) for name in own]
        group.update({name: new[name] for name in names if name in new})
    fresh.load_state_dict(saved)
    return fresh


def set_options(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Set options of a group as torch's schedulers do: a tensor is filled, everything else is replaced."""
    for name, value in options.items():
        if isinstance(group.get(name), torch.Tensor):
            group[name].fill_(value)
        else:
            group[name] = value


def load_and_train(optimizer: Any, saved: Any, weights: Any) -> None:
    """Load a state and take two steps."""
    optimizer.load_state_dict(saved)
    train(optimizer, weights, 2, seed=2)


def trained_at(impl: Any, algorithm: str, rates: Sequence[float], resume: bool = False) -> torch.Tensor:
    """Return a weight after a step at each learning rate, which is set in the groups or by `resumed_with`."""
    weight = parameter(4, 3)
    optimizer = make_algorithm(impl, algorithm, [weight])
    for seed, rate in enumerate(rates):
        if resume:
            options = {"lr": rate, **MOMENTUM.get(algorithm, {})}
            optimizer = resumed_with(getattr(impl, algorithm), optimizer, weight, **options)
        else:
            for group in optimizer.param_groups:
                set_options(group, named(impl, algorithm, {"lr": rate}))
        train(optimizer, [weight], 1, seed=seed)
    return weight.detach()


def resumes(impl: Any, algorithm: str) -> bool:
    """Return whether training goes on with the same bits after a load; if not, ALGO-072 reports it."""
    rates = [0.1] * 4
    try:
        return same_bits(trained_at(impl, algorithm, rates, resume=True), trained_at(impl, algorithm, rates))
    except Exception:
        return False


def exact_dtype(impl: Any) -> str:
    """Return the most precise dtype of the target."""
    return "float64" if "float64" in impl.dtypes else "float32"


def need_dtype(impl: Any, algorithm: str, dtype: str) -> None:
    """Raise MissingName if the target does not support a dtype, so the case is unsupported."""
    if dtype not in impl.dtypes:
        raise MissingName(f"{algorithm} does not support {dtype}", name=f"{algorithm}.{dtype}")


def need_operators(impl: Any, algorithm: str, dtype: str) -> None:
    """Raise CannotRun if torch lacks an operator, such as a decomposition, that a step needs in a dtype.

    An optimizer of another formula may take no step in a dtype, such as one with an own kernel: the case is
    then unsupported.
    """
    weight = parameter(4, 3, dtype=dtype)
    set_grads([weight])
    try:
        make_algorithm(impl, algorithm, [weight]).step()
    except NotImplementedError as error:
        raise CannotRun(f"torch has no operator: {error}") from None
    except Exception as error:
        if algorithm != OTHER or dtype == impl.dtypes[0]:
            raise
        why = f"{algorithm} takes no step in {dtype}: {error}"
        raise MissingName(why, name=f"{algorithm}.{dtype}") from None


def decay(impl: Any, algorithm: str, value: float) -> dict[str, Any]:
    """Return the option weight_decay, or no option if the class does not have it."""
    return {} if impl.lacks(f"{algorithm}.weight_decay") else {"weight_decay": value}


def need_independent(impl: Any, algorithm: str, first: tuple[int, int] = (0, 0)) -> None:
    """Raise MissingName if an unknown formula computes a step from several parameters together.

    Parameters of the known algorithms train independently. For another one, such as Prodigy, which
    estimates one distance over all parameters, the case is unsupported.

    Args:
        impl: the target.
        algorithm: the public name of the optimizer.
        first: the first of three steps in which each of two parameters has a gradient. Formulas may also
            have one step count for all parameters, such as MADGRAD.
    """
    if algorithm != OTHER:
        return
    together, apart = ([parameter(4, 3, seed=at) for at in range(2)] for _ in range(2))
    decayed = decay(impl, algorithm, 0.1)  # by which a formula may depend on all parameters, such as Ranger21
    one = make_algorithm(impl, algorithm, together, **decayed)
    others = [make_algorithm(impl, algorithm, [weight], **decayed) for weight in apart]
    try:
        for step in range(3):
            for weights in (together, apart):
                set_grads(weights, seed=step)
                for weight, begins in zip(weights, first, strict=True):
                    weight.grad = weight.grad if step >= begins else None
            one.step()
            for other, begins in zip(others, first, strict=True):
                if step >= begins:
                    other.step()
    except Exception:
        if not any(first):
            raise
        need_independent(impl, algorithm)  # a missing gradient raises an error: see ALGO-031
        return
    try:
        for at, (seen, wanted) in enumerate(zip(together, apart, strict=True)):
            expect_same_way(seen, wanted, parameter(4, 3, seed=at), "the weight", algorithm)
    except Mismatch:
        name = f"{algorithm}.independent"
        raise MissingName(f"{algorithm} does not train parameters independently", name=name) from None


def need_group_rates(impl: Any, algorithm: str) -> None:
    """Raise MissingName if an unknown formula refuses groups with unlike learning rates."""
    if algorithm != OTHER:
        return
    weights = [parameter(4, 3, seed=at) for at in range(2)]
    groups = [{"params": [weight], "lr": lr} for weight, lr in zip(weights, (0.1, 0.5), strict=True)]
    set_grads(weights)
    try:
        make_algorithm(impl, algorithm, groups).step()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise MissingName(f"{algorithm} refuses it: {error}", name=f"{algorithm}.group_rates") from None


def need_switch(impl: Any, algorithm: str, kernels: str) -> None:
    """Continue if the class has this kernel switch; otherwise mark the case unsupported.

    It is unsupported too if neither the class nor torch's own can take a step with it on this device.
    """
    make_algorithm(impl, algorithm, [parameter(2, 2)])
    weight = parameter(2, 2)
    set_grads([weight])
    try:
        optimizer = make_algorithm(impl, algorithm, [weight], **{kernels: True})
    except (TypeError, ValueError):
        getattr(impl, f"{algorithm}.{kernels}")  # raises MissingName, so the case is unsupported
        return
    try:
        optimizer.step()
    except RuntimeError:
        of_torch = getattr(torch.optim, algorithm, None)
        if of_torch is not None:
            torch_factory(of_torch, **{kernels: True})  # raises CannotRun


def relied_on(impl: Any, algorithm: str) -> dict[str, Any]:
    """Return the documented defaults that the target's adapter replaces by fixed options, but can have."""
    fixed = said(impl.adapter, "fixed", algorithm).keys() - held_options(impl.adapter, algorithm).keys()
    return {name: value for name, value in DEFAULTS[algorithm].items() if name in fixed}


def variant_of(impl: Any, algorithm: str) -> str:
    """Return the words of the variant of the formula that the target documents, or an empty string."""
    return str(impl.adapter.get("variants", {}).get(algorithm, ""))


def known_state(impl: Any, algorithm: str, optimizer: Any, weight: Any, names: Any) -> dict[str, Any]:
    """Return the tensors of the state, of these documented names, that the target has.

    A target may keep an object of its own under such a name: its weights show whether it is right.
    """
    state = documented_state(impl, algorithm, entries_of(optimizer, weight, {}))
    return {name: state[name] for name in names if name in state and isinstance(state[name], torch.Tensor)}


def expect_same_way(
    seen: Any, wanted: Any, start: Any, what: str, algorithm: str = "", steps: int = 3
) -> None:
    """Expect two trainings from the same start to give equal results, within `ROUNDED_APART` per step.

    The two may be rounded differently: elements of a vector register and the remainder, or a row by itself
    and among others, may be evaluated in different orders. The unit is that of the larger of `start`, the
    weights before or the largest on the way, and the weights after.
    """
    exact = wanted.detach().double()
    ulps = ROUNDED_APART.get(algorithm, 4.0) * steps
    expect_within(seen.detach(), exact, ulps, what, before=start.detach().double())


def fixed_grads(steps: int, rows: int = 4, dtype: str = "float32", seed: int = 1) -> list[torch.Tensor]:
    """Make fixed gradients of a table of width 3."""
    return [parameter(rows, 3, dtype=dtype, seed=100 * seed + step).detach() for step in range(steps)]


def sparse_rows(rows: Any, grads: Any, like: Any) -> torch.Tensor:
    """Make an uncoalesced sparse gradient from rows and their gradients."""
    listed = torch.as_tensor(grads, dtype=like.dtype, device=like.device)
    return torch.sparse_coo_tensor(
        torch.tensor([rows], device=like.device), listed, like.shape, check_invariants=True
    )


def trained_copy(impl: Any, algorithm: str, start: Any, grads: Any, **options: Any) -> tuple[Any, Any]:
    """Train a copy of the weight with given gradients; return the weight and the optimizer."""
    weight = torch.nn.Parameter(start.detach().clone())
    optimizer = make_algorithm(impl, algorithm, [weight], **options)
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight, optimizer
