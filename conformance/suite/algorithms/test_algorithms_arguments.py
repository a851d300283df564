"""Arguments of constructors and groups: accepted values and errors."""

import inspect
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.algorithms import (
    ALGORITHMS,
    ROW_WISE,
    WITH_EPS,
    WITH_OTHER,
    decay,
    expect_same_way,
    need_group_rates,
    need_independent,
    resumed_with,
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
from keyedopt.conformance.suite.support.described import DEFAULTS, Described, default_of, named, said
from keyedopt.conformance.suite.support.device import ones, tensor
from keyedopt.conformance.suite.support.inputs import parameter, set_grads, train, values
from keyedopt.conformance.suite.support.options import ADAGRADS, ADAMS, WITH_DECAY, WITH_START

any_optimizer = pytest.mark.parametrize("algorithm", WITH_OTHER)

#: Further names of an option in messages.
CALLED = {"lr": ("lr", "learning rate"), "eps": ("eps",), "betas": ("beta",)}

WITH_DEFAULTS = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "AdamW")


def expect_refused(impl: Any, algorithm: str, option: str, value: Any) -> None:
    """Expect a ValueError that names the option."""
    error = expect_raises(
        lambda: getattr(impl, algorithm)([parameter(4, 3)], **{"lr": 0.1, option: value}),
        ValueError,
        expected=f"ValueError for {option}={value!r}",
    )
    text = str(error).lower().replace(" ", "_")
    names = (*CALLED.get(option, (option,)), *named(impl, algorithm, {option: value}))
    named_so = any(name.replace(" ", "_") in text for name in names)
    expect(named_so, f"an error that names {option}", str(error))


# --- options out of range -------------------------------------------------------------------------


@pytest.mark.clause("ALGO-053")
@pytest.mark.needs("{algorithm}")
@any_optimizer
@pytest.mark.parametrize("value", [-0.1, "nan"])
def test_lr(impl, algorithm, value):
    """A negative or NaN learning rate raises ValueError."""
    expect_refused(impl, algorithm, "lr", float(value))


@pytest.mark.clause("ALGO-054")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_infinite_lr(impl, algorithm):
    """Observe whether an infinite learning rate is accepted."""
    seen = outcome(lambda: getattr(impl, algorithm)([parameter(4, 3)], lr=float("inf")) and None)
    return "accepted" if seen.startswith("returns") else seen


@pytest.mark.clause("ALGO-055")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", WITH_EPS)
@pytest.mark.parametrize("value", [-1e-8, "nan"])
def test_eps(impl, algorithm, value):
    """A negative or NaN eps raises ValueError."""
    expect_refused(impl, algorithm, "eps", float(value))


@pytest.mark.clause("ALGO-056")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", ADAMS)
@pytest.mark.parametrize("value", [[-0.1, 0.9], [0.9, 1.0], [1.0, 0.9], [0.9, "nan"]])
def test_betas(impl, algorithm, value):
    """A beta outside [0, 1) raises an error."""
    expect_refused(impl, algorithm, "betas", tuple(float(beta) for beta in value))


@pytest.mark.clause("ALGO-057")
@pytest.mark.needs("{algorithm}")
@any_optimizer
@pytest.mark.parametrize("value", [-0.1, "nan"])
def test_weight_decay(impl, algorithm, value):
    """A negative or NaN weight decay raises ValueError."""
    expect_refused(impl, algorithm, "weight_decay", float(value))


@pytest.mark.clause("ALGO-058")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", ["SGD", "LarsSGD"])
def test_momentum(impl, algorithm):
    """A negative momentum raises ValueError."""
    expect_refused(impl, algorithm, "momentum", -0.1)


@pytest.mark.clause("ALGO-058")
@pytest.mark.needs("SGD.nesterov", "SGD.dampening")
@pytest.mark.parametrize("options", [{"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.1}])
def test_nesterov(impl, options):
    """Nesterov without momentum, or with dampening, raises ValueError."""
    expect_raises(
        lambda: impl.SGD([parameter(4, 3)], lr=0.1, nesterov=True, **options),
        ValueError,
        mentions=tuple(named(impl, "SGD", {"momentum": 0.0})),
        expected="ValueError that says what nesterov needs",
    )


@pytest.mark.clause("ALGO-059")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize(
    ("option", "algorithm"),
    [
        *(("lr_decay", name) for name in ADAGRADS),
        *(("initial_accumulator_value", name) for name in WITH_START),
    ],
)
@pytest.mark.parametrize("value", [-0.1, "nan"])
def test_adagrad_options(impl, algorithm, option, value):
    """A negative or NaN lr_decay or initial_accumulator_value raises ValueError."""
    expect_refused(impl, algorithm, option, float(value))


@pytest.mark.clause("ALGO-060")
@pytest.mark.needs("{algorithm}.{option}")
@pytest.mark.parametrize(
    ("algorithm", "option", "value"),
    [
        ("LarsSGD", "eta", -0.1),
        *(
            (name, "max_norm", -1.0)
            for name in ("RowWiseAdagrad", "PartialRowWiseAdam", "PartialRowWiseLAMB")
        ),
        *(("Ftrl", name, -0.1) for name in ("l1", "l2", "l2_shrinkage", "beta")),
        ("Ftrl", "lr_power", 0.5),
        *((name, "decay", "decouple") for name in WITH_DECAY),
        *((name, "rows", "touched") for name in ALGORITHMS),
        ("Adam", "bias_correction", "rowwise"),
        ("Adam", "eps_placement", "outside"),
    ],
)
def test_variants(impl, algorithm, option, value):
    """An out-of-range option or an unknown variant raises ValueError."""
    error = expect_raises(
        lambda: getattr(impl, algorithm)([parameter(4, 3)], lr=0.1, **{option: value}),
        ValueError,
        expected=f"ValueError for {option}={value!r}",
    )
    names = (str(value), option, *named(impl, algorithm, {option: value}))
    expect(any(name in str(error) for name in names), f"an error that names {option} or {value!r}", error)


@pytest.mark.plain_only("it counts groups")
@pytest.mark.clause("ALGO-061")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@any_optimizer
@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_options_of_a_group(impl, algorithm, option):
    """An option out of range in a group raises ValueError, and the group is not added."""
    kind = getattr(impl, algorithm)
    weights = [parameter(4, 3, seed=index) for index in range(2)]
    bad = {"params": [weights[1]], **named(impl, algorithm, {option: -0.1})}
    optimizer = kind([weights[0]], lr=0.1)
    before = [len(optimizer.param_groups), len(optimizer.state)]
    for action in (lambda: optimizer.add_param_group(bad), lambda: kind([dict(bad)], lr=0.1)):
        expect_raises(action, ValueError, expected=f"ValueError for a group with {option}=-0.1")
    expect_equal([len(optimizer.param_groups), len(optimizer.state)], before, "number of groups and states")


@pytest.mark.clause("ALGO-062")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_unknown_option(impl, algorithm):
    """A misspelt option raises an error."""
    expect_raises(
        lambda: getattr(impl, algorithm)([parameter(4, 3)], lr=0.1, wieght_decay=0.1),
        TypeError,
        ValueError,
        expected="an error for the option wieght_decay",
    )


# --- what is accepted -----------------------------------------------------------------------------


@pytest.mark.clause("ALGO-063")
@pytest.mark.needs("{algorithm}")
@pytest.mark.parametrize("algorithm", [*WITH_DEFAULTS, "Ftrl"])
def test_defaults(impl, algorithm):
    """The defaults in the group are the documented ones, and the signature names the options or takes any."""
    kind = getattr(impl, algorithm)
    known = inspect.signature(kind).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values())
    fixed = said(impl.adapter, "fixed", algorithm)
    wanted = [name for name in DEFAULTS[algorithm] if not impl.lacks(f"{algorithm}.{name}")]
    values = {name: default_of(impl, algorithm, name) for name in wanted if name not in fixed}
    without = kind.kind if isinstance(kind, Described) else kind
    optimizer = without([parameter(4, 3)], **named(impl, algorithm, fixed))
    for name, value in values.items():
        (own,) = named(impl, algorithm, {name: None})
        expect(takes_any or name in known, f"{name} in the signature", list(known))
        group = optimizer.param_groups[0]  # which may keep the option in another form
        seen = group[own] if own in group or name not in known else known[name].default
        expect_equal(seen, value, f"default of {name}")


@pytest.mark.clause("ALGO-063")
@pytest.mark.needs("{algorithm}", "{algorithm}.positional")
@pytest.mark.parametrize("algorithm", WITH_DEFAULTS)
def test_positional_options(impl, algorithm):
    """The options up to weight_decay can be passed by position, in the documented order."""
    order = {
        "SGD": ("lr", "momentum", "dampening", "weight_decay"),
        **dict.fromkeys(("Adam", "AdamW"), ("lr", "betas", "eps", "weight_decay")),
    }.get(algorithm, ("lr", "lr_decay", "weight_decay"))
    for name in order:
        default_of(impl, algorithm, name)  # otherwise it may be given by name only
    given = [(0.5, 0.75) if name == "betas" else 0.25 + index / 8 for index, name in enumerate(order)]
    kind, by_name = getattr(impl, algorithm), dict(zip(order, given, strict=True))
    first, second = parameter(4, 3), parameter(4, 3)
    optimizer, other = kind([first], *given), kind([second], **by_name)
    for weight, one in ((first, optimizer), (second, other)):
        train(one, [weight], 2)
    expect_bits(first.detach(), second.detach(), "the weight with options by position")
    group, own = optimizer.param_groups[0], named(impl, algorithm, {name: name for name in order})
    # A group may keep an option under its documented name, or in parts, such as beta1 and beta2.
    kept = {name if name in group else documented: by_name[documented] for name, documented in own.items()}
    kept = {name: value for name, value in kept.items() if name in group}
    expect_equal({name: group[name] for name in kept}, kept, f"options {order}")


@pytest.mark.clause("ALGO-064")
@pytest.mark.needs("{algorithm}", "{algorithm}.by_row")
@pytest.mark.parametrize("algorithm", ROW_WISE)
@pytest.mark.parametrize("shape", [(), (4,), (4, 3, 2), (3, 3, 1)])
def test_no_table(impl, algorithm, shape):
    """A parameter that is not a table raises an error, at the latest in the first step."""
    weight = parameter(*shape)
    before = values([weight])[0]

    def step() -> None:
        optimizer = getattr(impl, algorithm)([weight], lr=0.1)
        set_grads([weight])
        optimizer.step()

    expect_raises(step, Exception, expected=f"an error for a parameter of shape {tuple(shape)}")
    expect_bits(weight.detach(), before, "the weight")


@pytest.mark.plain_only("it counts groups")
@pytest.mark.clause("ALGO-061")
@pytest.mark.needs("{algorithm}", "{algorithm}.by_row", "{algorithm}.groups")
@pytest.mark.parametrize("algorithm", ROW_WISE)
def test_a_group_with_no_table_is_not_added(impl, algorithm):
    """A group with a parameter that is not a table is not added."""
    optimizer = getattr(impl, algorithm)([parameter(4, 3)], lr=0.1)
    try:
        optimizer.add_param_group({"params": [parameter(4, 3), parameter(4)]})
    except Exception:
        expect_equal(len(optimizer.param_groups), 1, "groups after an error")


@pytest.mark.clause("ALGO-065")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_complex(impl, algorithm):
    """Observe whether complex parameters raise an error, or step to finite values."""

    def step() -> str:
        weight = torch.nn.Parameter(ones(2, 3, dtype=torch.complex64))
        optimizer = getattr(impl, algorithm)([weight], lr=0.1)
        weight.grad = torch.full_like(weight, 1 + 2j)
        optimizer.step()
        return "finite" if torch.view_as_real(weight.detach()).isfinite().all() else "not finite"

    return outcome(step)


@pytest.mark.clause("ALGO-066")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_no_parameters(impl, algorithm):
    """An empty list of parameters raises ValueError."""
    expect_raises(lambda: getattr(impl, algorithm)([], lr=0.1), ValueError, expected="ValueError")


@pytest.mark.clause("ALGO-067")
@pytest.mark.needs("{algorithm}", "{algorithm}.tensor_rate")
@any_optimizer
def test_tensor_lr(impl, algorithm):
    """A tensor as lr gives the same steps as the number, also after it was changed in place."""
    weights = [parameter(4, 3) for _ in range(2)]
    rate = tensor(0.25)
    one = getattr(impl, algorithm)([weights[0]], lr=rate)
    other = getattr(impl, algorithm)([weights[1]], lr=0.25)
    for lr in (0.25, 0.5):
        rate.fill_(lr)
        other = resumed_with(getattr(impl, algorithm), other, weights[1], lr=lr)
        for weight in weights:
            set_grads([weight])
        one.step()
        other.step()
    expect_same_way(weights[0], weights[1], parameter(4, 3), "the weight", algorithm)


# --- groups and parameters ------------------------------------------------------------------------


@pytest.mark.clause("ALGO-068")
@pytest.mark.needs("{algorithm}")
@any_optimizer
def test_listed_twice(impl, algorithm):
    """Observe whether a parameter that is listed twice in one group raises an error."""
    weight = parameter(4, 3)
    seen = outcome(lambda: getattr(impl, algorithm)([weight, weight], lr=0.1) and None)
    return "accepted" if seen.startswith("returns") else seen


@pytest.mark.clause("ALGO-069")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@any_optimizer
def test_in_two_groups(impl, algorithm):
    """Adding a parameter that is already in another group raises ValueError and changes nothing."""
    weights = [parameter(4, 3, seed=index) for index in range(2)]
    optimizer = getattr(impl, algorithm)(weights, lr=0.1)
    set_grads(weights)
    optimizer.step()
    before = snapshot([values(weights), optimizer.state_dict()])
    new = parameter(4, 3, seed=2)
    expect_raises(
        lambda: optimizer.add_param_group({"params": [new, weights[0]]}), ValueError, expected="ValueError"
    )
    expect_unchanged(before, [values(weights), optimizer.state_dict()], "weights and state")


@pytest.mark.clause("ALGO-082")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@any_optimizer
def test_added_group(impl, algorithm):
    """An added group trains with its own options like a group from the constructor."""
    need_group_rates(impl, algorithm)
    kind = getattr(impl, algorithm)
    early = [parameter(4, 3, seed=index) for index in range(2)]
    late = [parameter(4, 3, seed=index) for index in range(2)]
    one = kind([{"params": [early[0]]}, {"params": [early[1]], "lr": 0.5}], lr=0.1)
    other = kind([late[0]], lr=0.1)
    other.add_param_group({"params": [late[1]], "lr": 0.5})
    for seed in range(2):
        for weights, optimizer in ((early, one), (late, other)):
            set_grads(weights, seed=seed)
            optimizer.step()
    for index in range(2):
        expect_same_way(
            late[index], early[index], parameter(4, 3, seed=index), f"weight of group {index}", algorithm
        )


@pytest.mark.clause("ALGO-082")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@any_optimizer
def test_added_group_later(impl, algorithm):
    """A group that is added after some steps starts with fresh state, and the others keep theirs."""
    need_independent(impl, algorithm, first=(0, 1))
    kind = getattr(impl, algorithm)
    together, apart = ([parameter(4, 3, seed=index) for index in range(2)] for _ in range(2))
    grouped = kind([together[0]], lr=0.1)
    separate = [kind([weight], lr=0.1) for weight in apart]
    for weight, optimizer in ((together[0], grouped), (apart[0], separate[0])):
        set_grads([weight])
        optimizer.step()
    grouped.add_param_group({"params": [together[1]]})
    for seed in range(2):
        for weight in (*together, *apart):
            set_grads([weight], seed=seed)
        for optimizer in (grouped, *separate):
            optimizer.step()
    for index, name in enumerate(("the weight of the first group", "the added weight")):
        expect_same_way(together[index], apart[index], parameter(4, 3, seed=index), name, algorithm)


@pytest.mark.clause("ALGO-083")
@pytest.mark.needs("{algorithm}", "{algorithm}.groups")
@any_optimizer
def test_groups_are_separate(impl, algorithm):
    """Two groups train like two optimizers with their options."""
    kind = getattr(impl, algorithm)
    together = [parameter(4, 3, seed=index) for index in range(2)]
    apart = [parameter(4, 3, seed=index) for index in range(2)]
    need_independent(impl, algorithm)
    need_group_rates(impl, algorithm)
    options = [{"lr": 0.1, **decay(impl, algorithm, 0.1)}, {"lr": 0.02, **decay(impl, algorithm, 0.0)}]
    groups = [{"params": [weight], **more} for weight, more in zip(together, options, strict=True)]
    one = kind(groups, lr=0.1)
    others = [kind([weight], **more) for weight, more in zip(apart, options, strict=True)]
    for seed in range(3):
        set_grads(together, seed=seed)
        set_grads(apart, seed=seed)
        one.step()
        for other in others:
            other.step()
    for index in range(2):
        expect_same_way(
            together[index], apart[index], parameter(4, 3, seed=index), f"weight of group {index}", algorithm
        )
