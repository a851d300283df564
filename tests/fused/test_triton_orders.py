"""The budgets of the Triton kernels: the formulas in random orders are those of the rules, and are near."""

import pytest
import torch
from triton_oracle import STEPS, expected, lookup_of, summed, tables_of, units_of
from triton_orders import worst_of_orders

from keyedopt.fused.backends.interface import Step


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("count", [1, 2])
def test_the_orders_of_a_step_are_of_the_same_formula(name: str, count: int) -> None:
    options = STEPS[name]
    tables = tables_of([(4, 5)], options, torch.float32)
    lookups = [lookup_of(0, tables[0].weight, [9, 4], 1)]
    fields = {key: value for key, value in options.items() if key != "counted"}
    step = Step(lr=0.1, count=count, first=count == 1, **fields)
    ((weight, states),) = expected(tables, lookups, step, options, torch.float64)
    rows, grads = summed(lookups, 0)
    row, counter = int(rows[0]), tables[0].row_counter
    old = [one[row] for one in (tables[0].weight, *tables[0].states)]
    right = [one[row] for one in (weight, *states)]
    units = [units_of(*pair) for pair in zip(right, old, strict=True)]
    now = count if counter is None else int(counter[row]) + 1
    worst = worst_of_orders(old, grads[0], now, step, right, units)
    assert len(worst) == 1 + len(states)
    assert 0 < max(worst) < 16
    with pytest.raises(AssertionError, match="another one"):
        worst_of_orders(old, 2 * grads[0], now, step, right, units)
