"""Embedding modules: their fused optimizer, its rate, state and checkpoints, and what is put around it."""

import warnings
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support import (
    adam,
    expect,
    expect_bits,
    expect_close,
    expect_equal,
    expect_raises,
    expect_unchanged,
    outcome,
    parameters,
    same_bits,
    set_grads,
    snapshot,
    warmup_stages,
)
from keyedopt.conformance.suite.support_embedding import (
    BAGS,
    collection,
    everything,
    fit,
    jagged,
    lookups,
    tables_of,
)

ONE = (("t", 6, 4, ("f",)),)
ALL = (
    "SGD",
    "Adagrad",
    "RowWiseAdagrad",
    "Adam",
    "SparseAdam",
    "PartialRowWiseAdam",
    "LAMB",
    "PartialRowWiseLAMB",
    "LarsSGD",
)
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
}
#: Names of the unfused optimizers' state, by what follows the table's name in the fused keys.
UNFUSED = {
    "Adagrad": {"momentum1": "sum"},
    "RowWiseAdagrad": {"momentum1": "sum"},
    "LarsSGD": {"momentum1": "momentum_buffer"},
    "SGD": {"momentum1": "momentum_buffer"},
}
ADAM = {"momentum1": "exp_avg", "exp_avg_sq": "exp_avg_sq", "iter": "step", "row_counter": "step"}


def ones(module: Any, bags: Any = (0, 1)) -> None:
    """Train the one table with gradients of one for these rows."""
    module(jagged({"f": [list(bags)]}))["f"].sum().backward()


def rate_taken(module: Any, row: int = 0) -> float:
    """Train row 0 by SGD with a gradient of one, and return by how much it went down."""
    before = float(tables_of(module)["t"].detach()[row, 0])
    ones(module, (row,))
    return before - float(tables_of(module)["t"].detach()[row, 0])


def unfused(impl: Any, optimizer: str, table: torch.Tensor, options: Any) -> tuple[Any, torch.nn.Parameter]:
    """Make the unfused optimizer of a copy of a table."""
    weight = torch.nn.Parameter(table.detach().clone())
    return getattr(impl, optimizer)([weight], **options), weight


def train_unfused(chosen: Any, weight: torch.nn.Parameter, steps: list[Any]) -> None:
    """Train by sparse gradients: rows, with repetitions, and the gradient of each."""
    for rows, grads in steps:
        weight.grad = torch.sparse_coo_tensor(
            torch.tensor([rows]), torch.tensor(grads), weight.shape, check_invariants=True
        )
        chosen.step()


def train_fused(module: Any, steps: list[Any]) -> None:
    """Train by the same gradients."""
    for rows, grads in steps:
        (module(jagged({"f": [[row] for row in rows]}))["f"] * torch.tensor(grads)).sum().backward()


def some(seed: int) -> list[Any]:
    """Make gradients for three steps."""
    steps = []
    for step in range(seed, seed + 3):
        rows = [(step * (i + 1)) % 5 for i in range(4)]
        grads = [[((3 * step + 5 * i + 7 * d) % 13 - 6) / 4 for d in range(4)] for i in range(4)]
        steps.append((rows, grads))
    return steps


# --- what it is -----------------------------------------------------------------------------------


@pytest.mark.clause("FUSED-056")
@pytest.mark.needs("{kind}", "KeyedOptimizer")
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
def test_is_fused_optimizer_module(impl, kind):
    """The module is a FusedOptimizerModule, and its fused_optimizer a FusedOptimizer, the same every time."""
    module = collection(impl, kind=kind)
    expect(isinstance(module, impl.FusedOptimizerModule), "a FusedOptimizerModule", type(module).__mro__)
    expect(isinstance(module, torch.nn.Module), "a module of torch", type(module).__mro__)
    optimizer = module.fused_optimizer
    expect(isinstance(optimizer, impl.FusedOptimizer), "a FusedOptimizer", type(optimizer).__mro__)
    expect(module.fused_optimizer is optimizer, "the same optimizer", "another one")


@pytest.mark.clause("FUSED-057")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ALL)
def test_keys(impl, optimizer):
    """Parameters are `<table>.weight`, states `<table>.momentum1` and `<table>.<name>`, from the start."""
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
    """The tables are in the state_dict of the module, as in torchrec's, and nothing else is."""
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
        before = snapshot(everything(module))
        module.fused_optimizer.zero_grad()
        module.fused_optimizer.step()
        expect_unchanged(before, everything(module), "the module")
        fit(module, jagged(BAGS), seed=seed)
        fit(other, jagged(BAGS), seed=seed)
        module.fused_optimizer.step()
    expect_unchanged(snapshot(everything(other)), everything(module), "the module")


@pytest.mark.clause("FUSED-060")
@pytest.mark.needs("EmbeddingBagCollection")
def test_closure(impl):
    """Whether step of the fused optimizer evaluates a closure, and what it returns."""
    module = collection(impl)
    return outcome(lambda: module.fused_optimizer.step(lambda: 1.5))


# --- the rate -------------------------------------------------------------------------------------


@pytest.mark.clause("FUSED-061")
@pytest.mark.needs("EmbeddingBagCollection")
def test_rate(impl):
    """A rate that is set in the groups is that of the next forward and backward pass."""
    module = collection(impl, options={"lr": 0.5}, tables=ONE)
    expect_equal(module.fused_optimizer.param_groups[0]["lr"], 0.5, "rate in the group")
    expect_close(rate_taken(module), 0.5, "first step", ulps=2**30)
    module.fused_optimizer.param_groups[0]["lr"] = 0.25
    expect_close(rate_taken(module), 0.25, "second step", ulps=2**30)


@pytest.mark.clause("FUSED-062")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "RowWiseAdagrad", "Adam"])
def test_rate_of_the_backward(impl, optimizer):
    """The rate that counts is that which is set when the backward pass runs, not that of the forward."""
    module, other = collection(impl, optimizer, {"lr": 0.5}), collection(impl, optimizer, {"lr": 0.125})
    loss = lookups(module, jagged(BAGS))
    module.fused_optimizer.param_groups[0]["lr"] = 0.125
    loss.backward()
    fit(other, jagged(BAGS))
    expect_unchanged(snapshot(tables_of(other)), tables_of(module), "the tables")


@pytest.mark.clause("FUSED-063")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.tensor_rate")
def test_rate_in_a_tensor(impl):
    """A rate may be a tensor, which is then filled from outside."""
    rate = torch.tensor(0.5)
    module = collection(impl, options={"lr": rate}, tables=ONE)
    expect_close(rate_taken(module), 0.5, "first step", ulps=2**30)
    module.fused_optimizer.param_groups[0]["lr"].fill_(0.25)
    expect_close(rate_taken(module), 0.25, "second step", ulps=2**30)


@pytest.mark.clause("FUSED-064")
@pytest.mark.needs("EmbeddingBagCollection")
def test_scheduler(impl):
    """A scheduler of torch around the fused optimizer sets the rate of the updates."""
    module = collection(impl, options={"lr": 0.5}, tables=ONE)
    scheduler = torch.optim.lr_scheduler.StepLR(module.fused_optimizer, step_size=1, gamma=0.5)
    taken = []
    for _ in range(3):
        taken.append(round(rate_taken(module), 4))
        module.fused_optimizer.step()
        scheduler.step()
    expect_equal(taken, [0.5, 0.25, 0.125], "rates of three steps")


@pytest.mark.clause("FUSED-065")
@pytest.mark.needs("EmbeddingBagCollection", "WarmupOptimizer")
@pytest.mark.parametrize("combined", [False, True])
def test_warmup(impl, combined):
    """Around a fused optimizer, or a combination with one, a warmup sets the rate of every update."""
    module = collection(impl, options={"lr": 1.0}, tables=ONE)
    inner = module.fused_optimizer
    if combined:
        inner = impl.CombinedOptimizer([("sparse", inner), ("dense", adam(impl, parameters()))])
    stages = warmup_stages(impl, [{"policy": "LINEAR", "max_iters": 4, "value": 0.25}])
    warmup = impl.WarmupOptimizer(inner, stages, lr=0.5)
    taken = []
    for _ in range(5):
        warmup.zero_grad()
        taken.append(round(rate_taken(module), 4))
        warmup.step()
    wanted = [0.5 * (0.25 + 0.75 * i / 4) for i in range(5)]
    expect_equal(taken, [round(rate, 4) for rate in wanted], "rates of five steps")


@pytest.mark.clause("FUSED-066")
@pytest.mark.needs("EmbeddingBagCollection", "EmbeddingBagCollection.checks_rates")
@pytest.mark.parametrize("rate", [-0.5, float("nan"), "fast"])
def test_bad_rate(impl, rate):
    """A rate that is set to what it cannot be is refused by the backward pass, and nothing is changed."""
    module = collection(impl, "Adam")
    before = snapshot(everything(module))
    module.fused_optimizer.param_groups[0]["lr"] = rate
    loss = lookups(module, jagged(BAGS))
    expect_raises(loss.backward, ValueError, mentions=["lr"], expected="ValueError for lr")
    expect_unchanged(before, everything(module), "the module")


# --- state and checkpoints ------------------------------------------------------------------------


@pytest.mark.clause("FUSED-067")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}")
@pytest.mark.parametrize("optimizer", ALL)
def test_state_is_live(impl, optimizer):
    """What params and state_dict show are the tensors that the backward pass writes."""
    module = collection(impl, optimizer)
    shown = everything(module)
    before = snapshot(shown)
    fit(module, jagged(BAGS))
    expect(
        not same_bits(shown["tables"]["t"], before["tables"]["t"]), "the table shown follows", "it does not"
    )
    for key, value in shown["state"]["t.weight"].items():
        expect(not same_bits(value, before["state"]["t.weight"][key]), f"{key} shown follows", "it does not")


@pytest.mark.clause("FUSED-068")
@pytest.mark.needs("{kind}", "{optimizer}")
@pytest.mark.parametrize("optimizer", ALL)
@pytest.mark.parametrize("kind", ["EmbeddingBagCollection", "EmbeddingCollection"])
def test_checkpoint(impl, optimizer, kind):
    """Tables and state loaded into a fresh module go on along the same trajectory, bit by bit."""
    module, other = collection(impl, optimizer, kind=kind), collection(impl, optimizer, kind=kind)
    fit(module, jagged(BAGS), steps=3)
    saved = snapshot(everything(module))
    with torch.no_grad():
        for name, table in tables_of(other).items():
            table.copy_(saved["tables"][name])
    other.fused_optimizer.load_state_dict({"state": saved["state"]})
    for each in (module, other):
        fit(each, jagged(BAGS), steps=3, seed=9)
    expect_unchanged(snapshot(everything(module)), everything(other), "the module that was loaded")


@pytest.mark.clause("FUSED-069")
@pytest.mark.needs("EmbeddingBagCollection", "KeyedOptimizer", "{optimizer}")
@pytest.mark.parametrize("optimizer", ["Adagrad", "Adam"])
@pytest.mark.parametrize("wrong", ["shape", "missing", "too many", "kind"])
def test_bad_checkpoint(impl, optimizer, wrong):
    """A checkpoint that does not fit is refused with a ValueError, and the module is unchanged."""
    module = collection(impl, optimizer)
    fit(module, jagged(BAGS))
    before = snapshot(everything(module))
    state = snapshot(module.fused_optimizer.state_dict()["state"])
    entry = state["u.weight"]
    if wrong == "shape":
        entry["u.momentum1"] = entry["u.momentum1"][:-1]
    elif wrong == "missing":
        del entry["u.momentum1"]
    elif wrong == "too many":
        entry["u.momentum9"] = entry["u.momentum1"]
    else:
        entry["u.momentum1"] = 3.0
    expect_raises(
        lambda: module.fused_optimizer.load_state_dict({"state": state}),
        ValueError,
        mentions=["u."],
        expected="ValueError",
    )
    expect_unchanged(before, everything(module), "the module")


@pytest.mark.clause("FUSED-070")
@pytest.mark.needs("EmbeddingBagCollection", "{optimizer}.step", "{optimizer}.{variant}")
@pytest.mark.parametrize(
    ("optimizer", "variant", "options"),
    [
        ("SGD", "plain", {}),
        ("SGD", "momentum", {"momentum": 0.9}),
        ("Adagrad", "plain", {"eps": 1e-8}),
        ("Adagrad", "lr_decay", {"lr_decay": 0.1}),
        ("RowWiseAdagrad", "plain", {"eps": 1e-8}),
        ("Adam", "plain", {}),
        ("Adam", "bias_correction", {"bias_correction": "per_row"}),
        ("SparseAdam", "plain", {}),
        ("PartialRowWiseAdam", "plain", {}),
        ("LAMB", "plain", {"weight_decay": 0.01}),
        ("PartialRowWiseLAMB", "plain", {}),
        ("LarsSGD", "plain", {"momentum": 0.5}),
    ],
)
@pytest.mark.parametrize("way", ["to unfused", "to fused"])
def test_unfused_checkpoint(impl, optimizer, variant, options, way):
    """A checkpoint of the fused optimizer goes on in the unfused one, and back, along the same trajectory."""
    options = {"lr": 0.125, **options}
    module = collection(impl, optimizer, options, tables=ONE)
    table = tables_of(module)["t"]
    chosen, weight = unfused(impl, optimizer, table, options)
    names = UNFUSED.get(optimizer, ADAM)
    names = names | ({"iter": "step"} if "lr_decay" in options else {})
    if way == "to unfused":
        train_fused(module, some(1))
        train_unfused(chosen, weight, some(1))
        fused = snapshot(module.fused_optimizer.state_dict()["state"]["t.weight"])
        state = chosen.state[weight]
        for key, value in fused.items():
            name = names[key.removeprefix("t.")]
            if isinstance(state[name], torch.Tensor):
                state[name].copy_(value.reshape(state[name].shape))
            else:  # a count that is a Python number
                state[name] = int(value)
        with torch.no_grad():
            weight.copy_(table)
    else:
        train_unfused(chosen, weight, some(1))
        with torch.no_grad():
            table.copy_(weight)
        state = module.fused_optimizer.state_dict()["state"]["t.weight"]
        for key, value in state.items():
            held = torch.as_tensor(chosen.state[weight][names[key.removeprefix("t.")]])
            value.copy_(held.reshape(value.shape))
    train_fused(module, some(5))
    train_unfused(chosen, weight, some(5))
    error = float((table.detach() - weight.detach()).abs().max())  # after six steps of values around 1
    expect(error <= 2e-6, "the fused and the unfused table within 2e-6", error)


@pytest.mark.clause("FUSED-071")
@pytest.mark.needs("EmbeddingBagCollection", "CombinedOptimizer")
def test_combined_checkpoint(impl):
    """In a combination with a dense optimizer, fused state is saved and loaded under its keys."""

    def make() -> tuple[Any, Any, Any]:
        module, params = collection(impl, "Adam"), parameters()
        whole = impl.CombinedOptimizer([("sparse", module.fused_optimizer), ("dense", adam(impl, params))])
        return module, params, whole

    module, params, whole = make()
    fit(module, jagged(BAGS), steps=2)
    set_grads(params)
    whole.step()
    saved = snapshot(whole.state_dict())
    expect("t.momentum1" in saved["state"]["sparse.t.weight"], "sparse.t.weight", list(saved["state"]))
    other, _, loaded = make()
    loaded.init_state()
    loaded.load_state_dict(saved)
    expect_unchanged(saved["state"], loaded.state_dict()["state"], "the loaded state")
    expect_unchanged(
        snapshot(everything(module)["state"]), everything(other)["state"], "the state of the module"
    )


# --- clipping -------------------------------------------------------------------------------------


def clipped(impl: Any, optimizer: Any, kind: str, bound: float, **options: Any) -> Any:
    """Put clipping around a fused optimizer; None where it is refused, which is as good."""
    try:
        return impl.GradientClippingOptimizer(
            optimizer, getattr(impl.GradientClipping, kind), bound, **options
        )
    except ValueError:
        return None


@pytest.mark.clause("FUSED-072")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
@pytest.mark.parametrize("window", [1, 2])
def test_clipping_by_value(impl, window):
    """Clipping by value bounds the summed gradient of each row in the backward pass, or it is refused."""
    accumulating = {"use_accumulate": True, "accumulate_step": window} if window > 1 else {}
    chosen = "AccumulateSGD" if accumulating else "SGD"
    module = collection(impl, chosen, {"lr": 1.0, **accumulating}, tables=ONE)
    if clipped(impl, module.fused_optimizer, "VALUE", 0.5) is None:
        return
    before = tables_of(module)["t"].detach().clone()
    rows = [[0, [0.25, 0.5, -0.5, 0.0]], [0, [0.125, 0.5, -0.5, 0.0]], [1, [0.25, -8.0, 0.0, 0.5]]]
    for _ in range(window):
        scale = torch.tensor([grad for _, grad in rows]) / window
        (module(jagged({"f": [[row] for row, _ in rows]}))["f"] * scale).sum().backward()
    wanted = torch.zeros(6, 4)
    wanted[0] = torch.tensor([0.375, 0.5, -0.5, 0.0])
    wanted[1] = torch.tensor([0.25, -0.5, 0.0, 0.5])
    expect_close(before - tables_of(module)["t"].detach(), wanted.double(), "what was subtracted", ulps=2**22)


@pytest.mark.clause("FUSED-072")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
@pytest.mark.parametrize("norm_type", [1.0, 2.0, "inf"])
def test_clipping_by_norm(impl, norm_type):
    """Clipping by norm takes that of the summed gradients of all rows of all tables, or it is refused."""
    tables = (("t", 6, 4, ("f",)), ("u", 5, 4, ("h",)))
    module = collection(impl, "SGD", {"lr": 1.0}, tables=tables)
    wrapper = clipped(impl, module.fused_optimizer, "NORM", 1.0, norm_type=norm_type)
    if wrapper is None:
        return
    before = snapshot(tables_of(module))
    wrapper.zero_grad()
    outputs = module(jagged({"f": [[0], [0], [1]], "h": [[3], [3], []]}))
    grads = torch.tensor([[1.0, 2.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0], [0.0, 0.0, -4.0, 0.0]])
    ((outputs["f"] * grads).sum() + outputs["h"][:, :1].sum()).backward()
    wrapper.step()
    total = {"t": torch.zeros(6, 4), "u": torch.zeros(5, 4)}
    total["t"][0], total["t"][1], total["u"][3, 0] = torch.tensor([3.0, 4.0, 0, 0]), grads[2], 2.0
    flat = torch.cat([each.reshape(-1) for each in total.values()]).double()
    norm = torch.linalg.vector_norm(flat, float(norm_type))
    for name, table in tables_of(module).items():
        wanted = total[name].double() / (norm + 1e-6)
        expect_close(before[name] - table.detach(), wanted, f"what was subtracted from {name}", ulps=2**22)
    if hasattr(wrapper, "last_total_grad_norm"):
        expect_close(float(wrapper.last_total_grad_norm), float(norm), "last_total_grad_norm", ulps=2**32)


@pytest.mark.clause("FUSED-072")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_clipping_by_norm_nonfinite(impl):
    """A norm that is not finite spoils no row that is."""
    module = collection(impl, "SGD", {"lr": 1.0}, tables=ONE)
    if clipped(impl, module.fused_optimizer, "NORM", 1.0) is None:
        return
    grads = torch.ones(2, 4)
    grads[0, 0] = float("nan")
    (module(jagged({"f": [[0], [1]]}))["f"] * grads).sum().backward()
    expect(torch.isfinite(tables_of(module)["t"].detach()[1:]).all(), "finite rows", tables_of(module)["t"])


@pytest.mark.clause("FUSED-073")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
@pytest.mark.parametrize("kind", ["NORM", "VALUE"])
def test_clipping_of_a_mixed_tree(impl, kind):
    """In a mixed tree the dense part is clipped; a fused part that is not, is warned of."""
    module, params = collection(impl, "SGD", {"lr": 1.0}, tables=ONE), parameters(1)
    dense = impl.KeyedOptimizerWrapper(params, lambda listed: torch.optim.SGD(listed, lr=1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = clipped(impl, impl.CombinedOptimizer([module.fused_optimizer, dense]), kind, 0.5)
    if whole is None:
        return
    table = tables_of(module)["t"]
    before = table.detach().clone()
    (module(jagged({"f": [[0]]}))["f"] * 8.0).sum().backward()
    taken = float((before - table.detach()).max())
    expect(taken <= 0.5001 or caught, "a clipped table or a warning", f"{taken} without a warning")
    params["p0"].grad = torch.tensor([8.0, 0.0, 0.0])
    weight = params["p0"].detach().clone()
    whole.step()
    step = (weight - params["p0"].detach()).double()
    expect_close(step, torch.tensor([0.5, 0.0, 0.0]).double(), "the dense step", ulps=2**34)


@pytest.mark.clause("FUSED-074")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_two_modules_by_norm(impl):
    """The norm of two modules, unknown in the backward pass of one, is refused or warned of."""
    modules = [collection(impl, "SGD", tables=ONE) for _ in range(2)]
    whole = impl.CombinedOptimizer(
        [(str(number), each.fused_optimizer) for number, each in enumerate(modules)]
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapper = clipped(impl, whole, "NORM", 0.5)
    expect(wrapper is None or caught, "an error or a warning", "neither")


@pytest.mark.clause("FUSED-075")
@pytest.mark.needs("EmbeddingBagCollection", "GradientClippingOptimizer")
def test_nested_clipping(impl):
    """Clipping around clipping applies both; clipping that takes its place applies alone."""
    module = collection(impl, "SGD", {"lr": 1.0}, tables=ONE)
    inner = clipped(impl, module.fused_optimizer, "VALUE", 0.25)
    if inner is None:
        return

    def taken() -> float:
        before = float(tables_of(module)["t"].detach()[0, 0])
        (module(jagged({"f": [[0]]}))["f"] * 8.0).sum().backward()
        return round(before - float(tables_of(module)["t"].detach()[0, 0]), 4)

    clipped(impl, inner, "VALUE", 0.5)
    expect_equal(taken(), 0.25, "step bounded by both")
    clipped(impl, module.fused_optimizer, "VALUE", 2.0)
    expect_equal(taken(), 2.0, "step bounded by the new one alone")


@pytest.mark.clause("FUSED-076")
@pytest.mark.needs("EmbeddingBagCollection", "KeyedOptimizer")
def test_no_group_from_outside(impl):
    """A group of other parameters is refused: no backward pass of the module would train them."""
    module = collection(impl)
    group = {"params": {"p": torch.nn.Parameter(torch.ones(2))}}
    expect_raises(lambda: module.fused_optimizer.add_param_group(group), ValueError, expected="ValueError")
    expect_equal(len(module.fused_optimizer.param_groups), 1, "number of groups")


@pytest.mark.clause("FUSED-077")
@pytest.mark.needs("EmbeddingBagCollection", "KeyedOptimizer")
def test_init_state(impl):
    """init_state of the fused optimizer changes neither tables nor state nor counts."""
    module = collection(impl, "Adam")
    fit(module, jagged(BAGS))
    before = snapshot(everything(module))
    module.fused_optimizer.init_state()
    expect_unchanged(before, everything(module), "the module")
    other = collection(impl, "Adam")
    for each in (module, other):
        fit(each, jagged(BAGS), seed=4)
    expect_bits(
        tables_of(module)["u"].detach()[[1, 2, 4]],
        tables_of(other)["u"].detach()[[1, 2, 4]],
        "rows without lookups",
    )
