"""Options per group, in combination, and over many steps."""

import functools
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.algorithms import (
    ALGORITHMS,
    WITH_OTHER,
    expect_same_way,
    fixed_grads,
    make_algorithm,
    need_group_rates,
    need_independent,
    resumed_with,
    set_options,
    sparse_rows,
    trained_copy,
    variant_of,
)
from keyedopt.conformance.suite.support.assertions import (
    exactly,
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_unchanged,
    snapshot,
)
from keyedopt.conformance.suite.support.described import OTHER, documented_state, entries_of, named
from keyedopt.conformance.suite.support.device import as_tensor, tensor, zeros
from keyedopt.conformance.suite.support.inputs import _numbers, parameter, set_grads, train, values
from keyedopt.conformance.suite.support.options import (
    ADAGRADS,
    ADAMS,
    EACH,
    FROM_ZERO,
    SET,
    START,
    TWO,
    WITH_DECAY,
    WITH_START,
    with_required_options,
    with_zeros,
    zero_and_tiny,
)

any_optimizer = pytest.mark.parametrize("algorithm", WITH_OTHER)

#: The algorithms that do not divide or multiply their state by the learning rate.
WITHOUT_RATE = [name for name in ALGORITHMS if name not in ("Ftrl", "LarsSGD")]
#: The documented names of state.
STATE = {"step", "exp_avg", "exp_avg_sq", "momentum_buffer", "sum", "accumulator", "linear"}


def expect_separate(impl: Any, algorithm: str, option: str, way: str) -> None:
    """Expect groups with two values of an option to train like two optimizers."""
    need_independent(impl, algorithm)
    need_group_rates(impl, algorithm)
    kind = getattr(impl, algorithm)
    own = functools.partial(named, impl, algorithm)
    for pair in (TWO[option], TWO[option][::-1]):
        together = [parameter(4, 3, seed=index) for index in range(2)]
        apart = [parameter(4, 3, seed=index) for index in range(2)]
        first, second = (with_required_options(option, value) for value in pair)
        if algorithm == OTHER and impl.lacks(f"{OTHER}.weight_decay"):
            del first["weight_decay"], second["weight_decay"]
        if way == "constructor":
            groups = [{"params": [together[0]], **first}, {"params": [together[1]], **second}]
            one = kind(groups, **{**second, "lr": 0.25})  # what the first group must override
        elif way == "added":
            one = kind([together[0]], **first)
            one.add_param_group({"params": [together[1]], **own(second)})
        else:
            one = kind([{"params": [weight]} for weight in together], **first)
        at_first = (first, first if way == "set" else second)
        others = [kind([weight], **more) for weight, more in zip(apart, at_first, strict=True)]
        for seed in range(3):
            if way == "set" and seed:
                set_options(one.param_groups[1], own(second))
                others[1] = resumed_with(kind, others[1], apart[1], **second)
            with_zeros(together, seed)
            with_zeros(apart, seed)
            one.step()
            for other in others:
                other.step()
        for index in range(2):
            what = f"weight of the group with {option}={pair[index]!r}"
            expect_same_way(together[index], apart[index], parameter(4, 3, seed=index), what, algorithm)


def expect_same_state(impl: Any, algorithm: str, seen: Any, wanted: Any) -> None:
    """Expect the documented entries of two states to be equal; a library may have others, of the weights."""
    expect_equal(sorted(seen), sorted(wanted), "names in the state")
    seen, wanted = (documented_state(impl, algorithm, entries) for entries in (seen, wanted))
    for name in STATE & set(wanted):
        value = wanted[name]
        tensor, exact = as_tensor(seen[name]), as_tensor(value).double()
        if not tensor.is_floating_point():
            tensor = tensor.double()  # a count
        expect_close(tensor, exact, f"{name} of the state", ulps=16)


# --- by group -------------------------------------------------------------------------------------


@pytest.mark.clause("ALGO-083")
@pytest.mark.needs("{algorithm}", "{algorithm}.{option}", "{algorithm}.groups")
@pytest.mark.parametrize(("algorithm", "option"), [pair for pair in EACH if pair[1] != START])
def test_each_option_of_a_group(impl, algorithm, option):
    """Each option of a group applies, whatever its value in other groups and by default."""
    expect_separate(impl, algorithm, option, "constructor")


@pytest.mark.clause("ALGO-096")
@pytest.mark.needs("{algorithm}", "{algorithm}.initial_accumulator_value", "{algorithm}.groups")
@pytest.mark.parametrize("algorithm", WITH_START)
@pytest.mark.parametrize("way", ["constructor", "added"])
def test_sums_start_where_the_group_says(impl, algorithm, way):
    """The sums start at the group's initial_accumulator_value, whatever its value elsewhere."""
    expect_separate(impl, algorithm, START, way)


@pytest.mark.clause("ALGO-082")
@pytest.mark.needs("{algorithm}", "{algorithm}.{option}", "{algorithm}.groups")
@pytest.mark.parametrize(("algorithm", "option"), [pair for pair in EACH if pair[1] != START])
def test_each_option_of_an_added_group(impl, algorithm, option):
    """Each option of an added group applies, whatever its value in other groups and by default."""
    expect_separate(impl, algorithm, option, "added")


@pytest.mark.clause("ALGO-092")
@pytest.mark.needs("{algorithm}", "{algorithm}.{option}", "{algorithm}.groups")
@pytest.mark.parametrize(("algorithm", "option"), SET)
def test_options_set_in_a_group(impl, algorithm, option):
    """An option that is set in a group between two steps applies to the following steps."""
    expect_separate(impl, algorithm, option, "set")


# --- in combination -------------------------------------------------------------------------------


def expect_ascent(impl: Any, algorithm: str, options: dict[str, Any]) -> None:
    """Expect maximize to give the same result as the negated gradient."""
    start, grads = parameter(4, 3), fixed_grads(3)
    up, one = trained_copy(impl, algorithm, start, grads, maximize=True, **options)
    down, other = trained_copy(impl, algorithm, start, [-grad for grad in grads], **options)
    expect_same_way(up, down, start, f"the weight with maximize and {options}", algorithm)
    expect_same_state(impl, algorithm, entries_of(one, up, {}), entries_of(other, down, {}))


@pytest.mark.clause("ALGO-020")
@pytest.mark.needs("{algorithm}.maximize")
@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("SGD", {"weight_decay": 0.125}),
        ("SGD", {"weight_decay": 0.125, "momentum": 0.5, "dampening": 0.25}),
        ("SGD", {"weight_decay": 0.125, "momentum": 0.5, "nesterov": True}),
        ("Adagrad", {"weight_decay": 0.125, "lr_decay": 0.5}),
        ("RowWiseAdagrad", {"weight_decay": 0.125, "lr_decay": 0.5}),
        ("Adam", {"weight_decay": 0.125}),
    ],
)
def test_maximize_with_other_options(impl, algorithm, options):
    """With maximize only the gradient is negated, not weight decay or momentum."""
    expect_ascent(impl, algorithm, options)


@pytest.mark.clause("ALGO-021")
@pytest.mark.needs("{algorithm}.maximize", "{algorithm}.{option}")
@pytest.mark.parametrize(
    ("algorithm", "option", "value"),
    [
        *((name, "decay", kind) for name in WITH_DECAY for kind in ("l2", "decoupled")),
        *((name, "rows", "given") for name in ("Ftrl", "LarsSGD")),
    ],
)
def test_maximize_with_each_decay(impl, algorithm, option, value):
    """With maximize only the gradient is negated; decay still pulls the weights to zero."""
    expect_ascent(impl, algorithm, {"weight_decay": 0.125, option: value})


@pytest.mark.clause("ALGO-021")
@pytest.mark.needs("Ftrl.maximize", "Ftrl.{option}")
@pytest.mark.parametrize("option", ["l1", "l2", "l2_shrinkage", "beta", "lr_power"])
def test_maximize_with_each_option_of_ftrl(impl, option):
    """With maximize only the gradient is negated; penalties still pull the weights to zero."""
    expect_ascent(impl, "Ftrl", {option: TWO[option][1]})


@pytest.mark.clause("ALGO-023")
@pytest.mark.needs("Adam.eps_placement", "Adam.bias_correction")
@pytest.mark.parametrize("placement", TWO["eps_placement"])
def test_eps_placement_with_counts_of_rows(impl, placement):
    """With dense gradients rows count like the parameter, so eps has the same place with bias_correction."""
    start, grads = parameter(4, 3), fixed_grads(3)
    (one, _), (other, _) = (
        trained_copy(impl, "Adam", start, grads, eps=0.5, eps_placement=placement, bias_correction=counts)
        for counts in TWO["bias_correction"]
    )
    expect_close(other.detach(), one.detach().double(), f"the weight with {placement}", ulps=16)


@pytest.mark.clause("ALGO-022")
@pytest.mark.needs("{algorithm}.decay")
@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("SGD", {"nesterov": True}),
        *((name, {}) for name in WITH_DECAY),
        *((name, {"lr_decay": 0.5}) for name in ADAGRADS),
    ],
)
def test_decoupled_decay_leaves_the_state_alone(impl, algorithm, more):
    """Decoupled decay shrinks the weight by lr times weight_decay and does not affect the state."""
    start, grads = parameter(4, 3), fixed_grads(3)
    decay = {"weight_decay": 0.125, "decay": "decoupled"}
    wanted = before = start.detach().double()
    for steps in (1, 2, 3):
        plain, one = trained_copy(impl, algorithm, start, grads[:steps], **more)
        other, two = trained_copy(impl, algorithm, start, grads[:steps], **decay, **more)
        wanted = (1 - 0.1 * 0.125) * wanted + plain.detach().double() - before
        before = plain.detach().double()
        expect_same_state(impl, algorithm, entries_of(two, other), entries_of(one, plain))
        if not algorithm.endswith("LAMB"):  # whose trust ratio scales the decay
            # each step rounds as the first one does
            expect_close(other.detach(), wanted, f"the weight after {steps} steps", ulps=8 * steps)


@pytest.mark.clause("ALGO-112")
@pytest.mark.needs("{algorithm}.{option}")
@pytest.mark.parametrize(("algorithm", "option"), FROM_ZERO)
def test_an_option_of_zero(impl, algorithm, option):
    """An option that is given as 0 acts like a tiny value, or is refused; it is not left out."""
    start, grads, seen = parameter(4, 3), fixed_grads(3), []
    for given in zero_and_tiny(option):
        try:
            seen.append(trained_copy(impl, algorithm, start, grads, **given)[0])
        except ValueError:
            return
    expect_same_way(seen[0], seen[1], start, f"the weight with {option} = 0")


@pytest.mark.clause("ALGO-024")
@pytest.mark.needs("Adam.bias_correction", "Adam.rows")
@pytest.mark.parametrize("shape", [(4,), (4, 4, 2)])
def test_counts_of_rows_of_any_shape(impl, shape):
    """With bias_correction='per_row', parameters of other shapes are corrected row by row like a matrix."""
    start, grads = parameter(*shape), [parameter(*shape, seed=seed).detach() for seed in (1, 2, 3)]
    for row, grad in enumerate(grads):
        grad[row] = 0
    options = {"rows": "nonzero", "bias_correction": "per_row"}
    matrix, rows = start.reshape(4, -1), [grad.reshape(4, -1) for grad in grads]
    wanted, _ = trained_copy(impl, "Adam", matrix, rows, **options)
    seen, _ = trained_copy(impl, "Adam", start, grads, **options)
    expect_same_way(seen.reshape(4, -1), wanted, matrix, "the weight, by rows,")


@pytest.mark.clause("ALGO-048")
@pytest.mark.needs("{algorithm}.bias_correction", "{algorithm}.sparse")
@pytest.mark.parametrize(
    ("algorithm", "shape"),
    [("Adam", (4, 3)), ("Adam", (4, 3, 2)), ("PartialRowWiseAdam", (4, 3)), ("LAMB", (4, 3))],
)
@pytest.mark.parametrize("corrected", ["global", "per_row"])
def test_sparse_gradients_of_strided_weights(impl, algorithm, shape, corrected):
    """With sparse gradients, a weight with permuted strides trains like a contiguous weight."""
    start = parameter(*shape).detach()
    strided = start.permute(*reversed(range(len(shape)))).contiguous().permute(*reversed(range(len(shape))))
    grads = [
        sparse_rows(rows, _numbers((3, *shape[1:]), seed), start)
        for seed, rows in enumerate(([3, 1, 3], [1, 1, 2], [0, 3, 1]))
    ]
    plain, _ = trained_copy(impl, algorithm, start, grads, bias_correction=corrected)
    seen, _ = trained_copy(impl, algorithm, strided, grads, bias_correction=corrected)
    expect_same_way(seen, plain, start, "the strided weight", algorithm)


# --- in the long run ------------------------------------------------------------------------------


def expect_state_at_rate_of_zero(impl: Any, algorithm: str, grads: Any, **options: Any) -> None:
    """Expect a learning rate of 0 to change the state but not the weights."""
    start = parameter(4, 3)
    if "by_itself" in variant_of(impl, algorithm):
        options["weight_decay"] = 0.0  # else it decays at any learning rate
    rates = {0.0: start, 0.1: None}
    states = []
    for lr, wanted in rates.items():
        weight, optimizer = trained_copy(impl, algorithm, start, grads, lr=lr, **options)
        states.append(dict(entries_of(optimizer, weight)))
        if wanted is not None:
            expect_bits(weight.detach(), wanted.detach(), "the weight")
    expect_same_state(impl, algorithm, states[0], states[1])


@pytest.mark.clause("ALGO-093")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", WITHOUT_RATE)
def test_rate_of_zero(impl, algorithm):
    """With a learning rate of 0, weights keep their bits and the state is updated as usual."""
    expect_state_at_rate_of_zero(impl, algorithm, fixed_grads(3))


@pytest.mark.clause("ALGO-093")
@pytest.mark.needs("{algorithm}", "{algorithm}.sparse")
@pytest.mark.parametrize("algorithm", WITHOUT_RATE)
def test_rate_of_zero_with_sparse_gradients(impl, algorithm):
    """A learning rate of 0 has the same effect with sparse gradients."""
    plain = {"momentum": 0.0} if algorithm == "SGD" else {}  # torch's momentum moves every row
    grads = [sparse_rows([3, 1, 3, 0], grad, parameter(4, 3)) for grad in fixed_grads(3)]
    expect_state_at_rate_of_zero(impl, algorithm, grads, **plain)


@pytest.mark.clause("ALGO-110")
@pytest.mark.needs("Ftrl")
@pytest.mark.parametrize("way", ["constructor", "set", "tensor"])
def test_rate_of_zero_of_ftrl(impl, way):
    """A learning rate of 0, also in the last group, leaves all weights finite, or raises before a change."""
    weights = [parameter(4, 3, seed=index) for index in range(2)]
    set_grads(weights)
    last = {"constructor": 0.0, "set": 0.1, "tensor": torch.tensor(0.1)}[way]  # on the CPU, on every device
    given: Any = [{"params": weights[:1]}, {"params": weights[1:], "lr": last}], 0.1
    params, lr = (weights, last) if impl.lacks("Ftrl.groups") else given
    try:
        optimizer = impl.Ftrl(params, lr=lr)
    except ValueError:
        return
    if way != "constructor":
        optimizer.step()
        rate = optimizer.param_groups[-1]["lr"]
        optimizer.param_groups[-1]["lr"] = rate.zero_() if isinstance(rate, torch.Tensor) else 0.0
    before = snapshot([values(weights), [entries_of(optimizer, weight, {}) for weight in weights]])
    try:
        optimizer.step()
    except (ValueError, RuntimeError):
        after = [values(weights), [entries_of(optimizer, weight, {}) for weight in weights]]
        expect_unchanged(before, after, "weights and state after the error")
    for weight in weights:
        expect(weight.detach().isfinite().all(), "finite weights, or an error", weight)


def set_count(impl: Any, algorithm: str, saved: Any, count: int) -> bool:
    """Set the step count in a saved state; return whether the state has one."""
    (state,) = saved["state"].values()
    known = documented_state(impl, algorithm, state)
    if "step" not in known:
        return False
    value = known["step"]
    state[known.own("step")] = torch.full_like(value, count) if isinstance(value, torch.Tensor) else count
    return True


@pytest.mark.clause("ALGO-094")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", [*ADAGRADS, *ADAMS])
@pytest.mark.parametrize("count", [256, 2048, 70000])
def test_count_goes_on(impl, algorithm, count, dtype):
    """A loaded step count continues from its value, whatever the dtype of the parameter."""
    weight = parameter(4, 3, dtype=dtype)
    optimizer = make_algorithm(impl, algorithm, [weight])
    train(optimizer, [weight], 1)
    saved = snapshot(optimizer.state_dict())
    if not set_count(impl, algorithm, saved, count):
        return
    optimizer.load_state_dict(saved)
    train(optimizer, [weight], 2)
    (state,) = optimizer.state_dict()["state"].values()
    seen = float(as_tensor(documented_state(impl, algorithm, state)["step"]))
    expect_equal(seen, count + 2.0, "count of steps")


@pytest.mark.clause("ALGO-094")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", ["Adagrad", "RowWiseAdagrad", "Adam", "PartialRowWiseAdam"])
@pytest.mark.parametrize("count", [99, 999, 9999])
def test_rates_of_late_steps(impl, algorithm, count):
    """Bias correction and lr_decay follow their formulas at any count."""
    weight = torch.nn.Parameter(zeros(1, 2))
    adam = algorithm in ADAMS
    options = {"betas": (0.75, 0.9999)} if adam else {"lr_decay": 1e-3}
    optimizer = make_algorithm(impl, algorithm, [weight], **options)
    weight.grad = zeros(1, 2)
    optimizer.step()
    saved = snapshot(optimizer.state_dict())
    if set_count(impl, algorithm, saved, count):
        optimizer.load_state_dict(saved)
    else:  # it is elsewhere, in the group for one
        for _ in range(count - 1):
            optimizer.step()
    weight.grad = tensor([[2.0, -2.0]])
    optimizer.step()
    step = count + 1
    if adam:
        m, v = 0.25 * 2.0, 1e-4 * 4.0
        if "no_debias" not in variant_of(impl, algorithm):
            m, v = m / (1 - 0.75**step), v / (1 - 0.9999**step)
        moved = 0.1 * m / (v**0.5 + 1e-8)
    else:
        moved = 0.1 / (1 + (step - 1) * 1e-3)
    wanted = torch.tensor([[-moved, moved]], dtype=torch.float64)
    off = float(((exactly(weight) - wanted) / wanted).abs().max())
    expect(off < 1e-4, f"the weight {wanted.tolist()} to four digits", weight.tolist())


@pytest.mark.clause("ALGO-048")
@pytest.mark.needs("{algorithm}")
@any_optimizer
@pytest.mark.parametrize("which", ["weight", "gradient", "both"])
def test_transposed(impl, algorithm, which):
    """A transposed weight accepts a contiguous gradient, and a contiguous weight a transposed one."""
    start, grads = parameter(4, 3), fixed_grads(3)
    plain, _ = trained_copy(impl, algorithm, start, grads)
    turned = start.detach().t().contiguous().t() if which != "gradient" else start.detach().clone()
    weight = torch.nn.Parameter(turned)
    optimizer = make_algorithm(impl, algorithm, [weight])
    for grad in grads:
        weight.grad = grad.clone() if which == "weight" else grad.t().contiguous().t()
        optimizer.step()
    expect_same_way(weight, plain, start, "the weight", algorithm)
