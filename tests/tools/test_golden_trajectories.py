"""The golden trajectories are what their script makes, and its numbers round as torch's do."""

import json
import math
import operator
from fractions import Fraction

import pytest
import torch

from keyedopt.conformance.golden import arithmetic, oracle
from keyedopt.conformance.suite.support.algorithms import ROUNDED_APART
from keyedopt.tools.golden import make_trajectories

STORED = json.loads(make_trajectories.DATA.read_text(encoding="utf-8"))["trajectories"]
FRESH = make_trajectories.drawn()


def test_every_trajectory_is_stored():
    assert list(STORED) == list(FRESH)


@pytest.mark.complete(sample=4)
@pytest.mark.parametrize("name", FRESH)
def test_the_oracle_gives_what_is_stored(name):
    made = oracle.oracle(FRESH[name])
    del made["dtypes"]
    made["bound"] = oracle.bound(made)
    assert json.loads(json.dumps(made)) == {key: STORED[name][key] for key in made}


@pytest.mark.complete(sample=4)
@pytest.mark.parametrize("name", ["SGD-sparse", "RowWiseAdagrad-max-norm"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_budgets_are_those_of_32_orders(name, dtype):
    made = oracle.oracle(FRESH[name])
    assert oracle.budget(made, dtype) == STORED[name]["worst"][dtype]


def test_two_trainings_may_differ_by_four_times_the_worst_error_of_a_step():
    plain = {one["algorithm"]: one["worst"] for name, one in STORED.items() if name.endswith("-plain")}
    steps = {
        algorithm: max(each[step]["weight"] / int(step) for each in worst.values() for step in "123")
        for algorithm, worst in plain.items()
    }
    wanted = {algorithm: math.ceil(40 * worst) / 10 for algorithm, worst in steps.items()}
    assert {name: ulps for name, ulps in wanted.items() if ulps > 4} == ROUNDED_APART


@pytest.mark.parametrize("name", FRESH)
def test_the_formulas_in_double_precision_agree_with_the_exact_ones(name):
    made = oracle.oracle(FRESH[name])
    exact, seen = made["after"]["24"], oracle.run(made, arithmetic.Rounded("float64", 1))[24]
    for tensor, values in exact.items():
        for value, other, power in zip(values, seen[tensor], made["exponent"]["24"][tensor], strict=True):
            assert abs(value - other) <= 1e-12 * (2.0**power if power is not None else 0.0)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mul, operator.truediv])
def test_numbers_round_as_torch_does(dtype, operation):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor([1e-4, 1e-2, 1.0, 300.0])
    wide = torch.randn(64, generator=generator) * sizes[torch.randint(4, (64,), generator=generator)]
    one, other = wide.to(getattr(torch, dtype)), wide.flip(0).to(getattr(torch, dtype))
    kind = arithmetic.kind(dtype)
    seen = [operation(kind(x), kind(y)) for x, y in zip(one.tolist(), other.tolist(), strict=True)]
    torch.testing.assert_close(
        torch.tensor(seen, dtype=torch.float64),
        operation(one, other).double(),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


@pytest.mark.parametrize("sign", [1, -1])
def test_contracted_numbers_round_a_product_and_its_sum_once(sign):
    drawn = torch.rand(3, 64, generator=torch.Generator().manual_seed(0)).add(1)
    differ = 0
    for x, y, z in drawn.t().tolist():
        once, twice = (
            kind(z) + kind(x) * kind(y) if sign == 1 else kind(x) * kind(y) - kind(z)
            for kind in (arithmetic.kind("float32", contracted=True), arithmetic.kind("float32"))
        )
        exact = Fraction(x) * Fraction(y) + sign * Fraction(z)
        half = Fraction(2) ** (math.frexp(exact)[1] - 25)  # of a unit in the last place
        assert abs(Fraction(float(once)) - exact) <= half
        differ += float(once) != float(twice)
    assert differ > 8
