"""Windows whose micro-batches differ in layout and size, also across a checkpoint."""

import pickle
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.accumulate import (
    ACCUMULATING,
    WINDOW_BATCHES,
    WINDOWS,
    expect_near,
    fixed_table,
    gradient_of_step,
    make_accumulating,
    micro_batch,
    train_micro_batches,
    train_sum,
)
from keyedopt.conformance.suite.support.algorithms import need_dtype
from keyedopt.conformance.suite.support.assertions import (
    exactly,
    expect,
    expect_bits,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.embedding import TABLES, collection, fit, jagged, lookups, tables_of
from keyedopt.conformance.suite.support.inputs import INTERPRETED


@pytest.mark.clause("ACC-003", "ACC-017")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("window", WINDOWS, ids="-".join)
def test_unlike_micro_batches(impl: Any, window: tuple[str, ...], kind: str) -> None:
    """Two windows of dense, sparse and empty gradients equal two steps with their sums."""
    mine, other = fixed_table(), fixed_table()
    optimizer = make_accumulating(impl, kind, [mine], len(window))
    plain = getattr(impl, kind)([other], lr=0.125)
    for _ in range(2):
        train_micro_batches(optimizer, mine, window, range(len(window)))
        train_sum(plain, other, window)
        expect_near(mine, other, "the parameter")


@pytest.mark.clause("ACC-003")
@pytest.mark.parametrize("kind", ACCUMULATING)
def test_parameters_with_unlike_windows(impl: Any, kind: str) -> None:
    """Parameters of a group whose windows end in different steps train like each one by itself."""
    together, apart = ([fixed_table(), fixed_table()] for _ in range(2))
    optimizers = [make_accumulating(impl, kind, params, 2) for params in (together, apart[:1], apart[1:])]
    for step in range(5):
        for first, second in (together, apart):
            first.grad = gradient_of_step(step) if step < 4 else None
            second.grad = gradient_of_step(step, "sparse") if step else None
        for optimizer in optimizers:
            optimizer.step()
    for at, (mine, other) in enumerate(zip(together, apart, strict=True)):
        expect_near(mine, other, f"parameter {at}")


#: Options of the optimizers beside lr, with values other than the defaults.
WINDOW_OPTIONS: dict[str, list[dict[str, Any]]] = {
    "AccumulateSGD": [
        {"momentum": 0.5},
        {"momentum": 0.5, "nesterov": True},
        {"momentum": 0.5, "rows": "nonzero"},
        {"momentum": 0.5, "weight_decay": 0.25, "maximize": True},
        {"weight_decay": 0.25, "decay": "decoupled"},
    ],
    "AccumulateAdagrad": [
        {"lr_decay": 0.5, "weight_decay": 0.25, "rows": "nonzero"},
        {"eps": 0.5, "initial_accumulator_value": 0.25, "maximize": True},
    ],
    "AccumulateAdam": [
        {"betas": (0.5, 0.75), "rows": "nonzero"},
        {"betas": (0.5, 0.75), "bias_correction": "per_row", "rows": "nonzero"},
        {"eps": 0.5, "eps_placement": "before_bias_correction", "maximize": True},
    ],
}

#: The same of the optimizers that these extend, and of others.
PLAIN_OPTIONS: dict[str, list[dict[str, Any]]] = {
    **{kind.removeprefix("Accumulate"): listed for kind, listed in WINDOW_OPTIONS.items()},
    "AdamW": [
        *WINDOW_OPTIONS["AccumulateAdam"],
        {"weight_decay": 0.25, "maximize": True},
    ],
    "RowWiseAdagrad": [
        {"lr_decay": 0.5, "weight_decay": 0.25, "rows": "nonzero"},
        {"eps": 0.5, "initial_accumulator_value": 0.25, "maximize": True},
        {"max_norm": 0.5, "weight_decay": 0.25, "decay": "decoupled"},
    ],
}


@pytest.mark.clause("ACC-003")
@pytest.mark.needs("{kind}")
@pytest.mark.parametrize(
    ("kind", "options"), [(kind, one) for kind, listed in WINDOW_OPTIONS.items() for one in listed]
)
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_each_option_with_windows(impl: Any, kind: str, options: dict[str, Any], layout: str) -> None:
    """Windows apply every option of the optimizer as steps with the sums of their gradients do."""
    for option in options:
        if impl.lacks(f"{kind}.{option}") or impl.lacks(f"{kind.removeprefix('Accumulate')}.{option}"):
            getattr(impl, f"{kind}.{option}")  # unsupported
    mine, other = fixed_table(), fixed_table()
    optimizer = make_accumulating(impl, kind, [mine], 2, **options)
    once = getattr(impl, kind)([other], lr=0.125, **options)
    for window in range(3):
        grads = [gradient_of_step(2 * window + step, layout).to_dense() for step in range(2)]
        for grad in grads:
            grad[window] = 0  # a row without a gradient, and one with a gradient in one step only
        grads[1][window + 1] = 0
        if layout == "sparse":
            grads = [grad.to_sparse(1) for grad in grads]
        for grad in grads:
            mine.grad = grad
            optimizer.step()
        other.grad = grads[0] + grads[1]
        once.step()
        expect_near(mine, other, f"the parameter after window {window}")


@pytest.mark.clause("ACC-001")
@pytest.mark.needs("Accumulate{algorithm}", "{algorithm}")
@pytest.mark.parametrize(
    ("algorithm", "options"), [(kind, one) for kind, listed in PLAIN_OPTIONS.items() for one in listed]
)
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_each_option_without_windows(impl: Any, algorithm: str, options: dict[str, Any], layout: str) -> None:
    """Without use_accumulate each option of the optimizer has its effect."""
    kind = f"Accumulate{algorithm}"
    for option in options:
        if impl.lacks(f"{kind}.{option}") or impl.lacks(f"{algorithm}.{option}"):
            getattr(impl, f"{kind}.{option}")  # unsupported
    mine, other = fixed_table(), fixed_table()
    optimizers = [getattr(impl, kind)([mine], lr=0.125, **options)]
    optimizers += [getattr(impl, algorithm)([other], lr=0.125, **options)]
    for step in range(3):
        grad = gradient_of_step(step)
        grad[step] = 0  # a row without a gradient
        for param, optimizer in zip((mine, other), optimizers, strict=True):
            param.grad = grad.to_sparse(1) if layout == "sparse" else grad.clone()
            optimizer.step()
        expect_near(mine, other, f"the parameter after step {step}")


@pytest.mark.clause("ACC-003")
@pytest.mark.plain_only("its gradients have a dtype of their own")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("layout", ["dense", "sparse"])
@pytest.mark.parametrize("at", [0, 1])
def test_windows_of_float64(impl: Any, kind: str, layout: str, at: int) -> None:
    """Gradients of float64 parameters are summed in float64, beside a parameter in float32."""
    need_dtype(impl, kind, "float64")
    mine, other = (torch.nn.Parameter(fixed_table().detach().double()) for _ in range(2))
    params = [fixed_table(), fixed_table()]
    params[at] = mine
    optimizer = make_accumulating(impl, kind, params, 3, lr=1.0)
    once = getattr(impl, kind)([other], lr=1.0)
    for window in range(2):
        grads = [gradient_of_step(3 * window + step, layout).double() / 3 for step in range(3)]
        for step, grad in enumerate(grads):
            mine.grad, params[1 - at].grad = grad, gradient_of_step(step, layout)
            optimizer.step()
        other.grad = grads[0] + grads[1] + grads[2]
        once.step()
    error = float((exactly(mine) - exactly(other)).abs().max())
    expect(error <= 1e-13, "the parameter within 1e-13", f"an error of {error}")


def permuted(window: Any) -> dict[str, Any]:
    """Return the state of a window with its rows in another order."""
    order = torch.arange(len(window["rows"]) - 1, -1, -1)
    return {**window, **{name: window[name][order] for name in ("rows", "gradients")}}


@pytest.mark.clause("ACC-007")
@pytest.mark.parametrize("window", WINDOWS, ids="-".join)
@pytest.mark.parametrize("permute", [False, True])
def test_checkpoints_of_unlike_windows(impl: Any, permute: bool, window: tuple[str, ...]) -> None:
    """A checkpoint at any place in a window is complete, whatever the order of the saved rows."""
    other = fixed_table()
    train_sum(impl.AccumulateAdagrad([other], lr=0.125), other, window)
    for place in range(1, len(window)):
        mine, resumed = fixed_table(), fixed_table()
        first, second = (make_accumulating(impl, "AccumulateAdagrad", [one], 5) for one in (mine, resumed))
        train_micro_batches(first, mine, window, range(place))
        train_micro_batches(second, resumed, window[::-1], range(5 - place))
        saved = pickle.loads(pickle.dumps(first.state_dict()))
        (entry,) = saved["state"].values()
        if permute and not {"rows", "gradients"} <= set(entry.get("window", ())):
            getattr(impl, "AccumulateAdagrad.rows_of_the_window")  # not named: unsupported
        if permute:
            entry["window"] = permuted(entry["window"])
        second.load_state_dict(saved)
        train_micro_batches(second, resumed, window, range(place, 5))
        expect_near(resumed, other, f"a parameter that resumed after {place} micro-batches")


@pytest.mark.clause("ACC-026")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("window", WINDOWS, ids="-".join)
def test_gradients_are_left(impl: Any, window: tuple[str, ...], kind: str) -> None:
    """No step of a window modifies its gradient, or that of an earlier step."""
    mine = torch.nn.Parameter(fixed_table().detach().double())
    optimizer = make_accumulating(impl, kind, [mine], len(window))
    given = []
    for step, layout in enumerate(window):
        mine.grad = micro_batch(step, layout).double() * 4.0 ** (5 * step)
        given.append((mine.grad, mine.grad.clone()))
        optimizer.step()
    for grad, before in given:
        expect_bits(grad, before, "the gradient")


@pytest.mark.clause("ACC-021")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("pooling", ["SUM", "MEAN"])
def test_windows_of_weighted_bags(impl: Any, pooling: str, kind: str) -> None:
    """A window of weighted bags of unlike lengths makes one update with the sum of its gradients."""
    form: Any = {"pooling": pooling, "weighted": True}
    module = collection(impl, kind, {"use_accumulate": True, "accumulate_step": len(WINDOW_BATCHES)}, **form)
    other = collection(impl, kind.removeprefix("Accumulate"), **form)
    batches = [
        jagged(
            bags, {name: [[0.5 + place for place in range(len(bag))] for bag in bags[name]] for name in bags}
        )
        for bags in WINDOW_BATCHES
    ]
    for _ in range(2):
        for step, batch in enumerate(batches):
            fit(module, batch, seed=step)
        sum(lookups(other, batch, step) for step, batch in enumerate(batches)).backward()  # type: ignore[union-attr]
        for name, table in tables_of(other).items():
            expect_near(tables_of(module)[name], table, f"table {name}")


@pytest.mark.clause("ACC-021")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("late", ["t", "u"])
def test_tables_with_unlike_windows(impl: Any, late: str, kind: str) -> None:
    """Tables whose windows end in different backward passes train like those of modules with one table."""
    options = {"use_accumulate": True, "accumulate_step": 2}
    tables = [("t", 6, 4, ("f",)), ("u", 6, 4, ("h",))]
    together = collection(impl, kind, options, tables)
    apart = {table[0]: collection(impl, kind, options, [table]) for table in tables}
    for name, module in apart.items():
        with torch.no_grad():
            tables_of(module)[name].copy_(tables_of(together)[name])
    for step in range(5):
        bags = {feature: [[step, 1], [step]] for feature in ("f", "h")}
        outputs, losses = together(jagged(bags)), []
        for name, _, _, (feature,) in tables:
            if name == late and not step:
                continue
            output = apart[name](jagged({feature: bags[feature]}))[feature]
            grad = gradient_of_step(step)[: len(output)].to(output.dtype)
            output.backward(grad)
            losses.append((outputs[feature] * grad).sum())
        torch.stack(losses).sum().backward()
        for name, module in apart.items():
            expect_near(tables_of(together)[name], tables_of(module)[name], f"table {name}")


@pytest.mark.clause("ACC-021", "ACC-022")
@pytest.mark.needs("EmbeddingBagCollection")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("place", [2] if INTERPRETED else range(1, len(WINDOW_BATCHES)))
def test_embedding_windows(impl: Any, place: int, kind: str) -> None:
    """A module that resumes after any micro-batch, inside a window of its own, trains with the whole sum."""
    options = {"use_accumulate": True, "accumulate_step": len(WINDOW_BATCHES)}
    module, resumed = collection(impl, kind, options), collection(impl, kind, options)
    other = collection(impl, kind.removeprefix("Accumulate"))
    for step in range(place):
        fit(module, jagged(WINDOW_BATCHES[step]), seed=step)
    for step in range(len(WINDOW_BATCHES) - place):
        fit(resumed, jagged(WINDOW_BATCHES[step]), seed=9)
    before = snapshot(module.fused_optimizer.state_dict())
    resumed.fused_optimizer.load_state_dict(pickle.loads(pickle.dumps(before)))
    expect_unchanged(before, module.fused_optimizer.state_dict(), "the state that was saved")
    for _ in range(2):
        for step in range(place, len(WINDOW_BATCHES)):
            fit(module, jagged(WINDOW_BATCHES[step]), seed=step)
            fit(resumed, jagged(WINDOW_BATCHES[step]), seed=step)
        sum(lookups(other, jagged(batch), step) for step, batch in enumerate(WINDOW_BATCHES)).backward()  # type: ignore[union-attr]
        for name, table in tables_of(other).items():
            expect_near(tables_of(module)[name], table, f"table {name}")
            expect_near(tables_of(resumed)[name], table, f"table {name} of the module that resumed")
        for step in range(place):
            fit(module, jagged(WINDOW_BATCHES[step]), seed=step)
            fit(resumed, jagged(WINDOW_BATCHES[step]), seed=step)


@pytest.mark.clause("ACC-021")
@pytest.mark.needs("EmbeddingBagCollection", "{kind}")
@pytest.mark.parametrize(
    ("kind", "options"), [(kind, one) for kind, listed in WINDOW_OPTIONS.items() for one in listed]
)
def test_each_option_of_tables_with_windows(impl: Any, kind: str, options: dict[str, Any]) -> None:
    """Windows of tables apply every option of the optimizer like updates with the sums."""
    for option in options:
        if impl.lacks(f"{kind}.{option}") or impl.lacks(f"{kind.removeprefix('Accumulate')}.{option}"):
            getattr(impl, f"{kind}.{option}")  # unsupported
    accumulating = {"use_accumulate": True, "accumulate_step": 2, **options}
    module = collection(impl, kind, accumulating)
    other = collection(impl, kind.removeprefix("Accumulate"), options)
    batches = [jagged(bags) for bags in WINDOW_BATCHES[:2]]
    for window in range(3):
        for step, batch in enumerate(batches):
            fit(module, batch, seed=2 * window + step)
        sum(lookups(other, batch, 2 * window + step) for step, batch in enumerate(batches)).backward()  # type: ignore[union-attr]
        for name, table in tables_of(other).items():
            expect_near(tables_of(module)[name], table, f"table {name} after window {window}")


@pytest.mark.clause("ACC-021")
@pytest.mark.plain_only("its tables have a dtype of their own")
@pytest.mark.needs("EmbeddingBagCollection", "{kind}")
@pytest.mark.parametrize("kind", ACCUMULATING)
@pytest.mark.parametrize("wide", ["t", "u"])
def test_windows_of_float64_tables(impl: Any, kind: str, wide: str) -> None:
    """Gradients of a table in float64 are summed in float64, beside a table in float32."""
    need_dtype(impl, kind, "float64")
    tables = [
        (name, rows, width, features, "SUM", "float64" if name == wide else "float32")
        for name, rows, width, features in TABLES
    ]
    plain: dict[str, Any] = {"eps": 1e-8} if kind == "AccumulateAdagrad" else {}  # defaults may differ
    accumulating = {"use_accumulate": True, "accumulate_step": 3, **plain}
    module = collection(impl, kind, accumulating, tables)
    other = collection(impl, kind.removeprefix("Accumulate"), plain, tables)
    batches = [jagged(bags) for bags in WINDOW_BATCHES[:3]]
    for window in range(2):
        for step, batch in enumerate(batches):
            fit(module, batch, seed=3 * window + step)
        sum(lookups(other, batch, 3 * window + step) for step, batch in enumerate(batches)).backward()  # type: ignore[union-attr]
    error = float((exactly(tables_of(module)[wide]) - exactly(tables_of(other)[wide])).abs().max())
    expect(error <= 1e-13, f"table {wide} within 1e-13", f"an error of {error}")
