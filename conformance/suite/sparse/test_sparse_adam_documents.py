"""SparseAdam: sentences of the document about ids, groups and missing gradients."""

import copy
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import expect_bits, expect_equal, expect_unchanged
from keyedopt.conformance.suite.support.device import tensor
from keyedopt.conformance.suite.support.inputs import parameter, train_sparse


def two_groups(impl: Any) -> tuple[Any, list[Any]]:
    """Make an optimizer of three tables in two groups with different options."""
    weights = [parameter(5, 2, seed=index) for index in range(3)]
    groups = [{"params": weights[:1], "lr": 0.5}, {"params": weights[1:], "betas": (0.5, 0.75), "eps": 0.5}]
    return impl.SparseAdam(groups, lr=0.25), weights


@pytest.mark.clause("SPARSE-080")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
@pytest.mark.parametrize("ids", [[7, 3, 5], ["c", "a", "b"], [1, 2, 0]], ids=["numbers", "text", "permuted"])
def test_ids_are_only_ids(impl, ids):
    """State is loaded by the order of the ids in the groups, whatever the ids are."""
    optimizer, weights = two_groups(impl)
    train_sparse(optimizer, weights, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    old = [name for group in saved["param_groups"] for name in group["params"]]
    names = dict(zip(old, ids, strict=True))
    saved["state"] = {names[name]: entry for name, entry in reversed(saved["state"].items())}
    for group in saved["param_groups"]:
        group["params"] = [names[name] for name in group["params"]]
    resumed, _ = two_groups(impl)
    twins = [param for group in resumed.param_groups for param in group["params"]]
    for twin, weight in zip(twins, weights, strict=True):
        twin.data.copy_(weight.detach())
    resumed.load_state_dict(saved)
    for twin, weight in zip(twins, weights, strict=True):
        expect_unchanged(dict(optimizer.state[weight]), dict(resumed.state[twin]), "the state of a table")
    for one, tables in ((optimizer, weights), (resumed, twins)):
        train_sparse(one, tables, 2, seed=5)
    for twin, weight in zip(twins, weights, strict=True):
        expect_bits(twin.detach(), weight.detach(), "a resumed table")


@pytest.mark.clause("SPARSE-081")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
def test_saved_groups_have_every_option(impl):
    """Each saved group has each option, with the group's own value or the default."""
    optimizer, _ = two_groups(impl)
    first, second = optimizer.state_dict()["param_groups"]
    defaults = {"lr": 0.25, "betas": (0.9, 0.999), "eps": 1e-8, "maximize": False}
    defaults = {name: value for name, value in defaults.items() if not impl.lacks(f"SparseAdam.{name}")}
    for group, own in ((first, {"lr": 0.5}), (second, {"betas": (0.5, 0.75), "eps": 0.5})):
        expected = {**defaults, **own}
        seen = {name: group.get(name, "missing") for name in expected}
        seen["betas"] = tuple(seen["betas"])
        expect_equal(seen, expected, "options of a saved group")
    expect_equal([len(first["params"]), len(second["params"])], [1, 2], "the number of ids in each group")


@pytest.mark.clause("SPARSE-082")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
def test_gradients_after_zero_grad(impl):
    """After zero_grad and a backward pass, a table that was not looked up has no gradient."""
    optimizer, weights = two_groups(impl)
    train_sparse(optimizer, weights, 1)
    optimizer.zero_grad(set_to_none=True)
    torch.nn.functional.embedding(tensor([1, 3]), weights[1], sparse=True).sum().backward()
    expect_equal([weight.grad is None for weight in weights], [True, False, True], "tables without gradient")
