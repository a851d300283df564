"""The fast path on the CPU gives the same bits as the general path, and leaves every unusual step to it."""

import os
from contextlib import suppress
from functools import partial

import pytest
import torch

from keyedopt import fused
from keyedopt.fused.backends import native as kernels
from keyedopt.fused.bulk import native
from keyedopt.fused.dense import cpu_fast_path
from keyedopt.reference.rules.options import Decay

if os.environ.get("KEYEDOPT_REQUIRE_NATIVE") == "1":
    assert native is not None, "fused/bulk has not been built"
    assert kernels.NativeBackend.instruction_sets(), "the native kernels have not been built"
built = pytest.mark.skipif(
    native is None or not kernels.NativeBackend.instruction_sets(), reason="the extensions are not built"
)

MADE = {
    "sgd": partial(fused.SGD, lr=0.1),
    "sgd with momentum": partial(fused.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd, decoupled": partial(fused.SGD, lr=0.1, weight_decay=0.1, decay="decoupled", maximize=True),
    "adagrad": partial(fused.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.1),
    "adam": partial(fused.Adam, lr=torch.tensor(0.1), weight_decay=0.1, betas=(0.8, 0.9)),
    "adam, decoupled": partial(fused.Adam, lr=0.1, weight_decay=0.1, decay="decoupled"),
    "adamw": partial(fused.AdamW, lr=0.1),
    "sparse adam": partial(fused.SparseAdam, lr=0.1, maximize=True),
}
LAYOUTS = [(name, layout) for name in MADE for layout in ("dense", "sparse")]
LAYOUTS.remove(("sparse adam", "dense"))


@pytest.fixture
def answers(monkeypatch):
    """The results of the fast path: for each step, whether it was done."""
    given, try_step = [], cpu_fast_path.try_step

    def told(optimizer):
        why = try_step(optimizer)
        given.append(not why)
        return why

    monkeypatch.setattr(cpu_fast_path, "try_step", told)
    return given


def parameters():
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in ((9, 4), (3, 1), (40, 2, 3), (5,))]


def gradient(param, layout, step):
    torch.manual_seed(step)
    if layout == "dense":
        return torch.randn(param.shape)
    rows = torch.randint(len(param), (1, 20))
    return torch.sparse_coo_tensor(
        rows, torch.randn(20, *param.shape[1:]), param.shape, check_invariants=False
    )


def trained(make, layout, late, steps=3):
    params = parameters()
    optimizer = make([{"params": params[:2]}, {"params": params[2:], "lr": 0.05}])
    versions = []
    for step in range(steps):
        for number, param in enumerate(params):
            waits = late and number == 0 and step == 0
            param.grad = None if waits else gradient(param, layout, step)
        before = [param._version for param in params]
        optimizer.step()
        versions.append([param._version > version for param, version in zip(params, before, strict=True)])
    return [param.detach() for param in params], optimizer.state_dict(), versions


def expected(name, layout, late):
    """Return whether the fast path does each of three steps; it cannot create state or mix step counts."""
    if name == "sgd, decoupled" and layout == "dense":
        return [False] * 3
    if name.startswith("adagrad"):
        return [not late or layout == "dense" or step == 0 for step in range(3)]
    if name in ("sgd", "sgd, decoupled"):
        return [True] * 3
    if not late:
        return [False, True, True]
    return [False, False, layout == "dense" or name.startswith("sgd")]


@built
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_the_bits_are_those_of_the_general_path(name, layout, late, monkeypatch, answers):
    quick = trained(MADE[name], layout, late)
    assert answers == expected(name, layout, late)
    monkeypatch.setattr(cpu_fast_path, "try_step", lambda optimizer: "not here")
    general = trained(MADE[name], layout, late)
    assert all(torch.equal(one, other) for one, other in zip(quick[0], general[0], strict=True))
    assert quick[2] == general[2]
    for key, entry in general[1]["state"].items():
        for state, value in entry.items():
            assert torch.equal(torch.as_tensor(quick[1]["state"][key][state]), torch.as_tensor(value))
            assert type(quick[1]["state"][key][state]) is type(value)


class Own(fused.SGD):
    """A class of a user, which may do anything in its step."""


UNUSUAL = {
    "a parameter in float64": (fused.SGD, {}, torch.float64, {}),
    "rows with a gradient": (fused.SGD, {"rows": "nonzero"}, None, {}),
    "a check": (fused.SGD, {"error_if_nonfinite": True}, None, {}),
    "eps of 0": (fused.Adagrad, {"eps": 0.0}, None, {}),
    "another formula": (fused.Adam, {"eps_placement": "before_bias_correction"}, None, {}),
    "counts of rows": (fused.Adam, {"bias_correction": "per_row"}, None, {}),
    "another class": (Own, {}, None, {}),
    "another algorithm": (fused.LAMB, {}, None, {}),
    "a member": (fused.SGD, {"weight_decay": 0.1}, None, {"decay": Decay.DECOUPLED}),
}


@built
@pytest.mark.parametrize("name", list(UNUSUAL))
def test_an_unusual_step_takes_the_general_path(name, answers, monkeypatch):
    make, options, dtype, changed = UNUSUAL[name]
    results = []
    for way in ("asked", "general"):
        if way == "general":
            monkeypatch.setattr(cpu_fast_path, "try_step", lambda optimizer: "not here")
        param = torch.nn.Parameter(torch.ones(4, 3, dtype=dtype))
        optimizer = make([param], lr=0.5, **options)
        optimizer.param_groups[0].update(changed)
        for _ in range(2):
            param.grad = torch.ones(4, 3, dtype=dtype)
            optimizer.step()
        results.append(param.detach())
    assert answers == [False, False]
    assert torch.equal(*results)
    assert not torch.equal(results[0], torch.ones(4, 3, dtype=results[0].dtype))


@built
@pytest.mark.parametrize("make", [fused.SGD, fused.Adagrad, fused.SparseAdam])
def test_a_bad_row_in_the_last_group_changes_nothing(make, answers):
    params = [torch.nn.Parameter(torch.ones(5, 2)) for _ in range(2)]
    optimizer = make([{"params": [param]} for param in params], lr=0.5)
    for step in range(2):
        rows = [[1, 1], [1, 5 if step else 4]]
        for param, listed in zip(params, rows, strict=True):
            param.grad = torch.sparse_coo_tensor(
                torch.tensor([listed]), torch.ones(2, 2), (5, 2), check_invariants=False
            )
        before = [param.detach().clone() for param in params]
        with suppress(ValueError):
            optimizer.step()
            assert not step
    assert answers[-1] is False
    assert all(torch.equal(one, param) for one, param in zip(before, params, strict=True))
    assert {float(entry.get("step", 1)) for entry in optimizer.state.values()} <= {1.0}


@built
def test_hooks_and_profilers_see_a_step(answers):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizer, told = fused.SGD([param], lr=0.5), []
    with torch.profiler.profile() as profile:
        optimizer.step()
    assert "Optimizer.step#SGD.step" in {event.name for event in profile.events()}
    optimizer.register_step_pre_hook(lambda *_: told.append("before"))
    optimizer.register_step_post_hook(lambda *_: told.append("after"))
    optimizer.step()
    assert told == ["before", "after"]
    assert answers == [True, True]
    assert torch.equal(param, torch.zeros(3))


@built
def test_a_parameter_that_is_listed_twice_is_updated_twice(answers):
    param = torch.nn.Parameter(torch.ones(3, 1))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = fused.SGD([param, param], lr=0.25)
    for grad in (torch.ones(3, 1), torch.ones(3, 1).to_sparse(1)):
        param.grad = grad
        optimizer.step()
    assert answers == [False, False]
    assert torch.equal(param, torch.zeros(3, 1))
