"""Optimizers that accumulate gradients over windows of steps."""

import math
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import (
    ACCUMULATING,
    expect_near,
    fixed_table,
    gradient_of_step,
    make_accumulating,
    train_window,
)
from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    expect_unchanged,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.device import arange, full, ones, tensor, zeros


def plain(kind: str) -> Any:
    """Return torch's optimizer with the same formula."""
    return getattr(torch.optim, kind.removeprefix("Accumulate"))


@pytest.mark.clause("ACC-001")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("ignored", [1, 4])
def test_without_accumulating(impl, kind, ignored):
    """By default, and with use_accumulate=False for any accumulate_step, each step updates the parameters."""
    mine, other = fixed_table(), fixed_table()
    options = {} if ignored == 1 else {"use_accumulate": False, "accumulate_step": ignored}
    optimizer, torchs = getattr(impl, kind)([mine], lr=0.125, **options), plain(kind)([other], lr=0.125)
    train_window(optimizer, mine, range(4))
    train_window(torchs, other, range(4))
    expect_near(mine, other, "the parameter")


@pytest.mark.clause("ACC-002")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_accumulate", 1),
        ("use_accumulate", "yes"),
        ("use_accumulate", None),
        ("accumulate_step", 0),
        ("accumulate_step", -2),
        ("accumulate_step", 2.0),
        ("accumulate_step", "2"),
        ("accumulate_step", None),
        ("lr", -0.5),
    ],
)
def test_bad_arguments(impl, kind, name, value):
    """An argument of another type or out of range raises an error that names the argument."""
    options = {"lr": 0.1, "use_accumulate": True, name: value}
    expect_raises(
        lambda: getattr(impl, kind)([fixed_table()], **options),
        TypeError,
        ValueError,
        mentions=[] if name == "lr" else [name],  # torch's own error says "learning rate"
        expected=f"an error that names {name}",
    )


@pytest.mark.clause("ACC-003")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_one_update_a_window(impl, kind, layout):
    """Only the last step of a window changes anything: one update with the sum of the gradients."""
    mine, other = fixed_table(), fixed_table()
    optimizer = make_accumulating(impl, kind, [mine])
    once = getattr(impl, kind)([other], lr=0.125)
    for window in range(2):
        before = mine.detach().clone()
        train_window(optimizer, mine, [3 * window, 3 * window + 1], layout)
        expect_bits(mine.detach(), before, "the parameter within a window")
        train_window(optimizer, mine, [3 * window + 2], layout)
        grads = [gradient_of_step(3 * window + step, layout) for step in range(3)]
        other.grad = grads[0] + grads[1] + grads[2]
        once.step()
        expect_near(mine, other, f"the parameter after window {window}")


@pytest.mark.clause("ACC-003")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3, 4), (0, 4)], ids=str)
def test_shapes(impl, kind, shape):
    """Numbers, vectors and tensors without rows have windows; other shapes than tables may raise an error."""
    start = arange(float(math.prod(shape))).reshape(shape) - 2.5
    mine, other = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    try:
        optimizer = make_accumulating(impl, kind, [mine], 2)
    except ValueError:
        expect(len(shape) != 2, "an optimizer of a table without rows", "an error")
        return
    once = getattr(impl, kind)([other], lr=0.125)
    for window in range(2):
        before = mine.detach().clone()
        mine.grad = start * 0.5 + window
        optimizer.step()
        expect_bits(mine.detach(), before, "the parameter within a window")
        mine.grad = start * 0.25 - 1.0
        optimizer.step()
        other.grad = start * 0.75 + (window - 1.0)
        once.step()
        expect(mine.shape == shape, f"shape {shape}", tuple(mine.shape))
        if mine.numel():
            expect_near(mine, other, f"the parameter after window {window}")


@pytest.mark.clause("ACC-003")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_decay_once_a_window(impl, kind):
    """Weight decay is applied once per window, in its update."""
    mine, other = fixed_table(), fixed_table()
    optimizer = make_accumulating(impl, kind, [mine], weight_decay=0.25)
    once = getattr(impl, kind)([other], lr=0.125, weight_decay=0.25)
    for window in range(2):
        before = mine.detach().clone()
        train_window(optimizer, mine, [3 * window, 3 * window + 1])
        expect_bits(mine.detach(), before, "the parameter within a window")
        train_window(optimizer, mine, [3 * window + 2])
        other.grad = sum(gradient_of_step(3 * window + step) for step in range(3))
        once.step()
        expect_near(mine, other, f"the parameter after window {window}")


@pytest.mark.clause("ACC-003")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("at", [0, 1, 2])
def test_nan_is_not_lost(impl, kind, at):
    """A NaN gradient in any step of a window affects its update."""
    mine = fixed_table()
    optimizer = make_accumulating(impl, kind, [mine])
    for step in range(3):
        mine.grad = gradient_of_step(step)
        if step == at:
            mine.grad[2] = float("nan")
        optimizer.step()
    expect(not mine.detach()[2].isfinite().any(), "the row with NaN in its gradient not finite", mine[2])


@pytest.mark.clause("ACC-004")
@pytest.mark.parametrize("window", [1, 2, 5])
def test_sum_not_mean(impl, window):
    """The update uses the sum of the gradients in the window, not their mean."""
    mine = fixed_table()
    before = mine.detach().clone()
    optimizer = make_accumulating(impl, "AccumulateSGD", [mine], window, lr=1.0)
    for _ in range(window):
        mine.grad = full((6, 4), 0.25)
        optimizer.step()
    expect_near(before - mine.detach(), torch.full((6, 4), 0.25 * window), "what was subtracted")


@pytest.mark.clause("ACC-005")
def test_counts_once(impl):
    """A window is one step of Adam: its bias correction counts windows."""
    mine, other = fixed_table(), fixed_table()
    optimizer, torchs = (
        make_accumulating(impl, "AccumulateAdam", [mine], 4),
        torch.optim.Adam([other], lr=0.125),
    )
    for _ in range(3):
        for _ in range(4):
            mine.grad = full((6, 4), 0.25)
            optimizer.step()
        other.grad = full((6, 4), 1.0)
        torchs.step()
    expect_near(mine, other, "the parameter after three windows")


@pytest.mark.clause("ACC-006")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_windows_of_their_own(impl, kind):
    """Each parameter has its own window; a step without its gradient does not change the window."""
    one, two, alone = fixed_table(), fixed_table(), fixed_table()
    optimizer = make_accumulating(impl, kind, [one, two], 2)
    single = make_accumulating(impl, kind, [alone], 2)
    train_window(single, alone, range(4))
    for step in range(4):  # the two parameters have gradients in alternate steps
        for param, other in ((one, two), (two, one)):
            param.grad, other.grad = gradient_of_step(step), None
            optimizer.step()
    expect_near(one, alone, "one parameter")
    expect_near(two, alone, "the other parameter")


@pytest.mark.clause("ACC-006")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_gradients_now_and_then(impl, kind):
    """A parameter with a gradient in every second step needs twice as many steps for a window."""
    often, rarely, alone = fixed_table(), fixed_table(), fixed_table()
    optimizer, single = make_accumulating(impl, kind, [often, rarely]), make_accumulating(impl, kind, [alone])
    for step in range(12):
        often.grad = gradient_of_step(step)
        rarely.grad = gradient_of_step(step) if step % 2 else None
        optimizer.step()
    train_window(single, alone, range(1, 12, 2))
    expect_near(rarely, alone, "the parameter with few gradients")


@pytest.mark.clause("ACC-003")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_options_of_a_group(impl, kind):
    """The options of a group select whether and for how many steps gradients are accumulated."""
    tables, others = [fixed_table() for _ in range(3)], [fixed_table() for _ in range(3)]
    options = [
        {"use_accumulate": True, "accumulate_step": 2},
        {"use_accumulate": True, "accumulate_step": 3},
        {"use_accumulate": False, "accumulate_step": 3},
    ]
    groups = [{"params": [table], **more} for table, more in zip(tables, options, strict=True)]
    optimizer = getattr(impl, kind)(groups, lr=0.125)
    for step in range(6):
        for table in tables:
            table.grad = gradient_of_step(step)
        optimizer.step()
    for index, more in enumerate(options):
        train_window(getattr(impl, kind)([others[index]], lr=0.125, **more), others[index], range(6))
        expect_near(tables[index], others[index], f"the parameter of the group with {more}")


@pytest.mark.clause("ACC-003")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_options_of_a_group_are_loaded(impl, kind):
    """A load restores for how many steps a group accumulates gradients."""
    mine, other = fixed_table(), fixed_table()
    optimizer, loaded = make_accumulating(impl, kind, [mine], 2), make_accumulating(impl, kind, [other], 5)
    train_window(optimizer, mine, range(3))
    with torch.no_grad():
        other.copy_(mine)
    loaded.load_state_dict(snapshot(optimizer.state_dict()))
    train_window(optimizer, mine, range(3, 8))
    train_window(loaded, other, range(3, 8))
    expect_near(other, mine, "the parameter after the load")


@pytest.mark.clause("ACC-003")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_accumulation_begins_later(impl, kind):
    """The first window after steps without one continues from their state."""
    mine, other = fixed_table(), fixed_table()
    optimizer, torchs = getattr(impl, kind)([mine], lr=0.125), plain(kind)([other], lr=0.125)
    train_window(optimizer, mine, range(3))
    train_window(torchs, other, range(3))
    for group in optimizer.param_groups:
        group.update(use_accumulate=True, accumulate_step=2)
    train_window(optimizer, mine, range(3, 5))
    other.grad = gradient_of_step(3) + gradient_of_step(4)
    torchs.step()
    expect_near(mine, other, "the parameter after the window")


@pytest.mark.clause("ACC-003")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_between_steps(impl, kind, to_none):
    """zero_grad, which every training loop calls between steps, does not change the window."""
    mine, other = fixed_table(), fixed_table()
    optimizer, plainly = make_accumulating(impl, kind, [mine]), make_accumulating(impl, kind, [other])
    for step in range(6):
        mine.grad = gradient_of_step(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    train_window(plainly, other, range(6))
    expect_near(mine, other, "the parameter")


@pytest.mark.clause("ACC-003")
@pytest.mark.parametrize("kind", ["AccumulateAdagrad", "AccumulateAdam"])
def test_rows_of_other_windows(impl, kind):
    """A window of sparse gradients updates only the rows that it lists, not those of earlier windows."""
    mine = fixed_table()
    optimizer = make_accumulating(impl, kind, [mine], 2)
    for rows in ([0, 1], [1, 2], [3, 4], [4, 3]):
        before = mine.detach().clone()
        mine.grad = torch.sparse_coo_tensor([rows], gradient_of_step(1)[:2], (6, 4), check_invariants=True)
        optimizer.step()
    expect_bits(mine.detach()[[0, 1, 2, 5]], before[[0, 1, 2, 5]], "rows that are not in the last window")
    moved = [not torch.equal(mine.detach()[row], before[row]) for row in (3, 4)]
    expect(all(moved), "the rows of the last window moved", moved)


@pytest.mark.clause("ACC-011")
@pytest.mark.needs("{kind}.error_if_nonfinite")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("at", [1, 2])
def test_nonfinite(impl, kind, at):
    """With error_if_nonfinite a non-finite gradient never enters a window."""
    mine, other = fixed_table(), fixed_table()
    optimizer = make_accumulating(impl, kind, [mine], error_if_nonfinite=True)
    sound = make_accumulating(impl, kind, [other])
    train_window(optimizer, mine, range(at))
    before = snapshot(optimizer.state_dict()["state"])
    mine.grad = full((6, 4), float("nan"))
    expect_raises(optimizer.step, RuntimeError, ValueError, expected="an error for the gradient")
    expect_unchanged(before, snapshot(optimizer.state_dict()["state"]), "the state")
    train_window(optimizer, mine, range(at, 6))
    train_window(sound, other, range(6))
    expect_bits(mine.detach(), other.detach(), "the parameter")


@pytest.mark.clause("ACC-013")
def test_closure(impl):
    """A closure is evaluated once per step, with gradients enabled, and counts as one step of the window."""
    mine, other = fixed_table(), fixed_table()
    optimizer, without = (make_accumulating(impl, "AccumulateSGD", [param]) for param in (mine, other))
    calls: list[bool] = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        mine.grad = gradient_of_step(len(calls) - 1)
        return tensor(2.0)

    for _ in range(3):
        optimizer.step(closure)
    train_window(without, other, range(3))
    expect_equal(calls, [True] * 3, "calls of the closure")
    expect_bits(mine.detach(), other.detach(), "the parameter")


@pytest.mark.clause("ACC-014")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_rate_of_the_update(impl, kind):
    """An update uses the learning rate of the window's last step, also with a scheduler."""
    mine, other = fixed_table(), fixed_table()
    optimizer, plainly = (
        make_accumulating(impl, kind, [mine], 2, lr=0.5),
        getattr(impl, kind)([other], lr=0.25),
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    mine.grad = full((6, 4), 0.5)
    optimizer.step()
    scheduler.step()
    optimizer.step()
    other.grad = full((6, 4), 1.0)
    plainly.step()
    expect_near(mine, other, "the parameter")


@pytest.mark.plain_only("it takes seconds")
@pytest.mark.clause("ACC-015")
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_half(impl, half):
    """Gradients of parameters in half precision are summed in float32: small gradients are not lost."""
    mine = torch.nn.Parameter(ones(2, 4, dtype=getattr(torch, half)))
    optimizer = make_accumulating(impl, "AccumulateSGD", [mine], 4096, lr=1.0)
    for _ in range(4096):
        mine.grad = full((2, 4), 2.0**-12, dtype=mine.dtype)
        optimizer.step()
    expect_equal(mine.detach().float().tolist(), [[0.0] * 4] * 2, "1 - 4096 / 4096")


@pytest.mark.clause("ACC-016")
def test_step_hooks(impl):
    """Step hooks run at each step, whether or not it ends a window."""
    mine, seen = fixed_table(), []
    optimizer = make_accumulating(impl, "AccumulateSGD", [mine])
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    train_window(optimizer, mine, range(3))
    expect_equal(seen, ["pre", "post"] * 3, "hooks")


@pytest.mark.clause("ACC-017")
def test_empty_gradients(impl):
    """A step with a sparse gradient without rows counts as a step of the window."""
    mine, other = fixed_table(), fixed_table()
    optimizer, full = (make_accumulating(impl, "AccumulateSGD", [param], 2) for param in (mine, other))
    empty = torch.sparse_coo_tensor(zeros(1, 0, dtype=torch.int64), zeros(0, 4), (6, 4))
    mine.grad = gradient_of_step(0, "sparse")
    optimizer.step()
    mine.grad = empty
    optimizer.step()
    other.grad = gradient_of_step(0, "sparse")
    full.step()
    other.grad = gradient_of_step(0, "sparse") * 0
    full.step()
    expect_near(mine, other, "the parameter")


@pytest.mark.clause("ACC-029")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("how", ["set", "loaded"])
def test_a_window_that_is_too_long(impl, kind, how):
    """A window with more gradients than accumulate_step ends: its parameter is updated again."""
    mine = fixed_table()
    optimizer = make_accumulating(impl, kind, [mine], 5)
    train_window(optimizer, mine, range(3))
    saved = snapshot(optimizer.state_dict())
    for group in optimizer.param_groups if how == "set" else saved["param_groups"]:
        group["accumulate_step"] = 2
    if how == "loaded":
        optimizer = make_accumulating(impl, kind, [mine], 2)
        optimizer.load_state_dict(saved)
    before = snapshot(mine)
    train_window(optimizer, mine, range(3, 8))
    expect(not torch.equal(mine, before), "a parameter that is updated within 5 steps", mine)


@pytest.mark.clause("ACC-018")
def test_changed_window(impl):
    """Observe what happens to a window if accumulate_step is set below the number of its steps."""
    mine = fixed_table()
    optimizer = make_accumulating(impl, "AccumulateSGD", [mine], 5)
    train_window(optimizer, mine, range(3))
    before = mine.detach().clone()
    optimizer.param_groups[0]["accumulate_step"] = 2

    def one_more() -> str:
        train_window(optimizer, mine, [3])
        return "not updated" if torch.equal(mine.detach(), before) else "updated with all that waits"

    return outcome(one_more)
