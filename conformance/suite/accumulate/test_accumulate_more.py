"""Windows of row-wise Adagrad and AdamW, for parameters and for embedding modules."""

import pickle
from typing import Any

import pytest

from keyedopt.conformance.suite.support.accumulate import (
    MORE_ACCUMULATING,
    WINDOW_BATCHES,
    WINDOWS,
    expect_near,
    fixed_table,
    gradient_of_step,
    make_accumulating,
    train_micro_batches,
    train_sum,
    train_window,
)
from keyedopt.conformance.suite.support.assertions import expect_bits, expect_raises
from keyedopt.conformance.suite.support.embedding import collection, fit, jagged, lookups, tables_of

#: The algorithms of these optimizers, and the optimizers.
KINDS = [(kind.removeprefix("Accumulate"), kind) for kind in MORE_ACCUMULATING]


@pytest.mark.clause("ACC-027")
@pytest.mark.needs("{kind}", "{algorithm}")
@pytest.mark.parametrize(("algorithm", "kind"), KINDS)
@pytest.mark.parametrize("options", [{}, {"use_accumulate": False, "accumulate_step": 4}], ids=["", "off"])
def test_each_step_without_accumulating(impl: Any, algorithm: str, kind: str, options: Any) -> None:
    """By default, and with use_accumulate=False, each step updates as the algorithm does."""
    mine, other = fixed_table(), fixed_table()
    train_window(getattr(impl, kind)([mine], lr=0.125, **options), mine, range(4))
    train_window(getattr(impl, algorithm)([other], lr=0.125), other, range(4))
    expect_near(mine, other, "the parameter")


@pytest.mark.clause("ACC-027")
@pytest.mark.needs("{kind}", "{algorithm}")
@pytest.mark.parametrize(("algorithm", "kind"), KINDS)
@pytest.mark.parametrize("window", WINDOWS, ids="-".join)
@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_a_window_is_one_step_with_its_sum(
    impl: Any, decay: float, window: tuple[str, ...], algorithm: str, kind: str
) -> None:
    """Two windows of dense, sparse and empty gradients equal two steps with their sums, each decayed once."""
    mine, other = fixed_table(), fixed_table()
    optimizer = make_accumulating(impl, kind, [mine], len(window), weight_decay=decay)
    plain = getattr(impl, algorithm)([other], lr=0.125, weight_decay=decay)
    for _ in range(2):
        before = mine.detach().clone()
        train_micro_batches(optimizer, mine, window, range(len(window) - 1))
        expect_bits(mine.detach(), before, "the parameter within a window")
        mine.grad = None
        train_last(optimizer, mine, window)
        train_sum(plain, other, window)
        expect_near(mine, other, "the parameter")


@pytest.mark.clause("ACC-027")
@pytest.mark.needs("{kind}", "{algorithm}", "{algorithm}.{option}")
@pytest.mark.parametrize(
    ("algorithm", "kind", "option", "value"),
    [
        ("RowWiseAdagrad", "AccumulateRowWiseAdagrad", "max_norm", 0.5),
        ("RowWiseAdagrad", "AccumulateRowWiseAdagrad", "initial_accumulator_value", 0.25),
        ("RowWiseAdagrad", "AccumulateRowWiseAdagrad", "lr_decay", 0.5),
        ("RowWiseAdagrad", "AccumulateRowWiseAdagrad", "maximize", True),
        ("RowWiseAdagrad", "AccumulateRowWiseAdagrad", "eps", 0.125),
        ("AdamW", "AccumulateAdamW", "betas", (0.5, 0.75)),
        ("AdamW", "AccumulateAdamW", "eps", 0.125),
        ("AdamW", "AccumulateAdamW", "maximize", True),
    ],
)
def test_options(impl: Any, option: str, value: Any, algorithm: str, kind: str) -> None:
    """Windows of dense gradients follow the algorithm with each of its options."""
    mine, other = fixed_table(), fixed_table()
    window = ("dense", "dense")
    optimizer = make_accumulating(impl, kind, [mine], len(window), **{option: value})
    plain = getattr(impl, algorithm)([other], lr=0.125, **{option: value})
    for _ in range(2):
        train_micro_batches(optimizer, mine, window, range(len(window)))
        train_sum(plain, other, window)
        expect_near(mine, other, "the parameter")


def train_last(optimizer: Any, param: Any, window: tuple[str, ...]) -> None:
    """Take the last step of a window."""
    train_micro_batches(optimizer, param, window, range(len(window) - 1, len(window)))


@pytest.mark.clause("ACC-027")
@pytest.mark.needs("{kind}")
@pytest.mark.parametrize("kind", MORE_ACCUMULATING)
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_a_checkpoint_within_a_window(impl: Any, layout: str, kind: str) -> None:
    """Training resumes bit by bit from a checkpoint at any step of the second window."""
    for place in range(3, 6):
        mine, resumed = fixed_table(), fixed_table()
        first, second = (make_accumulating(impl, kind, [param]) for param in (mine, resumed))
        train_window(first, mine, range(place), layout)
        resumed.data.copy_(mine.detach())
        second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
        for optimizer, param in ((first, mine), (second, resumed)):
            train_window(optimizer, param, range(place, 9), layout)
        expect_bits(resumed.detach(), mine.detach(), f"a parameter that resumed after {place} steps")


@pytest.mark.clause("ACC-027")
@pytest.mark.needs("{kind}")
@pytest.mark.parametrize("kind", MORE_ACCUMULATING)
@pytest.mark.parametrize(("name", "value"), [("use_accumulate", 1), ("accumulate_step", 0), ("eps", -1.0)])
def test_bad_options(impl: Any, name: str, value: Any, kind: str) -> None:
    """An option out of range raises an error that names the option."""
    param = fixed_table()
    param.grad = gradient_of_step(0)
    expect_raises(
        lambda: (
            make_accumulating(impl, kind, [param], **{name: value})
            if name != "accumulate_step"
            else make_accumulating(impl, kind, [param], value)
        ),
        TypeError,
        ValueError,
        mentions=[name],
        expected=f"an error that names {name}",
    )


@pytest.mark.plain_only("the situations of tables are those of ACC-021")
@pytest.mark.clause("ACC-027")
@pytest.mark.needs("EmbeddingBagCollection", "{kind}", "{algorithm}")
@pytest.mark.parametrize(("algorithm", "kind"), KINDS)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_windows_of_tables(impl: Any, place: int, algorithm: str, kind: str) -> None:
    """A module that resumes within a window trains with the sum of the whole window."""
    options = {
        "use_accumulate": True,
        "accumulate_step": len(WINDOW_BATCHES),
        "eps": 1e-8,
        "weight_decay": 0.25,
    }
    module, resumed = collection(impl, kind, options), collection(impl, kind, options)
    other = collection(impl, algorithm, {"eps": 1e-8, "weight_decay": 0.25})
    for step in range(place):
        fit(module, jagged(WINDOW_BATCHES[step]), seed=step)
    resumed.fused_optimizer.load_state_dict(pickle.loads(pickle.dumps(module.fused_optimizer.state_dict())))
    for step in range(place, len(WINDOW_BATCHES)):
        fit(module, jagged(WINDOW_BATCHES[step]), seed=step)
        fit(resumed, jagged(WINDOW_BATCHES[step]), seed=step)
    sum(lookups(other, jagged(batch), step) for step, batch in enumerate(WINDOW_BATCHES)).backward()  # type: ignore[union-attr]
    for name, table in tables_of(other).items():
        expect_near(tables_of(module)[name], table, f"table {name}")
        expect_near(tables_of(resumed)[name], table, f"table {name} of the module that resumed")
