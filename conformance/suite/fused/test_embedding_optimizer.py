"""Embedding modules: the fused optimizer, its keys, and its learning rate."""

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
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.device import ones, tensor
from keyedopt.conformance.suite.support.embedding import (
    BAGS,
    FUSED_OPTIMIZERS,
    ONE_TABLE,
    collection,
    fit,
    jagged,
    lookups,
    tables_and_state,
    tables_of,
)
from keyedopt.conformance.suite.support.inputs import adam, parameters, warmup_stages

#: State of a table "t" of 6 rows and 4 columns by torchrec's keys.
KEYS = {
    "SGD": {},
    "Adagrad": {"t.momentum1": [6, 4]},
    "RowWiseAdagrad": {"t.momentum1": [6]},
    "Adam": {"t.momentum1": [6, 4], "t.exp_avg_sq": [6, 4]},
    "SparseAdam": {"t.momentum1": [6, 4], "t.exp_avg_sq": [6, 4]},
    "PartialRowWiseAdam": {"t.momentum1": [6, 4], "t.exp_avg_sq": [6]},
    "LAMB": {"t.momentum1": [6, 4], "t.exp_avg_sq": [6, 4]},
    "PartialRowWiseLAMB": {"t.momentum1": [6, 4], "t.exp_avg_sq": [6]},
    "LarsSGD": {"t.momentum1": [6, 4]},
    "Ftrl": {"t.momentum1": [6, 4], "t.linear": [6, 4]},
}


def train_with_ones(module: Any, bags: Any = (0, 1)) -> None:
    """Train the only table with gradients of one for these rows."""
    module(jagged({"f": [list(bags)]}))["f"].sum().backward()


def decrease_of_row_0(module: Any, row: int = 0) -> float:
    """Train row 0 by SGD with a gradient of one, and return the decrease."""
    before = float(tables_of(module)["t"].detach()[row, 0])
    train_with_ones(module, (row,))
    return before - float(tables_of(module)["t"].detach()[row, 0])


@pytest.mark.clause("FUSED-056")
@pytest.mark.needs("{kind}", "KeyedOptimizer")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
def test_is_fused_optimizer_module(impl, kind):
    """The module is a FusedOptimizerModule; its fused_optimizer is a KeyedOptimizer."""
    module = collection(impl, kind=kind)
    expect(isinstance(module, impl.FusedOptimizerModule), "a FusedOptimizerModule", type(module).__mro__)
    expect(isinstance(module, torch.nn.Module), "a module of torch", type(module).__mro__)
    optimizer = module.fused_optimizer
    expect(isinstance(optimizer, impl.KeyedOptimizer), "a KeyedOptimizer", type(optimizer).__mro__)


@pytest.mark.clause("FUSED-093")
@pytest.mark.needs("{kind}")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
def test_is_one_fused_optimizer(impl, kind):
    """The fused_optimizer of a module is always the same FusedOptimizer."""
    module = collection(impl, kind=kind)
    optimizer = module.fused_optimizer
    expect(isinstance(optimizer, impl.FusedOptimizer), "a FusedOptimizer", type(optimizer).__mro__)
    expect(module.fused_optimizer is optimizer, "the same optimizer", "another one")


@pytest.mark.clause("FUSED-057")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", FUSED_OPTIMIZERS)
def test_keys(impl, optimizer):
    """Parameters are `<table>.weight`, states `<table>.momentum1` and `<table>.<name>`, from the start on."""
    module = collection(impl, optimizer)
    state = module.fused_optimizer.state_dict()["state"]
    expect_equal(set(state), {"t.weight", "u.weight"}, "keys of the parameters")
    shapes = {key: list(value.shape) for key, value in state["t.weight"].items()}
    counts = {key: shape for key, shape in shapes.items() if key == "t.iter"}
    expect_equal(shapes, KEYS[optimizer] | counts, "state of table t")
    expect(counts.get("t.iter", [1]) == [1], "one count, if there is one", shapes)


@pytest.mark.clause("FUSED-058")
@pytest.mark.needs("{kind}", "EmbeddingBagCollection.state_dict")
@pytest.mark.parametrize(
    ("kind", "name"), [("EmbeddingBagCollection", "embedding_bags"), ("EmbeddingCollection", "embeddings")]
)
def test_keys_of_the_module(impl, kind, name):
    """The state_dict of the module contains only the tables, with torchrec's keys."""
    module = collection(impl, "Adam", kind=kind)
    expect_equal(set(module.state_dict()), {f"{name}.t.weight", f"{name}.u.weight"}, "keys of the module")
    names = [key for key, _ in module.named_parameters()]
    expect_equal(set(names), {f"{name}.t.weight", f"{name}.u.weight"}, "names of the parameters")


@pytest.mark.clause("FUSED-059")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "Adam"])
def test_step_and_zero_grad(impl, optimizer):
    """Step and zero_grad of the fused optimizer change nothing, before, between and after backward passes."""
    module, other = collection(impl, optimizer), collection(impl, optimizer)
    for seed in range(3):
        before = snapshot(tables_and_state(module))
        module.fused_optimizer.zero_grad()
        module.fused_optimizer.step()
        expect_unchanged(before, tables_and_state(module), "the module")
        fit(module, jagged(BAGS), seed=seed)
        fit(other, jagged(BAGS), seed=seed)
        module.fused_optimizer.step()
    expect_unchanged(snapshot(tables_and_state(other)), tables_and_state(module), "the module")


@pytest.mark.clause("FUSED-060")
@pytest.mark.needs("EmbeddingBagCollection")
def test_closure(impl):
    """Observe whether step of the fused optimizer evaluates a closure, and what it returns."""
    module = collection(impl)
    return outcome(lambda: module.fused_optimizer.step(lambda: 1.5))


@pytest.mark.clause("FUSED-061")
@pytest.mark.needs("EmbeddingBagCollection")
def test_rate(impl):
    """A learning rate that is set in the groups is used by the next forward and backward pass."""
    module = collection(impl, options={"lr": 0.5}, tables=ONE_TABLE)
    expect_equal(module.fused_optimizer.param_groups[0]["lr"], 0.5, "learning rate in the group")
    expect_close(decrease_of_row_0(module), 0.5, "first step", ulps=2**30)
    module.fused_optimizer.param_groups[0]["lr"] = 0.25
    expect_close(decrease_of_row_0(module), 0.25, "second step", ulps=2**30)


@pytest.mark.clause("FUSED-062")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "RowWiseAdagrad", "Adam"])
def test_rate_of_the_backward(impl, optimizer):
    """An update uses the learning rate that is set when the backward pass runs."""
    module, other = collection(impl, optimizer, {"lr": 0.5}), collection(impl, optimizer, {"lr": 0.125})
    loss = lookups(module, jagged(BAGS))
    module.fused_optimizer.param_groups[0]["lr"] = 0.125
    loss.backward()
    fit(other, jagged(BAGS))
    expect_unchanged(snapshot(tables_of(other)), tables_of(module), "the tables")


@pytest.mark.clause("FUSED-063")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.tensor_rate")
def test_rate_in_a_tensor(impl):
    """A learning rate may be a tensor whose value the caller changes."""
    rate = tensor(0.5)
    module = collection(impl, options={"lr": rate}, tables=ONE_TABLE)
    expect_close(decrease_of_row_0(module), 0.5, "first step", ulps=2**30)
    module.fused_optimizer.param_groups[0]["lr"].fill_(0.25)
    expect_close(decrease_of_row_0(module), 0.25, "second step", ulps=2**30)


@pytest.mark.clause("FUSED-064")
@pytest.mark.needs("EmbeddingBagCollection")
def test_scheduler(impl):
    """An LRScheduler around the fused optimizer sets the learning rate of the updates."""
    module = collection(impl, options={"lr": 0.5}, tables=ONE_TABLE)
    scheduler = torch.optim.lr_scheduler.StepLR(module.fused_optimizer, step_size=1, gamma=0.5)
    taken = []
    for _ in range(3):
        taken.append(round(decrease_of_row_0(module), 4))
        module.fused_optimizer.step()
        scheduler.step()
    expect_equal(taken, [0.5, 0.25, 0.125], "learning rates of three steps")


@pytest.mark.clause("FUSED-065")
@pytest.mark.needs("EmbeddingBagCollection", "WarmupOptimizer")
@pytest.mark.parametrize("combined", [False, True])
def test_warmup(impl, combined):
    """A warmup around a fused optimizer, or a combination with one, sets the learning rate of updates."""
    module = collection(impl, options={"lr": 1.0}, tables=ONE_TABLE)
    inner = module.fused_optimizer
    if combined:
        inner = impl.CombinedOptimizer([("sparse", inner), ("dense", adam(impl, parameters()))])
    stages = warmup_stages(impl, [{"policy": "LINEAR", "max_iters": 4, "value": 0.25}])
    warmup = impl.WarmupOptimizer(inner, stages, lr=0.5)
    taken = []
    for _ in range(5):
        warmup.zero_grad()
        taken.append(round(decrease_of_row_0(module), 4))
        warmup.step()
    wanted = [0.5 * (0.25 + 0.75 * i / 4) for i in range(5)]
    expect_equal(taken, [round(rate, 4) for rate in wanted], "learning rates of five steps")


@pytest.mark.clause("FUSED-066")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.checks_rates")
@pytest.mark.parametrize("rate", [-0.5, float("nan"), "fast"])
def test_bad_rate(impl, rate):
    """If the learning rate is out of range, the backward pass raises ValueError and changes nothing."""
    module = collection(impl, "Adam")
    before = snapshot(tables_and_state(module))
    module.fused_optimizer.param_groups[0]["lr"] = rate
    loss = lookups(module, jagged(BAGS))
    expect_raises(loss.backward, ValueError, mentions=["lr"], expected="ValueError for lr")
    expect_unchanged(before, tables_and_state(module), "the module")


@pytest.mark.plain_only("it counts groups")
@pytest.mark.clause("FUSED-076")
@pytest.mark.needs("EmbeddingBagCollection", "KeyedOptimizer")
def test_no_group_from_outside(impl):
    """Adding a group of other parameters raises an error: the module would never train them."""
    module = collection(impl)
    group = {"params": {"p": torch.nn.Parameter(ones(2))}}
    expect_raises(lambda: module.fused_optimizer.add_param_group(group), ValueError, expected="ValueError")
    expect_equal(len(module.fused_optimizer.param_groups), 1, "number of groups")


def nested(impl: Any, inner: Any, around: str) -> Any:
    """Return an optimizer, or a wrapper, a combination, or both around it."""
    if around in ("wrapper", "both"):
        inner = impl.OptimizerWrapper(inner)
    return inner if around in ("nothing", "wrapper") else impl.CombinedOptimizer([("sparse", inner)])


#: What is around an optimizer.
AROUND = ["nothing", "wrapper", "combination", "both"]


@pytest.mark.clause("FUSED-097")
@pytest.mark.needs("EmbeddingBagCollection", "OptimizerWrapper", "CombinedOptimizer")
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("count", [0, 9])
def test_step_count_is_set(impl, around, count):
    """After set_optimizer_step(n) the first update of a row has the bias correction of step n + 1."""
    module = collection(impl, "Adam", options={"lr": 0.5}, tables=(*ONE_TABLE, ("u", 5, 2, ("h",))))

    def train(row: int) -> None:
        outputs = module(jagged({"f": [[row]], "h": [[row]]}))
        (outputs["f"].sum() + outputs["h"].sum()).backward()

    for _ in range(3):
        train(1)
    nested(impl, module.fused_optimizer, around).set_optimizer_step(count)
    before = snapshot(tables_of(module))
    train(0)
    mean, square = 0.1 / (1 - 0.9 ** (count + 1)), 0.001 / (1 - 0.999 ** (count + 1))
    wanted = 0.5 * mean / square**0.5
    for name in ("t", "u"):
        taken = float((before[name] - tables_of(module)[name].detach())[0, 0])
        expect_equal(round(taken, 4), round(wanted, 4), f"decrease of row 0 of {name}")


@pytest.mark.clause("FUSED-098")
@pytest.mark.needs("EmbeddingBagCollection", "OptimizerWrapper", "CombinedOptimizer")
@pytest.mark.parametrize("around", AROUND)
def test_hyper_parameters_are_set(impl, around):
    """After update_hyper_parameters an update has the new learning rate; an unknown option is an error."""
    module = collection(impl, options={"lr": 1.0}, tables=ONE_TABLE)
    optimizer = nested(impl, module.fused_optimizer, around)
    expect_raises(
        lambda: optimizer.update_hyper_parameters({"lr": 0.5, "no_such_option": 1.0}),
        ValueError,
        NotImplementedError,
        KeyError,
        expected="an error for the unknown option",
    )
    expect_equal(round(decrease_of_row_0(module), 4), 1.0, "decrease after the error")
    optimizer.update_hyper_parameters({"lr": 0.25})
    expect_equal(round(decrease_of_row_0(module), 4), 0.25, "decrease with the new learning rate")


@pytest.mark.clause("FUSED-098")
@pytest.mark.needs("EmbeddingBagCollection", "apply_optimizer_in_backward")
@pytest.mark.parametrize(
    ("kinds", "option"),
    [(("SGD", "Adam"), {"momentum": 0.5}), (("Adam", "SGD"), {"betas": (0.5, 0.75)})],
    ids=["SGD first", "Adam first"],
)
def test_hyper_parameters_of_unlike_tables(impl, kinds, option):
    """An option that only the first table's optimizer has is an error, and changes no group."""
    module = collection(impl, None)
    for table, kind in zip(module.parameters(), kinds, strict=True):
        impl.apply_optimizer_in_backward(getattr(torch.optim, kind), [table], {"lr": 1.0})
    optimizer = module.fused_optimizer
    before = [snapshot({**group, "params": []}) for group in optimizer.param_groups]
    expect_raises(
        lambda: optimizer.update_hyper_parameters({"lr": 0.5, **option}),
        ValueError,
        NotImplementedError,
        KeyError,
        expected=f"an error, as only {kinds[0]} has {next(iter(option))}",
    )
    after = [{**group, "params": []} for group in optimizer.param_groups]
    expect_unchanged(before, after, "options of the groups")


@pytest.mark.clause("FUSED-098")
@pytest.mark.needs("EmbeddingBagCollection", "Adam", "Adam.betas")
@pytest.mark.parametrize(
    "given", [{"beta1": 0.5}, {"beta2": 0.75}, {"beta1": 0.5, "beta2": 0.75}], ids=" ".join
)
def test_betas_are_set(impl, given):
    """update_hyper_parameters sets beta1, beta2 or both; a beta that is not given keeps its value."""
    module = collection(impl, "Adam", {"lr": 0.5}, tables=ONE_TABLE)
    module.fused_optimizer.update_hyper_parameters(given)
    betas = given.get("beta1", 0.9), given.get("beta2", 0.999)
    other = collection(impl, "Adam", {"lr": 0.5, "betas": betas}, tables=ONE_TABLE)
    for each in (module, other):
        train_with_ones(each, (0, 1, 1))
        train_with_ones(each, (1, 2))
    expect_bits(tables_of(module)["t"].detach(), tables_of(other)["t"].detach(), "the table")
