"""Embedding modules: several tables and groups that are clipped together with dense parameters."""

import contextlib
import math
import warnings

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import expect_near
from keyedopt.conformance.suite.support.algorithms import need_dtype
from keyedopt.conformance.suite.support.assertions import (
    exactly,
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_unchanged,
    p_norm,
    same_bits,
    snapshot,
)
from keyedopt.conformance.suite.support.device import full, tensor
from keyedopt.conformance.suite.support.doubles import single_rank
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    ONE_TABLE,
    collection,
    fit,
    jagged,
    tables_and_state,
    tables_of,
    train_rows,
)
from keyedopt.conformance.suite.support.in_backward import apply_in_backward
from keyedopt.conformance.suite.support.inputs import parameters
from keyedopt.conformance.suite.support.joint_clipping import (
    backpropagate,
    clipped_unless_refused,
    dense_with_joint_clipping,
    mixed_tree,
)
from keyedopt.conformance.suite.support.torch_optimizers import torch_factory


@pytest.mark.clause("FUSED-073", "FUSED-081")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer", "apply_optimizer_in_backward")
@pytest.mark.parametrize("own_group", [None, "t", "u"], ids=["one group", "first", "last"])
def test_tables_beside_dense_parameters(impl, own_group):
    """The joint norm of two backward passes through all tables is limited by the step, in any groups."""
    module, other = (collection(impl, "SGD", {"lr": 1.0}) for _ in range(2))
    if own_group:
        for each in (module, other):
            apply_in_backward(impl, torch.optim.SGD, [tables_of(each)[own_group]], {"lr": 1.0})
    params = parameters(1)
    dense = impl.KeyedOptimizerWrapper(params, torch_factory(torch.optim.SGD, lr=1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            whole = impl.GradientClippingOptimizer(
                impl.CombinedOptimizer([module.fused_optimizer, dense]), impl.GradientClipping.NORM, 0.5
            )
        except ValueError:
            return
    if caught:
        return
    before = snapshot(tables_of(module))
    for seed in range(2):
        for each in (module, other):
            fit(each, jagged(BAGS), seed=seed)
    for name, table in tables_of(module).items():
        expect_bits(table.detach(), before[name], f"table {name} before the step")
    params["p0"].grad = (grad := tensor([3.0, 0.0, 4.0])).clone()
    whole.step()
    sums = {name: before[name] - table.detach() for name, table in tables_of(other).items()}
    norm = torch.cat([grad, *(one.flatten() for one in sums.values())]).double().norm()
    for name, table in tables_of(module).items():
        wanted = before[name] - sums[name] * (0.5 / (float(norm) + 1e-6))
        expect_near(table, wanted, f"table {name} after the step")


@pytest.mark.clause("FUSED-072", "FUSED-073")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["Adagrad", "Adam", "RowWiseAdagrad"])
@pytest.mark.parametrize("joint", [False, True], ids=["tables", "joint"])
def test_a_bound_that_is_not_reached(impl, joint, optimizer):
    """Clipping to a large norm changes neither tables nor state, also in a step that reaches one table."""
    module, other = (collection(impl, optimizer) for _ in range(2))
    dense = impl.KeyedOptimizerWrapper(parameters(1), torch_factory(torch.optim.SGD, lr=1.0))
    member = impl.CombinedOptimizer([module.fused_optimizer, dense]) if joint else module.fused_optimizer
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            whole = impl.GradientClippingOptimizer(member, impl.GradientClipping.NORM, 1e9)
        except ValueError:
            return
    for seed, name in enumerate(("", "h", "")):
        for each in (module, other):
            outputs = each(jagged(BAGS))
            chosen = [outputs[name]] if name else outputs.values()
            sum((seed + 1.0) * output.sum() for output in chosen).backward()
        whole.step()
    before = snapshot(tables_and_state(other))
    expect_unchanged(before, tables_and_state(module), "tables and state")


@pytest.mark.clause("CLIP-043", "CLIP-044")
@pytest.mark.plain_only("it has tables and groups of its own")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
@pytest.mark.parametrize("kind", ["NORM", "VALUE", "NONE"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf], ids=["1", "2", "inf"])
@pytest.mark.parametrize("modules", [1, 2])
@pytest.mark.parametrize("dense", [False, True], ids=["tables", "joint"])
def test_tracked_norm_with_tables(impl, kind, norm_type, modules, dense):
    """The tracked norm covers dense parameters and the tables of every module, or the constructor warns."""
    tables = [collection(impl, "SGD", {"lr": 1.0}) for _ in range(modules)]
    params = parameters(1)
    members = [(str(place), module.fused_optimizer) for place, module in enumerate(tables)]
    if dense:
        members.insert(
            1, ("dense", impl.KeyedOptimizerWrapper(params, torch_factory(torch.optim.SGD, lr=1.0)))
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = clipped_unless_refused(
            impl, impl.CombinedOptimizer(members), kind, 0.5, norm_type=norm_type, track_grad_norm=True
        )
    if whole is None or caught:
        return
    for scale, last in ((1.0, False), (8.0, False), (0.25, False), (4.0, True)):
        grads = []
        for place, module in enumerate(tables):
            if last and place == modules - 1 and (dense or modules > 1):
                continue  # a step without gradients of these tables
            output = module(jagged({"f": [[0], [4]], "g": [[], []], "h": [[3], [1]]}))
            (output["f"].sum() * 3.0 * scale - output["h"].sum() * (5.0 + place) * scale).backward()
            grads += [3.0 * scale] * 8 + [(5.0 + place) * scale] * 16
        if dense:
            params["p0"].grad = tensor([7.0 * scale, 0.0, -2.0 * scale])
            grads += [7.0 * scale, 2.0 * scale]
        whole.step()
        wanted = p_norm(grads, norm_type)
        expect(whole.last_total_grad_norm is not None, f"a norm of {wanted}", None)
        # 2³² units of float64 are 16 roundings of float32: norms of members, powers, sums and the root.
        expect_close(float(whole.last_total_grad_norm), wanted, "last_total_grad_norm", ulps=2**32)
        whole.zero_grad(set_to_none=True)


@pytest.mark.clause("CLIP-043", "CLIP-044")
@pytest.mark.plain_only("it has tables and groups of its own")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_tracked_norm_with_spread_tables(impl):
    """The tracked norm covers tables that are spread over a process group, or the constructor warns."""
    with single_rank():
        module = collection(impl, "SGD", {"lr": 1.0})
        group = torch.distributed.group.WORLD
        spread = {table: [group] for table in tables_of(module).values()}
        options = {"track_grad_norm": True, "enable_global_grad_clip": True, "param_to_pgs": spread}
        weight, whole, warned = dense_with_joint_clipping(impl, module.fused_optimizer, "VALUE", **options)
        if whole is None or warned:
            return
        weight.grad = tensor([3.0, 0.0, 0.0])
        (module(jagged({"f": [[0]], "g": [[]], "h": [[]]}))["f"] * 2.0).sum().backward()
        whole.step()
        expect_close(float(whole.last_total_grad_norm), 5.0, "last_total_grad_norm", ulps=2**32)


@pytest.mark.clause("FUSED-073")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("place", ["dense", "t", "u"])
def test_nonfinite_joint_norm(impl, place, bad):
    """With a joint norm that is not finite no row with a finite gradient moves beyond the bound."""
    module = collection(impl, "SGD", {"lr": 1.0}, tables=(("t", 6, 4, ("f",)), ("u", 5, 4, ("h",))))
    dense, whole, warned = dense_with_joint_clipping(impl, module.fused_optimizer)
    if whole is None or warned:
        return
    before, outputs = snapshot(tables_of(module)), module(jagged({"f": [[0], [1]], "h": [[0], [3]]}))
    grads = {"dense": full((3,), 8.0), "t": full((2, 4), 8.0), "u": full((2, 4), -8.0)}
    grads[place].view(-1)[1] = float(bad)
    with contextlib.suppress(RuntimeError, ValueError):  # an error corrupts no row
        ((outputs["f"] * grads["t"]).sum() + (outputs["h"] * grads["u"]).sum()).backward()
        dense.grad = grads["dense"]
        whole.step()
    moved = {name: exactly(before[name]) - exactly(tables_of(module)[name]) for name in ("t", "u")}
    finite = [one[1 if name == place else 0 :].flatten() for name, one in moved.items()]
    size = float(torch.cat(finite).norm())
    # Each of at most 16 elements is below 2, and its update is rounded to float32, by 2⁻²⁴ at most.
    expect(size <= 0.5001, "a norm of at most 0.5 of the change of all other rows", size)


@pytest.mark.clause("FUSED-081")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer", "AccumulateSGD")
def test_backward_passes_after_a_full_window(impl):
    """Gradients of a pass between a full window and the joint step are added to those of the window, once."""
    module, dense, whole, warned = mixed_tree(impl, use_accumulate=True, accumulate_step=2)
    if whole is None or warned:
        return
    table = tables_of(module)["t"]
    before = table.detach().clone()
    for size, other in ((1.0, 0.0), (2.0, 0.0), (4.0, 24.0)):
        backpropagate(module, dense, [4], [[size, 0.0, 0.0, 0.0]], [0.0, other, 0.0])
    whole.step()
    taken = float((before - table.detach())[4, 0])
    # The last pass counts now, or in the next window; the joint norm is limited to 0.5. The difference of two
    # float32 numbers near 1, and the 1e-6 that clipping adds to the norm, err by less than a millionth.
    steps = [0.5 * total / math.hypot(total, 24.0) for total in (7.0, 3.0)]
    expect(min(abs(taken - step) for step in steps) < 1e-6, f"a step by {steps[0]} or {steps[1]}", taken)


@pytest.mark.clause("FUSED-081")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer", "{optimizer}", "{optimizer}.rows")
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "Adam"])
def test_rows_that_count_as_zero_until_the_step(impl, optimizer):
    """With rows='nonzero' a joint step leaves a row whose gradients sum to zero."""
    module = collection(impl, optimizer, {"rows": "nonzero", "weight_decay": 0.125}, tables=ONE_TABLE)
    _, whole, warned = dense_with_joint_clipping(impl, module.fused_optimizer)
    if whole is None or warned:
        return
    before = tables_of(module)["t"].detach().clone()
    train_rows(module, [1, 2], [[1.0, 0.0, 0.0, 2.0], [0.0] * 4])
    whole.step()
    after = tables_of(module)["t"].detach()
    expect_bits(after[2], before[2], "the row whose gradient is zero")
    expect(not torch.equal(after[1], before[1]), "a change of the row with a gradient", after[1])


@pytest.mark.clause("FUSED-081", "FUSED-091")
@pytest.mark.plain_only("it converts the module of a joint norm")
@pytest.mark.needs(
    "EmbeddingBagCollection.converted_tables", "GradientClippingOptimizer", "{optimizer}", "CombinedOptimizer"
)
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "RowWiseAdagrad", "Adam"])
@pytest.mark.parametrize("to", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize("passes", [1, 2], ids=["once", "again after it"])
def test_converted_before_the_step(impl, passes, to, optimizer):
    """A module that is converted before a joint step is updated as one that was converted at first."""
    need_dtype(impl, "EmbeddingBagCollection", to)
    made = [collection(impl, optimizer, {"lr": 0.5}) for _ in range(3)]
    joint = [dense_with_joint_clipping(impl, module.fused_optimizer) for module in made]
    if any(whole is None or warned for _, whole, warned in joint):
        return
    module, early, plain = made
    early.to(getattr(torch, to))
    before = snapshot(tables_of(early))
    for each in made:
        for seed in range(passes):
            fit(each, jagged(BAGS), seed=seed)
            if each is not plain:
                each.to(getattr(torch, to))
    for dense, whole, _ in joint:
        dense.grad = tensor([3.0, 0.0, 4.0])
        whole.step()
    for name in ("t", "u"):
        seen, wanted = tables_of(module)[name].detach(), tables_of(early)[name].detach()
        expect_equal(seen.dtype, getattr(torch, to), f"dtype of table {name}")
        # Rows in the old dtype had gradients of at least float32: that is one unit of half precision at most,
        # and in float64 16 roundings of float32, of numbers below 2.
        error = float((exactly(seen) - exactly(wanted)).abs().max())
        bound = 2e-6 if to == "float64" else 2 * torch.finfo(seen.dtype).eps
        expect(error <= bound, f"table {name} within {bound:.2g}", f"an error of {error}")
        expect(not same_bits(seen, before[name]), f"an update of table {name}", "none")
    states = [each.fused_optimizer.state_dict()["state"] for each in made]
    for name in ("t", "u"):
        for key, value in states[2][f"{name}.weight"].items():
            for state in states[:2] if isinstance(value, torch.Tensor) else ():
                # Gradients and states are in float32 at least, whatever the dtype of the table.
                expect_near(state[f"{name}.weight"][key], value, key)
