"""Embedding modules: clipping around their fused optimizer."""

import contextlib
import copy
import gc
import warnings

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import expect_near
from keyedopt.conformance.suite.support.assertions import (
    exactly,
    expect,
    expect_close,
    expect_equal,
    snapshot,
)
from keyedopt.conformance.suite.support.device import full, ones, tensor, zeros
from keyedopt.conformance.suite.support.embedding import (
    ONE_TABLE,
    collection,
    jagged,
    tables_of,
    train_rows,
)
from keyedopt.conformance.suite.support.joint_clipping import (
    backpropagate,
    clipped_unless_refused,
    dense_with_joint_clipping,
    mixed_tree,
)


@pytest.mark.clause("FUSED-072")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
@pytest.mark.parametrize("window", [1, 2])
def test_clipping_by_value(impl, window):
    """Clipping by value limits each row's summed gradient in the backward pass, or raises."""
    accumulating = {"use_accumulate": True, "accumulate_step": window} if window > 1 else {}
    chosen = "AccumulateSGD" if accumulating else "SGD"
    module = collection(impl, chosen, {"lr": 1.0, **accumulating}, tables=ONE_TABLE)
    if clipped_unless_refused(impl, module.fused_optimizer, "VALUE", 0.5) is None:
        return
    before = tables_of(module)["t"].detach().clone()
    rows = [[0, [0.25, 0.5, -0.5, 0.0]], [0, [0.125, 0.5, -0.5, 0.0]], [1, [0.25, -8.0, 0.0, 0.5]]]
    for _ in range(window):
        scale = tensor([grad for _, grad in rows]) / window
        (module(jagged({"f": [[row] for row, _ in rows]}))["f"] * scale).sum().backward()
    wanted = zeros(6, 4)
    wanted[0] = tensor([0.375, 0.5, -0.5, 0.0])
    wanted[1] = tensor([0.25, -0.5, 0.0, 0.5])
    expect_close(before - tables_of(module)["t"].detach(), wanted.double(), "what was subtracted", ulps=2**22)


@pytest.mark.clause("FUSED-072")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, "inf"])
def test_clipping_by_norm(impl, norm_type):
    """Clipping by norm uses the norm of the summed gradients of all rows of all tables, or raises."""
    tables = (("t", 6, 4, ("f",)), ("u", 5, 4, ("h",)))
    module = collection(impl, "SGD", {"lr": 1.0}, tables=tables)
    wrapper = clipped_unless_refused(impl, module.fused_optimizer, "NORM", 1.0, norm_type=norm_type)
    if wrapper is None:
        return
    before = snapshot(tables_of(module))
    wrapper.zero_grad()
    outputs = module(jagged({"f": [[0], [0], [1]], "h": [[3], [3], []]}))
    grads = tensor([[1.0, 2.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0], [0.0, 0.0, -4.0, 0.0]])
    ((outputs["f"] * grads).sum() + outputs["h"][:, :1].sum()).backward()
    wrapper.step()
    total = {"t": zeros(6, 4), "u": zeros(5, 4)}
    total["t"][0], total["t"][1], total["u"][3, 0] = tensor([3.0, 4.0, 0, 0]), grads[2], 2.0
    flat = torch.cat([each.reshape(-1) for each in total.values()]).double()
    norm = torch.linalg.vector_norm(flat, float(norm_type))
    for name, table in tables_of(module).items():
        wanted = total[name].double() / (norm + 1e-6)
        expect_close(before[name] - table.detach(), wanted, f"what was subtracted from {name}", ulps=2**22)
    if hasattr(wrapper, "last_total_grad_norm"):
        expect_close(float(wrapper.last_total_grad_norm), float(norm), "last_total_grad_norm", ulps=2**32)


@pytest.mark.clause("FUSED-072")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
@pytest.mark.parametrize("kind", ["VALUE", "NONE", "NORM"])
def test_tracked_norm_of_tables(impl, kind):
    """With track_grad_norm every kind records the norm of the gradients in the backward pass, or raises."""
    module = collection(impl, "SGD", {"lr": 1.0}, tables=ONE_TABLE)
    wrapper = clipped_unless_refused(impl, module.fused_optimizer, kind, 1.0, track_grad_norm=True)
    if wrapper is None:
        return
    for size in (1.0, 4.0):
        train_rows(module, [2, 5], tensor([[3.0, 0.0, 0.0, 0.0], [0.0, 0.0, -4.0, 0.0]]) * size)
        wrapper.step()
        expect_close(float(wrapper.last_total_grad_norm), 5.0 * size, "last_total_grad_norm", ulps=2**32)


@pytest.mark.clause("FUSED-072")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["Adagrad", "RowWiseAdagrad", "Adam", "LarsSGD"])
@pytest.mark.parametrize("kind", ["VALUE", "NORM"])
def test_clipped_gradients_make_the_state(impl, optimizer, kind):
    """The whole update, including state, uses the clipped gradient; or clipping raises."""
    module, other = (collection(impl, optimizer, tables=ONE_TABLE) for _ in range(2))
    wrapper = clipped_unless_refused(impl, module.fused_optimizer, kind, 0.5)
    if wrapper is None:
        return
    for sizes in ([0.25, -8.0, 0.125, 2.0], [0.125, 0.25, -0.125, 0.25]):
        grads = tensor([sizes, sizes[::-1]])
        factor = min(1.0, 0.5 / (float(grads.double().norm()) + 1e-6))
        train_rows(module, [0, 3], grads)
        wrapper.step()
        train_rows(other, [0, 3], grads.clamp(-0.5, 0.5) if kind == "VALUE" else grads * factor)
    expect_near(tables_of(module)["t"], tables_of(other)["t"], "the table")


@pytest.mark.clause("FUSED-072")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_clipping_by_norm_nonfinite(impl):
    """A non-finite norm corrupts no row whose gradient is finite."""
    module = collection(impl, "SGD", {"lr": 1.0}, tables=ONE_TABLE)
    if clipped_unless_refused(impl, module.fused_optimizer, "NORM", 1.0) is None:
        return
    grads = ones(2, 4)
    grads[0, 0] = float("nan")
    (module(jagged({"f": [[0], [1]]}))["f"] * grads).sum().backward()
    expect(torch.isfinite(tables_of(module)["t"].detach()[1:]).all(), "finite rows", tables_of(module)["t"])


@pytest.mark.clause("FUSED-072")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, "inf"])
@pytest.mark.parametrize("bad", [["nan"], ["inf"], ["-inf", "nan"]], ids=" ".join)
@pytest.mark.parametrize("place", ["t", "u"])
def test_nonfinite_norm_of_tables(impl, place, bad, norm_type):
    """A non-finite gradient moves no other row of any table beyond the bound, and later steps are clipped."""
    module = collection(impl, "SGD", {"lr": 1.0}, tables=(("t", 6, 4, ("f",)), ("u", 5, 4, ("h",))))
    if clipped_unless_refused(impl, module.fused_optimizer, "NORM", 1.0, norm_type=norm_type) is None:
        return
    for step in range(2):
        before, outputs = snapshot(tables_of(module)), module(jagged({"f": [[0], [1]], "h": [[0], [3]]}))
        grads = {"t": full((2, 4), 8.0), "u": full((2, 4), -8.0)}
        for number, text in enumerate(bad if step == 0 else ()):
            grads[place][0, number] = float(text)
        with contextlib.suppress(RuntimeError, ValueError):  # an error corrupts no row
            ((outputs["f"] * grads["t"]).sum() + (outputs["h"] * grads["u"]).sum()).backward()
        moved = {name: before[name] - tables_of(module)[name].detach() for name in ("t", "u")}
        finite = [exactly(one)[1 if name == place else 0 :].flatten() for name, one in moved.items()]
        size = float(torch.linalg.vector_norm(torch.cat(finite), float(norm_type)))
        expect(size <= 1.0001, "a norm of at most 1 of the change of all other rows", size)
    wanted = 8 / {1.0: 128.0, 2.0: 32.0, "inf": 8.0}[norm_type]
    seen = float(moved["t"][1, 0]), float(moved["u"][3, 0])
    expect_close(seen[0], wanted, "the step of t after the non-finite one", ulps=2**34)
    expect_close(seen[1], -wanted, "the step of u after the non-finite one", ulps=2**34)


@pytest.mark.clause("FUSED-073")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_clipping_of_a_mixed_tree(impl, kind):
    """With dense and fused optimizers, dense gradients are clipped; unclipped fused ones cause a warning."""
    module, dense, whole, warned = mixed_tree(impl, kind)
    if whole is None:
        return
    table = tables_of(module)["t"]
    before, weight = table.detach().clone(), dense.detach().clone()
    backpropagate(module, dense, [0], [[8.0, 8.0, 8.0, 8.0]], [8.0, 0.0, 0.0])
    whole.step()
    step = (weight - dense.detach()).double()
    taken = (before - table.detach()).double()[0]
    if kind == "NORM" and not warned:  # the joint norm, √(5 · 8²)
        factor = 0.5 / (320**0.5 + 1e-6)
        expect_close(taken, torch.full((4,), 8 * factor).double(), "the step of the table", ulps=2**34)
    else:
        factor = 0.5 / 8
        expect(taken.max() <= 0.5001 or warned, "a clipped table or a warning", f"{taken} without a warning")
    expect_close(step, torch.tensor([8 * factor, 0.0, 0.0]).double(), "the dense step", ulps=2**34)


@pytest.mark.clause("FUSED-073")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, "inf"])
@pytest.mark.parametrize("times", [1, 3])
def test_norm_of_a_mixed_tree(impl, norm_type, times):
    """The norm covers all summed gradients in each step; gradients below the bound are unchanged."""
    options = {"norm_type": norm_type, "track_grad_norm": True, "fused": times == 3}
    module, dense, whole, warned = mixed_tree(impl, **options)
    if whole is None or warned:
        return
    table = tables_of(module)["t"]
    grads = tensor([[1.0, 2.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0], [0.0, 0.0, -4.0, 0.0]]) * times
    for size in (1.0, 2.0**-10, 4.0):
        whole.zero_grad()
        before, weight = table.detach().clone(), dense.detach().clone()
        backpropagate(module, dense, [0, 0, 1], (grads * size).tolist(), [0.0, 12.0 * size, 0.0])
        whole.step()
        total = zeros(6, 4).double()
        total[0], total[1] = (grads[0] + grads[1]) * size, grads[2] * size
        other = tensor([0.0, 12.0 * size, 0.0]).double()
        norm = torch.linalg.vector_norm(torch.cat([total.reshape(-1), other]), float(norm_type))
        factor = min(1.0, 0.5 / (float(norm) + 1e-6))
        expect_close((before - table.detach()).double(), total * factor, "the step of the table", ulps=2**36)
        expect_close((weight - dense.detach()).double(), other * factor, "the dense step", ulps=2**36)
        expect_close(float(whole.last_total_grad_norm), float(norm), "last_total_grad_norm", ulps=2**32)


@pytest.mark.clause("FUSED-073")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_nonfinite_norm_of_a_mixed_tree(impl):
    """A non-finite dense gradient corrupts no row of a table."""
    module, dense, whole, warned = mixed_tree(impl)
    if whole is None or warned:
        return
    backpropagate(module, dense, [0, 1], [[8.0] * 4] * 2, [float("nan"), 0.0, 0.0])
    whole.step()
    table = tables_of(module)["t"].detach()
    expect(torch.isfinite(table).all(), "finite rows", table)
    expect(
        not torch.isfinite(whole.last_total_grad_norm),
        "a norm that is not finite",
        whole.last_total_grad_norm,
    )


@pytest.mark.clause("FUSED-074")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_two_modules_by_norm(impl):
    """NORM limits the joint norm of two modules by the time of the step, or raises, or warns."""
    modules = [collection(impl, "SGD", {"lr": 1.0}, tables=ONE_TABLE) for _ in range(2)]
    whole = impl.CombinedOptimizer(
        [(str(number), each.fused_optimizer) for number, each in enumerate(modules)]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapper = clipped_unless_refused(impl, whole, "NORM", 0.5)
    if wrapper is None or caught:
        return
    before = [tables_of(module)["t"].detach().clone() for module in modules]
    for size, module in zip((3.0, 4.0), modules, strict=True):
        output = module(jagged({"f": [[2]]}))["f"]
        (output * tensor([[size, 0.0, 0.0, 0.0]])).sum().backward()
    wrapper.step()
    for size, module, old in zip((3.0, 4.0), modules, before, strict=True):
        taken = float((old - tables_of(module)["t"].detach())[2, 0])
        expect_close(taken, size * 0.5 / (5.0 + 1e-6), "the step of a table", ulps=2**34)


@pytest.mark.clause("FUSED-081")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_backward_passes_before_a_step(impl):
    """Until a joint step, table gradients accumulate or are dropped like dense gradients."""
    module, dense, whole, warned = mixed_tree(impl)
    if whole is None or warned:
        return
    table = tables_of(module)["t"]
    before, weight = table.detach().clone(), dense.detach().clone()
    backpropagate(module, dense, [0, 1], [[9.0] * 4] * 2, [9.0, 9.0, 9.0])
    whole.zero_grad()
    dense.grad = None
    backpropagate(module, dense, [2], [[1.0, 0.0, 0.0, 0.0]], [2.0, 0.0, 0.0])
    expect_equal(torch.equal(table.detach(), before), True, "a table before the step unchanged")
    backpropagate(module, dense, [2, 3], [[2.0, 0.0, 0.0, 0.0], [0.0, 6.0, 0.0, 0.0]], [0.0, 2.0, 0.0])
    whole.step()
    total = zeros(6, 4).double()
    total[2, 0], total[3, 1] = 3.0, 6.0
    other = tensor([2.0, 2.0, 0.0]).double()
    factor = 0.5 / (53**0.5 + 1e-6)
    expect_close((before - table.detach()).double(), total * factor, "the step of the table", ulps=2**34)
    expect_close((weight - dense.detach()).double(), other * factor, "the dense step", ulps=2**34)
    before = table.detach().clone()
    whole.step()
    expect_equal(torch.equal(table.detach(), before), True, "a table after a second step unchanged")


@pytest.mark.clause("FUSED-081")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer", "AccumulateSGD")
def test_windows_before_a_step(impl):
    """A full window defers its update, the sum of all its micro-batches, to the joint step."""
    module, dense, whole, warned = mixed_tree(impl, use_accumulate=True, accumulate_step=3)
    if whole is None or warned:
        return
    table = tables_of(module)["t"]
    for _ in range(2):
        before, weight = table.detach().clone(), dense.detach().clone()
        dense.grad = None
        for size in (1.0, 2.0, 1.0):
            backpropagate(module, dense, [4], [[size, 0.0, 0.0, 0.0]], [0.0, size - 0.25, 0.0])
            if size == 2.0:  # also a step in the middle of a window
                whole.step()
                expect_equal(torch.equal(table.detach(), before), True, "a table within a window unchanged")
                dense.grad, weight = None, dense.detach().clone()
        whole.step()
        factor = 0.5 / ((4.0**2 + 0.75**2) ** 0.5 + 1e-6)
        taken = float((before - table.detach())[4, 0])
        expect_close(taken, 4.0 * factor, "the step of the table", ulps=2**34)
        expect_close(float((weight - dense.detach())[1]), 0.75 * factor, "the dense step", ulps=2**34)


@pytest.mark.clause("FUSED-082")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_joint_clipping_that_is_gone(impl):
    """After joint clipping is removed, the module trains on, and so does a copy of the module."""
    module, _, whole, warned = mixed_tree(impl)
    if whole is None or warned:
        return
    alone = copy.deepcopy(module)
    del whole
    gc.collect()
    for each in (module, alone, copy.deepcopy(module)):
        before = tables_of(each)["t"].detach().clone()
        each(jagged({"f": [[1]]}))["f"].sum().backward()
        expect_equal(torch.equal(tables_of(each)["t"].detach(), before), False, "a table unchanged")


@pytest.mark.clause("FUSED-082")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_joint_clipping_that_is_gone_before_its_step(impl):
    """A deferred update is applied once or dropped, within the bounds left."""
    module = collection(impl, "SGD", {"lr": 1.0}, tables=ONE_TABLE)
    inner = clipped_unless_refused(impl, module.fused_optimizer, "VALUE", 0.25)
    if inner is None:
        return
    weight, whole, warned = dense_with_joint_clipping(impl, inner)
    if whole is None or warned:
        return
    backpropagate(module, weight, [0], [[8.0, 0.0, 0.0, 0.0]], [0.0, 0.0, 0.0])
    del whole
    gc.collect()
    table = tables_of(module)["t"]
    before, after = table.detach().clone(), []
    for row in (1, 2):
        backpropagate(module, weight, [row], [[0.0, 1.0, 0.0, 0.0]], [0.0, 0.0, 0.0])
        after.append(table.detach().clone())
    expect(abs(float((before - after[0])[0, 0])) <= 0.2501, "a step of at most 0.25", before - after[0])
    expect_equal(torch.equal(after[0][:2], after[1][:2]), True, "rows of earlier steps unchanged")


@pytest.mark.clause("FUSED-082")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_joint_clipping_that_is_copied(impl):
    """A copy of module, dense parameter and clipping clips jointly and leaves the original alone."""
    module, dense, whole, warned = mixed_tree(impl)
    if whole is None or warned:
        return
    other, weight, copied = copy.deepcopy((module, dense, whole))
    table, untouched = tables_of(other)["t"], tables_of(module)["t"].detach().clone()
    before = table.detach().clone()
    backpropagate(other, weight, [0], [[3.0, 0.0, 0.0, 0.0]], [0.0, 4.0, 0.0])
    copied.step()
    taken = float((before - table.detach())[0, 0])
    expect_close(taken, 3.0 * 0.5 / (5.0 + 1e-6), "the step of the copied table", ulps=2**34)
    expect_equal(torch.equal(tables_of(module)["t"].detach(), untouched), True, "the original unchanged")


@pytest.mark.clause("FUSED-075")
@pytest.mark.plain_only("its only parameters are tables")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_nested_clipping(impl):
    """Clipping around clipping applies both bounds; a new clipping wrapper replaces the earlier one."""
    module = collection(impl, "SGD", {"lr": 1.0}, tables=ONE_TABLE)
    inner = clipped_unless_refused(impl, module.fused_optimizer, "VALUE", 0.25)
    if inner is None:
        return

    def taken() -> float:
        before = float(tables_of(module)["t"].detach()[0, 0])
        (module(jagged({"f": [[0]]}))["f"] * 8.0).sum().backward()
        return round(before - float(tables_of(module)["t"].detach()[0, 0]), 4)

    clipped_unless_refused(impl, inner, "VALUE", 0.5)
    expect_equal(taken(), 0.25, "step bounded by both wrappers")
    clipped_unless_refused(impl, module.fused_optimizer, "VALUE", 2.0)
    expect_equal(taken(), 2.0, "step bounded only by the new clipping")


@pytest.mark.clause("FUSED-075")
@pytest.mark.plain_only("it has wrappers of its own")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer", "OptimizerWrapper")
@pytest.mark.parametrize("bounds", [(0.25, 0.5), (0.5, 0.25), (0.5, 1.0, 0.25), (0.25, 1.0, 0.5)])
def test_clipping_around_wrapped_clipping(impl, bounds):
    """All bounds stay in force if there are wrappers between, and if there are three of them."""
    module = collection(impl, "SGD", {"lr": 1.0}, tables=ONE_TABLE)
    optimizer = module.fused_optimizer
    for bound in bounds:
        optimizer = clipped_unless_refused(impl, impl.OptimizerWrapper(optimizer), "VALUE", bound)
        if optimizer is None:
            return
    before = float(tables_of(module)["t"].detach()[0, 0])
    (module(jagged({"f": [[0]]}))["f"] * 8.0).sum().backward()
    optimizer.step()
    taken = round(before - float(tables_of(module)["t"].detach()[0, 0]), 4)
    expect_equal(taken, 0.25, "step bounded by all of them")


@pytest.mark.clause("FUSED-075")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_joint_clipping_around_clipping(impl):
    """Joint clipping around the clipping of a table applies both bounds in each step."""
    module = collection(impl, "SGD", {"lr": 1.0}, tables=ONE_TABLE)
    inner = clipped_unless_refused(impl, module.fused_optimizer, "VALUE", 0.25)
    if inner is None:
        return
    weight, whole, warned = dense_with_joint_clipping(impl, inner)
    if whole is None or warned:
        return
    table = tables_of(module)["t"]
    for _ in range(2):
        before, old = table.detach().clone(), weight.detach().clone()
        weight.grad = None
        backpropagate(module, weight, [0], [[8.0, 0.0, 0.0, 0.0]], [1.0, 0.0, 0.0])
        whole.step()
        taken, step = float((before - table.detach())[0, 0]), float((old - weight.detach())[0])
        within = 0.1 < taken <= 0.2501 and (taken**2 + step**2) ** 0.5 <= 0.5001
        expect(within, "a step of the table of at most 0.25, both steps of at most 0.5", (taken, step))


@pytest.mark.clause("FUSED-075")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_clipping_in_place_of_joint_clipping(impl):
    """Clipping of one table that replaces joint clipping acts in the backward pass."""
    module, _, whole, warned = mixed_tree(impl)
    if whole is None or warned or clipped_unless_refused(impl, module.fused_optimizer, "VALUE", 2.0) is None:
        return
    before = tables_of(module)["t"].detach().clone()
    (module(jagged({"f": [[0]]}))["f"] * 8.0).sum().backward()
    taken = (before - tables_of(module)["t"].detach())[0]
    expect_close(taken.double(), torch.full((4,), 2.0).double(), "the step of the table", ulps=2**32)
    clipped_unless_refused(impl, module.fused_optimizer, "VALUE", 0.125)  # and in the reverse order
    weight, whole, _ = dense_with_joint_clipping(impl, module.fused_optimizer)
    before = tables_of(module)["t"].detach().clone()
    backpropagate(module, weight, [0], [[3.0, 0.0, 0.0, 0.0]], [4.0, 0.0, 0.0])
    whole.step()
    step = float((before - tables_of(module)["t"].detach())[0, 0])
    expect_close(step, 3.0 * 0.5 / (5.0 + 1e-6), "the step of both", ulps=2**34)
