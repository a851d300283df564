"""SparseAdam: the contents of the state, saving and loading."""

import copy
import io
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    expect_unchanged,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.device import zeros
from keyedopt.conformance.suite.support.inputs import parameter, train_sparse

RANGED = ("SparseAdam.lr", "SparseAdam.eps", "SparseAdam.betas")


def trained(impl: Any, count: int = 2, steps: int = 2, dtype: str = "float32") -> tuple[Any, list[Any]]:
    """Make an optimizer of some tables that has taken some steps."""
    weights = [parameter(5, 2, dtype=dtype, seed=index) for index in range(count)]
    optimizer = impl.SparseAdam(weights, lr=0.25)
    train_sparse(optimizer, weights, steps)
    return optimizer, weights


def live_data(optimizer: Any, weights: Any) -> dict[str, Any]:
    """Return all live data that a load may change; state is keyed by the position of its parameter."""
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    extra = sum(1 for key in optimizer.state if not isinstance(key, torch.Tensor))
    states = [dict(optimizer.state.get(weight, {})) for weight in weights]
    return {
        "weights": [weight.detach() for weight in weights],
        "states": states,
        "options": options,
        "extra": extra,
    }


def invalid_checkpoint(saved: dict[str, Any], how: str) -> dict[str, Any]:
    """Make a checkpoint that does not fit."""
    group = saved["param_groups"][0]
    entry, second = (saved["state"][name] for name in group["params"])
    if how in ("wider", "fewer rows", "one row", "flat"):
        shape = {"wider": (5, 3), "fewer rows": (4, 2), "one row": (1, 2), "flat": (10,)}[how]
        entry["exp_avg"] = zeros(shape)
    elif how == "second moment":
        second["exp_avg_sq"] = zeros(1)
    elif how == "no first moment":
        del entry["exp_avg"]
    elif how == "no step":
        del entry["step"]
    elif how == "number":
        entry["exp_avg"] = 0.5
    elif how == "unknown parameter":
        saved["state"][9] = copy.deepcopy(entry)
    elif how in ("step -1", "step nan", "step half"):
        entry["step"] = {"step -1": -1, "step nan": float("nan"), "step half": 0.5}[how]
    elif how in ("lr", "eps", "betas"):
        group[how] = {"lr": -5.0, "eps": -1.0, "betas": (2.0, 0.5)}[how]
    elif how == "more groups":
        saved["param_groups"].append({**group, "params": []})
    elif how == "fewer parameters":
        group["params"] = group["params"][:1]
    elif how in ("state", "param_groups"):
        del saved[how]
    return saved


def expect_refused(impl: Any, how: str, *kinds: type[BaseException]) -> None:
    """Expect a load to raise and to change nothing."""
    optimizer, weights = trained(impl)
    before = snapshot(live_data(optimizer, weights))
    saved = invalid_checkpoint(copy.deepcopy(trained(impl, steps=4)[0].state_dict()), how)
    expect_raises(
        lambda: optimizer.load_state_dict(saved), *kinds, expected=f"an error for the checkpoint ({how})"
    )
    expect_unchanged(before, live_data(optimizer, weights), "the optimizer after a failed load")


@pytest.mark.clause("SPARSE-045")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
def test_state_dict(impl):
    """state_dict contains the state by id, and the groups with their options and parameter ids."""
    first, second = parameter(5, 2), parameter(5, 2, seed=1)
    optimizer = impl.SparseAdam([{"params": [first]}, {"params": [second], "lr": 0.5}], lr=0.25)
    train_sparse(optimizer, [first, second], 1)
    saved = optimizer.state_dict()
    expect_equal(set(saved), {"state", "param_groups"}, "the entries")
    expect_equal([group["lr"] for group in saved["param_groups"]], [0.25, 0.5], "the learning rates")
    ids = [name for group in saved["param_groups"] for name in group["params"]]
    expect(not any(isinstance(name, torch.Tensor) for name in ids), "ids, no parameters", ids)
    expect_equal(set(saved["state"]), set(ids), "the ids that have state")
    for name, weight in zip(ids, (first, second), strict=True):
        expect_unchanged(dict(optimizer.state[weight]), dict(saved["state"][name]), "the state")


@pytest.mark.clause("SPARSE-046")
def test_names_and_shapes(impl, dtype):
    """The state is step, exp_avg and exp_avg_sq; moments have the parameter's dtype or a wider one."""
    optimizer, (weight,) = trained(impl, count=1, steps=3, dtype=dtype)
    (entry,) = optimizer.state_dict()["state"].values()
    expect_equal(set(entry), {"step", "exp_avg", "exp_avg_sq"}, "the names")
    expect_equal(float(entry["step"]), 3.0, "the count of steps")
    for name in ("exp_avg", "exp_avg_sq"):
        seen = (tuple(entry[name].shape), entry[name].layout)
        expect_equal(seen, (tuple(weight.shape), torch.strided), f"shape and layout of {name}")
        kind = entry[name].dtype
        expect(torch.promote_types(kind, weight.dtype) is kind, f"{name} in {dtype} or wider", kind)


@pytest.mark.clause("SPARSE-047")
@pytest.mark.parametrize("stored", [False, True])
def test_resume(impl, stored):
    """A loaded state continues on the same trajectory, including options, also from a file."""
    optimizer, weights = trained(impl)
    optimizer.param_groups[0]["lr"] = 0.125
    saved = copy.deepcopy(optimizer.state_dict())
    if stored:
        file = io.BytesIO()
        torch.save(saved, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
    twins = [weight.detach().clone().requires_grad_() for weight in weights]
    resumed = impl.SparseAdam(twins, lr=0.75, betas=(0.5, 0.75))
    resumed.load_state_dict(saved)
    expect_equal(tuple(resumed.param_groups[0]["betas"]), (0.9, 0.999), "the betas")
    for one, listed in ((optimizer, weights), (resumed, twins)):
        train_sparse(one, listed, 3, seed=9)
    for twin, weight in zip(twins, weights, strict=True):
        expect_bits(twin.detach(), weight.detach(), "a resumed parameter")


def error_of_correction(count: Any, step: int) -> float:
    """Return the maximal relative error of torch's bias correction, given that its count is a tensor.

    torch evaluates βᵗ in the dtype of the count, or in float32 if the count is an integer: β is rounded, the
    product is rounded t times, the power by one unit in the last place, and the difference 1 − βᵗ once. A
    count in a dtype narrower than float32 could not count further and is not allowed more.
    """
    if not isinstance(count, torch.Tensor):
        return 0.0
    half = min(torch.finfo(torch.result_type(count, 0.9)).eps, torch.finfo(torch.float32).eps) / 2
    first, second = (half * ((step + 2) * beta**step / (1 - beta**step) + 1) for beta in (0.9, 0.999))
    return 1.01 * (first + second / 2)  # of a quotient and a square root; second-order terms are smaller


@pytest.mark.clause("SPARSE-047")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
def test_resume_with_groups(impl):
    """Each group gets its own options back, and all continue on their trajectories."""

    def made(tables: list[Any], more: dict[str, Any]) -> Any:
        return impl.SparseAdam([{"params": tables[:1]}, {"params": tables[1:], **more}], lr=0.25)

    weights = [parameter(5, 2, seed=seed) for seed in range(2)]
    optimizer = made(weights, {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.125, "maximize": True})
    train_sparse(optimizer, weights, 2)
    twins = [weight.detach().clone().requires_grad_() for weight in weights]
    resumed = made(twins, {"lr": 0.75})
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for one, listed in ((optimizer, weights), (resumed, twins)):
        train_sparse(one, listed, 3, seed=9)
    for number, (twin, weight) in enumerate(zip(twins, weights, strict=True)):
        expect_bits(twin.detach(), weight.detach(), f"the resumed parameter of group {number}")


@pytest.mark.clause("SPARSE-048")
@pytest.mark.needs("SparseAdam", *RANGED)
@pytest.mark.parametrize("into", ["torch", "implementation"])
def test_interchange_with_torch(impl, into):
    """SparseAdam and torch.optim.SparseAdam load each other's state and continue equally."""
    kinds = [impl.SparseAdam, torch.optim.SparseAdam]
    if into == "implementation":
        kinds.reverse()
    weight = parameter(5, 2, dtype="float64")
    optimizer = kinds[0]([weight], lr=0.25)
    train_sparse(optimizer, [weight], 3)
    twin = weight.detach().clone().requires_grad_()
    resumed = kinds[1]([twin])
    saved = copy.deepcopy(optimizer.state_dict())
    (entry,) = saved["state"].values()
    resumed.load_state_dict(saved)
    allowed = 1e-12
    for step in (4, 5, 6):
        before = weight.detach().clone()
        for one, table in ((optimizer, weight), (resumed, twin)):
            train_sparse(one, [table], 1, seed=9 + step)
        if into == "torch":
            moved = float((weight.detach() - before).abs().max())
            allowed += moved * error_of_correction(entry["step"], step)
    off = float((twin - weight).detach().abs().max())
    expect(off <= allowed, f"the same parameters to {allowed:.2g}", off)


@pytest.mark.clause("SPARSE-049")
def test_loading_copies(impl):
    """Training after a load changes neither the checkpoint nor the optimizer that it came from."""
    optimizer, weights = trained(impl)
    saved = optimizer.state_dict()
    before = snapshot([saved["state"], live_data(optimizer, weights)["states"]])
    twins = [weight.detach().clone().requires_grad_() for weight in weights]
    resumed = impl.SparseAdam(twins)
    resumed.load_state_dict(saved)
    train_sparse(resumed, twins, 2)
    expect_unchanged(before[0], saved["state"], "the checkpoint after another was trained from it")
    expect_unchanged(before[1], live_data(optimizer, weights)["states"], "the state that it came from")


@pytest.mark.clause("SPARSE-050")
@pytest.mark.parametrize("how", ["wider", "fewer rows", "one row", "flat", "second moment", "number"])
def test_load_of_other_shapes(impl, how):
    """Loading moments of another shape than the parameter raises ValueError and changes nothing."""
    expect_refused(impl, how, ValueError)


@pytest.mark.clause("SPARSE-051")
@pytest.mark.parametrize(
    "how", ["no first moment", "no step", "unknown parameter", "step -1", "step nan", "step half"]
)
def test_load_of_other_state(impl, how):
    """Loading missing state, state of no parameter, or an invalid count raises; nothing changes."""
    expect_refused(impl, how, ValueError)


@pytest.mark.clause("SPARSE-052")
@pytest.mark.parametrize(
    "how", [pytest.param(one.partition(".")[2], marks=pytest.mark.needs(one)) for one in RANGED]
)
def test_load_of_options_out_of_range(impl, how):
    """Loading options that the constructor rejects raises ValueError; nothing changes."""
    expect_refused(impl, how, ValueError)


@pytest.mark.clause("SPARSE-052")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({name: value}, marks=pytest.mark.needs(f"SparseAdam.{name}"))
        for name, value in {"lr": -5.0, "eps": -1.0, "betas": [2.0, 0.5]}.items()
    ],
)
def test_load_of_options_out_of_range_in_a_second_group(impl, how):
    """Options of every group are checked, not only the first."""
    weights = [parameter(5, 2, seed=seed) for seed in range(2)]
    optimizer = impl.SparseAdam([{"params": [weight]} for weight in weights], lr=0.25)
    train_sparse(optimizer, weights, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.5
    saved["param_groups"][1].update(how)
    before = snapshot(live_data(optimizer, weights))
    expect_raises(lambda: optimizer.load_state_dict(saved), ValueError, expected=f"ValueError for {how}")
    expect_unchanged(before, live_data(optimizer, weights), "the optimizer after a failed load")


@pytest.mark.clause("SPARSE-053")
@pytest.mark.parametrize("how", ["more groups", "fewer parameters"])
def test_load_of_other_groups(impl, how):
    """Loading another number of groups or parameters raises ValueError and changes nothing."""
    expect_refused(impl, how, ValueError)


@pytest.mark.clause("SPARSE-054")
@pytest.mark.parametrize("how", ["state", "param_groups"])
def test_load_of_no_checkpoint(impl, how):
    """Loading a checkpoint that lacks an entry raises and changes nothing."""
    expect_refused(impl, how, Exception)


@pytest.mark.clause("SPARSE-055")
def test_load_of_a_fresh_state(impl):
    """Loading a checkpoint from before the first step resets the optimizer."""
    optimizer, weights = trained(impl)
    fresh = impl.SparseAdam([weight.detach().clone().requires_grad_() for weight in weights], lr=0.5)
    optimizer.load_state_dict(copy.deepcopy(fresh.state_dict()))
    counts = [float(optimizer.state.get(weight, {}).get("step", 0)) for weight in weights]
    expect_equal(counts, [0.0, 0.0], "the counts of steps")
    twins = [weight.detach().clone().requires_grad_() for weight in weights]
    train_sparse(optimizer, weights, 2)
    train_sparse(impl.SparseAdam(twins, lr=0.5), twins, 2)
    for twin, weight in zip(twins, weights, strict=True):
        expect_bits(weight.detach(), twin.detach(), "a parameter")


@pytest.mark.clause("SPARSE-055")
def test_load_of_a_half_trained_state(impl):
    """State of some of the parameters loads; the others start afresh."""
    optimizer, weights = trained(impl)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][1]
    optimizer.load_state_dict(saved)
    train_sparse(optimizer, weights, 1)
    counts = [float(optimizer.state[weight]["step"]) for weight in weights]
    expect_equal(counts, [3.0, 1.0], "the counts of steps")


@pytest.mark.clause("SPARSE-056")
@pytest.mark.parametrize(
    "missing",
    [pytest.param(one, marks=pytest.mark.needs(f"SparseAdam.{one}")) for one in ("maximize", "eps", "lr")],
)
def test_load_without_an_option(impl, missing):
    """Observe what happens to an option that the checkpoint does not contain."""
    optimizer, weights = trained(impl)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0][missing]

    def load() -> str:
        optimizer.load_state_dict(saved)
        train_sparse(optimizer, weights, 1)
        return repr(optimizer.param_groups[0].get(missing))

    return outcome(load)


@pytest.mark.clause("SPARSE-057")
@pytest.mark.parametrize("into", ["bfloat16", "float64"])
def test_load_of_another_dtype(impl, into):
    """Observe the dtype of moments after moments of another dtype were loaded."""
    optimizer, _ = trained(impl, count=1)
    twin = parameter(5, 2, dtype=into)
    resumed = impl.SparseAdam([twin])

    def load() -> str:
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        train_sparse(resumed, [twin], 1)
        return str(resumed.state[twin]["exp_avg"].dtype)

    return outcome(load)


@pytest.mark.clause("SPARSE-058")
def test_aliasing(impl):
    """Observe whether an earlier state_dict changes with training."""
    optimizer, weights = trained(impl)
    saved = optimizer.state_dict()
    state, *_ = saved["state"].values()
    before = snapshot(state)
    train_sparse(optimizer, weights, 2)
    return [name for name in ("step", "exp_avg") if repr(state[name]) != repr(before[name])]


@pytest.mark.clause("SPARSE-059")
def test_saved_groups_are_copies(impl):
    """Changing the learning rate in a state_dict does not affect the optimizer, nor the reverse."""
    optimizer, _ = trained(impl)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = 0.75
    expect_equal(optimizer.param_groups[0]["lr"], 0.25, "the optimizer's learning rate")
    optimizer.param_groups[0]["lr"] = 0.5
    expect_equal(saved["param_groups"][0]["lr"], 0.75, "the saved learning rate")
