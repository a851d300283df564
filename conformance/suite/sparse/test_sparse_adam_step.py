"""SparseAdam: elements that a step changes, gradients that raise errors, closures, schedulers, scalers."""

import copy
import pickle
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_raises,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.device import ones, tensor, the_device, zeros
from keyedopt.conformance.suite.support.inputs import (
    moments,
    parameter,
    set_grads,
    set_sparse_grad,
    train_sparse,
    wide,
)


def weight_of(dtype: str = "float32", seed: int = 0) -> Any:
    """Make a fixed table of 5 rows."""
    return parameter(5, 2, dtype=dtype, seed=seed)


def sparse(
    rows: Any, listed: Any, shape: Any, dtype: Any = torch.float32, check: bool = True
) -> torch.Tensor:
    """Make a sparse tensor from lists."""
    indices = tensor(rows if isinstance(rows[0], list) else [rows], dtype=torch.int64)
    return torch.sparse_coo_tensor(indices, tensor(listed, dtype=dtype), tuple(shape), check_invariants=check)


def live_data(optimizer: Any, weights: Any) -> dict[str, Any]:
    """Return all live data that a step may change."""
    states = [dict(optimizer.state.get(weight, {})) for weight in weights]
    return {"weights": [weight.detach() for weight in weights], "states": states}


@pytest.mark.clause("SPARSE-004")
def test_other_rows_keep_their_bits(impl, dtype):
    """Rows that the gradient does not list keep their bits, in parameter and moments."""
    weight = weight_of(dtype)
    optimizer = impl.SparseAdam([weight], lr=0.25)
    for rows in ([0, 1, 2, 3, 4], [1, 3, 1], [2]):
        before = snapshot([weight, *moments(optimizer, weight).values()])
        set_sparse_grad(weight, rows, seed=len(rows))
        optimizer.step()
        others = [row for row in range(5) if row not in rows]
        for old, new in zip(before, [weight, *moments(optimizer, weight).values()], strict=False):
            expect_bits(new.detach()[others], old[others], f"rows {others}")
            moved = (new.detach()[rows] != old[rows]).any(dim=1)
            expect(moved.all(), f"rows {rows} changed", new)


@pytest.mark.clause("SPARSE-010")
def test_listed_zero_counts(impl):
    """An element that is listed with value 0 is updated: its moments decay and it moves."""
    weight = weight_of()
    optimizer = impl.SparseAdam([weight], lr=0.25, betas=(0.5, 0.75))
    weight.grad = sparse([1], [[1.0, 1.0]], (5, 2))
    optimizer.step()
    before = snapshot([weight, *moments(optimizer, weight).values()])
    weight.grad = sparse([1], [[0.0, 0.0]], (5, 2))
    optimizer.step()
    for old, now in zip(before, [weight, *moments(optimizer, weight).values()], strict=True):
        expect((now.detach()[1] != old[1]).all(), "row 1 of the parameter and of both moments changed", now)


@pytest.mark.clause("SPARSE-011")
def test_duplicates_are_summed(impl, dtype):
    """A row that is listed several times is updated once, with the sum of its gradients."""
    apart, together = weight_of(dtype), weight_of(dtype)
    kind = getattr(torch, dtype)
    for lr in (0.25, 0.5):
        apart.grad = sparse([3, 1, 3, 3], [[1, 2], [4, 8], [2, 2], [1, 4]], (5, 2), kind)
        together.grad = sparse([1, 3], [[4, 8], [4, 8]], (5, 2), kind).coalesce()
        for weight in (apart, together):
            impl.SparseAdam([weight], lr=lr).step()
        expect_bits(apart.detach(), together.detach(), "the parameter after a step with duplicates")


@pytest.mark.clause("SPARSE-012")
@pytest.mark.parametrize("rows", [5, 0])
@pytest.mark.parametrize("fresh", [True, False])
def test_empty_gradient(impl, rows, fresh):
    """A gradient that lists no element changes no parameter and no moment."""
    weight = parameter(rows, 2)
    optimizer = impl.SparseAdam([weight], lr=0.25)
    if not fresh and rows:
        train_sparse(optimizer, [weight], 2)
    before = snapshot(moments(optimizer, weight))
    old = weight.detach().clone()
    weight.grad = torch.sparse_coo_tensor(
        zeros(1, 0, dtype=torch.int64), zeros(0, 2), (rows, 2), check_invariants=True
    )
    optimizer.step()
    expect_bits(weight.detach(), old, "the parameter")
    for name, moment in moments(optimizer, weight).items():
        expect_bits(moment, before.get(name, torch.zeros_like(moment)), name)


@pytest.mark.clause("SPARSE-013")
def test_empty_gradient_counts(impl):
    """Observe whether a gradient that lists no element counts as a step."""
    weight = weight_of()
    optimizer = impl.SparseAdam([weight])
    train_sparse(optimizer, [weight], 2)
    weight.grad = torch.sparse_coo_tensor(
        zeros(1, 0, dtype=torch.int64), zeros(0, 2), (5, 2), check_invariants=True
    )
    optimizer.step()
    return float(optimizer.state[weight]["step"]) - 2


@pytest.mark.clause("SPARSE-014")
def test_without_gradient(impl):
    """A parameter without a gradient does not change and counts no step, with or without state."""
    weight, other = weight_of(), weight_of(seed=1)
    optimizer = impl.SparseAdam([weight, other], lr=0.25)
    before = snapshot([weight, dict(optimizer.state.get(weight, {}))])
    set_sparse_grad(other, [1])
    optimizer.step()
    now = [weight.detach(), dict(optimizer.state.get(weight, {}))]
    expect_unchanged(before, now, "the parameter without a gradient, and its state,")


@pytest.mark.clause("SPARSE-015")
@pytest.mark.needs("SparseAdam", "SparseAdam.any_shape")
@pytest.mark.parametrize(
    "dense", [[0.0, 5.0, 0.0, 0.0, 9.0], [[0.0, 5.0], [0.0, 0.0], [9.0, 0.0]], [[[0.0, 1.0]], [[2.0, 0.0]]]]
)
def test_single_elements(impl, dense):
    """A gradient may be sparse in single elements, in any number of dimensions; the others keep bits."""
    gradient = tensor(dense)
    weight = torch.nn.Parameter(torch.ones_like(gradient))
    weight.grad = gradient.to_sparse()
    impl.SparseAdam([weight], lr=0.25).step()
    expect_close(weight.detach(), 1 - 0.25 * gradient.sign(), "the parameter after a first step", ulps=64)


@pytest.mark.clause("SPARSE-015")
def test_strides(impl):
    """A parameter that is not contiguous is updated in its own memory."""
    storage = ones(2, 5)
    weight = torch.nn.Parameter(storage.t())
    set_sparse_grad(weight, [1, 3], scale=4.0)
    expected = torch.nn.Parameter(ones(5, 2))
    set_sparse_grad(expected, [1, 3], scale=4.0)
    for one in (weight, expected):
        optimizer = impl.SparseAdam([one], lr=0.25)
        optimizer.step()
    expect_bits(storage.t().contiguous(), expected.detach(), "the storage of a transposed parameter")


@pytest.mark.clause("SPARSE-016")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
@pytest.mark.parametrize("groups", [1, 2])
def test_dense_gradient(impl, groups):
    """A dense gradient raises an error."""
    weight, other = weight_of(), weight_of(seed=1)
    listed: Any = [weight, other] if groups == 1 else [{"params": [weight]}, {"params": [other]}]
    optimizer = impl.SparseAdam(listed, lr=0.25)
    set_sparse_grad(weight, [1])
    set_grads([other])
    expect_raises(
        optimizer.step, RuntimeError, ValueError, TypeError, expected="an error for the dense gradient"
    )


@pytest.mark.clause("SPARSE-085")
def test_a_step_does_not_modify_gradients(impl):
    """After a step each .grad is the same tensor with the same indices and values, large and small ones."""
    weight = weight_of()
    optimizer = impl.SparseAdam([weight], lr=0.25)
    for seed in (1, 2):
        set_sparse_grad(weight, [1, 0, 1], seed=seed)
        given = weight.grad
        given._values().mul_(wide(3)[:, None].to(given))
        before = given.clone()
        optimizer.step()
        expect(weight.grad is given, "the same tensor as gradient", weight.grad)
        expect_bits(given._indices(), before._indices(), "the indices of the gradient after a step")
        expect_bits(given._values(), before._values(), "the values of the gradient after a step")


@pytest.mark.clause("SPARSE-032")
@pytest.mark.needs("SparseAdam", "SparseAdam.groups")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("fresh", [True, False])
def test_refused_step_changes_nothing(impl, groups, fresh):
    """A step that raises for one gradient changes no parameter, moment or count."""
    weight, other = weight_of(), weight_of(seed=1)
    listed: Any = [weight, other] if groups == 1 else [{"params": [weight]}, {"params": [other]}]
    optimizer = impl.SparseAdam(listed, lr=0.25)
    if not fresh:
        train_sparse(optimizer, [weight, other], 2)
    before = snapshot(live_data(optimizer, [weight, other]))
    set_sparse_grad(weight, [1])
    set_grads([other])
    expect_raises(optimizer.step, Exception, expected="an error for the dense gradient")
    expect_unchanged(before, live_data(optimizer, [weight, other]), "the optimizer after a failed step")


@pytest.mark.clause("SPARSE-033")
@pytest.mark.parametrize("row", [3, 7])
@pytest.mark.parametrize("fresh", [True, False])
def test_rows_past_the_end(impl, row, fresh):
    """A gradient for a row past the end of the parameter raises an error and changes nothing."""
    weight = parameter(3, 2)
    optimizer = impl.SparseAdam([weight], lr=0.25)
    if not fresh:
        train_sparse(optimizer, [weight], 2)
    before = snapshot(live_data(optimizer, [weight]))
    weight.grad = sparse([1, row], [[1.0, 1.0], [1.0, 1.0]], (3, 2), check=False)
    expect_raises(optimizer.step, Exception, expected=f"an error for row {row} of 3")
    expect_unchanged(before, live_data(optimizer, [weight]), "the optimizer after a failed step")


@pytest.mark.clause("SPARSE-033")
def test_negative_rows(impl):
    """A gradient for row -1 raises and changes nothing, in particular no memory before the parameter."""
    store = [
        ones(5, 2) for _ in range(3)
    ]  # parameter and moments are inside a larger buffer, so that a defect does no harm
    weight = torch.nn.Parameter(store[0][1:4])
    optimizer = impl.SparseAdam([weight], lr=0.25)
    train_sparse(optimizer, [weight], 1)
    for name, buffer in zip(("exp_avg", "exp_avg_sq"), store[1:], strict=True):
        buffer[1:4] = optimizer.state[weight][name]
        optimizer.state[weight][name] = buffer[1:4]
    before = snapshot(store)
    weight.grad = sparse([-1], [[1.0, 1.0]], (3, 2), check=False)
    seen = "no error"
    try:
        optimizer.step()
    except Exception as error:
        seen = type(error).__name__
    expect_unchanged(before, store, "the memory around parameter and moments")
    expect(seen != "no error", "an error for row -1", seen)


@pytest.mark.clause("SPARSE-034")
@pytest.mark.parametrize("bad", ["nan", "inf", "-inf"])
def test_nonfinite_stays_in_its_row(impl, bad):
    """A non-finite gradient affects only its own row; the others are updated as usual."""
    weight, clean = weight_of(), weight_of()
    optimizers = [impl.SparseAdam([one], lr=0.25) for one in (weight, clean)]
    for gradient in ([float(bad), 1.0], [1.0, 2.0]):
        weight.grad = sparse([1, 3], [gradient, [1.0, 2.0]], (5, 2))
        clean.grad = sparse([1, 3], [[1.0, 1.0], [1.0, 2.0]], (5, 2))
        for optimizer in optimizers:
            optimizer.step()
    rows = [0, 2, 3, 4]
    expect_bits(weight.detach()[rows], clean.detach()[rows], f"rows {rows}")
    for name in ("exp_avg", "exp_avg_sq"):
        seen, wanted = (o.state[one][name][rows] for o, one in zip(optimizers, (weight, clean), strict=True))
        expect_bits(seen, wanted, f"{name} of rows {rows}")


@pytest.mark.clause("SPARSE-035")
@pytest.mark.needs("SparseAdam.error_if_nonfinite")
@pytest.mark.parametrize("bad", ["nan", "inf"])
def test_error_if_nonfinite(impl, bad):
    """With error_if_nonfinite the step raises RuntimeError and changes nothing."""
    weight, other = weight_of(), weight_of(seed=1)
    optimizer = impl.SparseAdam([weight, other], lr=0.25, error_if_nonfinite=True)
    train_sparse(optimizer, [weight, other], 2)
    before = snapshot(live_data(optimizer, [weight, other]))
    set_sparse_grad(weight, [1])
    other.grad = sparse([1, 3], [[float(bad), 1.0], [1.0, 2.0]], (5, 2))
    expect_raises(optimizer.step, RuntimeError, expected="an error for the gradient")
    expect_unchanged(before, live_data(optimizer, [weight, other]), "the optimizer after a failed step")


@pytest.mark.clause("SPARSE-036")
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0])
def test_finite_stays_finite(impl, dtype, size):
    """Finite gradients give finite weights, in every dtype."""
    weight = weight_of(dtype)
    optimizer = impl.SparseAdam([weight], lr=0.001)
    for _ in range(3):
        weight.grad = sparse([1], [[size, -size]], (5, 2), getattr(torch, dtype))
        optimizer.step()
    expect(weight.detach().isfinite().all(), "finite weights", weight)


@pytest.mark.clause("SPARSE-037")
@pytest.mark.needs("SparseAdam", "SparseAdam.closure")
def test_closure(impl):
    """A closure is evaluated once, with gradients enabled, before the update."""
    weight = weight_of()
    alone = weight.detach().clone().requires_grad_()
    calls: list[bool] = []
    rows = tensor([1, 3, 1])

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = torch.nn.functional.embedding(rows, weight, sparse=True).square().sum()
        loss.backward()
        return loss

    optimizer = impl.SparseAdam([weight], lr=0.25)
    optimizer.step(closure)
    expect_equal(calls, [True], "calls of the closure, and whether gradients were enabled")
    torch.nn.functional.embedding(rows, alone, sparse=True).square().sum().backward()
    impl.SparseAdam([alone], lr=0.25).step()
    expect_bits(weight.detach(), alone.detach(), "the parameter after a step with a closure")


@pytest.mark.clause("SPARSE-038")
@pytest.mark.needs("SparseAdam", "SparseAdam.closure")
@pytest.mark.parametrize("closure", [True, False])
def test_returned(impl, closure):
    """Observe what step returns."""
    return repr(impl.SparseAdam([weight_of()]).step((lambda: 3.5) if closure else None))


@pytest.mark.clause("SPARSE-039")
@pytest.mark.needs("SparseAdam", "SparseAdam.closure")
def test_closure_raises(impl):
    """A step raises an error of its closure and changes nothing."""
    weight = weight_of()
    optimizer = impl.SparseAdam([weight], lr=0.25)
    train_sparse(optimizer, [weight], 2)
    before = snapshot(live_data(optimizer, [weight]))

    def closure() -> None:
        raise ZeroDivisionError("from the closure")

    expect_raises(lambda: optimizer.step(closure), ZeroDivisionError, expected="the closure's error")
    expect_unchanged(before, live_data(optimizer, [weight]), "the optimizer")


@pytest.mark.clause("SPARSE-040")
def test_embedding(impl):
    """It trains nn.Embedding(sparse=True): the rows that were looked up, and only these rows."""
    embedding = torch.nn.Embedding(5, 2, sparse=True, device=the_device())
    optimizer = impl.SparseAdam([embedding.weight], lr=0.25)
    before = embedding.weight.detach().clone()
    embedding(tensor([1, 3, 1])).sum().backward()
    optimizer.step()
    expect_close(embedding.weight.detach()[[1, 3]], before[[1, 3]].double() - 0.25, "rows 1 and 3", ulps=64)
    expect_bits(embedding.weight.detach()[[0, 2, 4]], before[[0, 2, 4]], "rows 0, 2, 4")


@pytest.mark.clause("SPARSE-041")
def test_scheduler(impl):
    """The next step uses the learning rate of a scheduler, including 0."""
    weight = weight_of()
    optimizer = impl.SparseAdam([weight], lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [0.5, 0.0, 0.25][step])
    for rate in (0.25, 0.0, 0.125):
        before = weight.detach().clone()
        weight.grad = sparse([1], [[1.0, 1.0]], (5, 2))
        optimizer.step()
        expect_close(
            weight.detach()[1], before[1].double() - rate, f"row 1 with the learning rate {rate}", ulps=64
        )
        if rate != 0.125:
            scheduler.step()


@pytest.mark.clause("SPARSE-042")
def test_grad_scaler(impl):
    """With a GradScaler the update uses the unscaled gradient, and an overflow changes nothing."""
    weight, alone = weight_of(), weight_of()
    optimizer = impl.SparseAdam([weight], lr=0.25)
    scaler = torch.amp.GradScaler(the_device().type, init_scale=8.0)
    rows = tensor([1, 3])
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        loss = torch.nn.functional.embedding(rows, weight, sparse=True).square().sum() * factor
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.nn.functional.embedding(rows, alone, sparse=True).square().sum().backward()
    impl.SparseAdam([alone], lr=0.25).step()
    expect_bits(weight.detach(), alone.detach(), "the parameter after a step and an overflow")
    expect_equal(float(optimizer.state[weight]["step"]), 1.0, "the count of steps")


@pytest.mark.clause("SPARSE-043")
@pytest.mark.needs("KeyedOptimizerWrapper")
def test_keyed(impl):
    """A KeyedOptimizerWrapper around it trains equally, and has its state by key."""
    weight, alone = weight_of(), weight_of()
    keyed = impl.KeyedOptimizerWrapper({"t": weight}, lambda params: impl.SparseAdam(params, lr=0.25))
    train_sparse(keyed, [weight], 3)
    train_sparse(impl.SparseAdam([alone], lr=0.25), [alone], 3)
    expect_bits(weight.detach(), alone.detach(), "the parameter")
    expect_equal(
        sorted(keyed.state_dict()["state"]["t"]), ["exp_avg", "exp_avg_sq", "step"], "the state of the key"
    )


@pytest.mark.clause("SPARSE-044")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(impl, how):
    """A copy continues on the same trajectory, and neither the copy nor the original changes the other."""
    weight = weight_of()
    optimizer = impl.SparseAdam([weight], lr=0.25)
    train_sparse(optimizer, [weight], 2)
    before = snapshot(live_data(optimizer, [weight]))
    pair = (weight, optimizer)
    twin, copied = copy.deepcopy(pair) if how == "deepcopy" else pickle.loads(pickle.dumps(pair))
    train_sparse(copied, [twin], 3, seed=5)
    expect_unchanged(before, live_data(optimizer, [weight]), "the original after its copy was trained")
    train_sparse(optimizer, [weight], 3, seed=5)
    expect_bits(twin.detach(), weight.detach(), "the copy's parameter")
    expect_unchanged(snapshot(live_data(optimizer, [weight])), live_data(copied, [twin]), "the copy")
