"""Embedding modules of `fused`, where they could differ from the reference's: graphs, backends, rounding."""

import copy
import gc
import pickle
import threading
import weakref

import pytest
import torch

from keyedopt import fused, reference
from keyedopt.fused import backends
from keyedopt.fused.embedding.inputs import parse

BAGS = {"f": (torch.tensor([0, 1, 1, 3]), torch.tensor([0, 2, 4]))}


def ones(weight):
    weight.data.fill_(1.0)


def make(kind=fused.SGD, backend="auto", dtype=torch.float32, width=4, **options):
    more = {"rounding_seed": options.pop("rounding_seed")} if "rounding_seed" in options else {}
    config = fused.EmbeddingBagConfig(5, width, "t", dtype, ["f"], init_fn=ones)
    return fused.EmbeddingBagCollection([config], kind, {"lr": 0.5, **options}, backend=backend, **more)


def table(module):
    return module.embedding_bags["t"].weight


def collected(module):
    """Count the gradients that are collected for an update."""
    references = [each for listed in module._backward._collected.values() for each in listed]
    return sum(len(each()) for each in references if each())


# --- graphs ---------------------------------------------------------------------------------------


def test_autograd_grad_updates_nothing_and_leaves_nothing():
    module, scale = make(), torch.ones((), requires_grad=True)
    output = module(BAGS)["f"]
    torch.autograd.grad(output.sum() * scale, scale)
    assert torch.equal(table(module).detach(), torch.ones(5, 4))
    del output
    gc.collect()
    assert not collected(module)


def test_backward_for_some_inputs_updates_nothing():
    module, other = make(), torch.ones(2, 4, requires_grad=True)
    (module(BAGS)["f"] * other).sum().backward(inputs=[other])
    assert torch.equal(table(module).detach(), torch.ones(5, 4))
    assert other.grad is not None


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("backend", ["native", "torch", "fbgemm", "reference"])
def test_a_table_that_was_saved_for_a_backward_pass_is_refused_after_an_update(backend, deferred):
    """An update is written in place, as that of an optimizer: autograd must not go on with other numbers."""
    if backend == "reference":
        module = make_reference()
    else:
        if backends.available()[backend]:
            pytest.skip(f"{backend}: {backends.available()[backend]}")
        module = make(fused.Adagrad, backend=backend, eps=1e-8)
    bound = type("Bound", (), {})()
    if deferred:
        module.fused_optimizer.defer_updates(bound, inside=())
    weight = table(module)
    (state,) = (entry["t.momentum1"] for entry in module.fused_optimizer.state.values())
    before = weight._version, state._version
    saved = weight.square().sum()
    module(BAGS)["f"].sum().backward()
    module.fused_optimizer.step()
    assert weight._version > before[0]
    assert state._version > before[1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


def make_reference():
    config = reference.EmbeddingBagConfig(5, 4, "t", torch.float32, ["f"], init_fn=ones)
    return reference.EmbeddingBagCollection([config], reference.Adagrad, {"lr": 0.5, "eps": 1e-8})


def test_two_passes_over_one_graph_are_two_steps():
    module = make()
    loss = module(BAGS)["f"].sum()
    loss.backward(retain_graph=True)
    loss.backward()
    assert table(module)[:, 0].tolist() == [0.0, -1.0, 1.0, 0.0, 1.0]
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    assert table(module)[1, 0] == -1.0


def test_several_forwards_of_one_loss_are_one_step():
    module, once = make(fused.Adam), make(fused.Adam)
    (module(BAGS)["f"].sum() + module(BAGS)["f"].sum()).backward()
    (2 * once(BAGS)["f"].sum()).backward()
    assert torch.equal(table(module), table(once))
    assert int(module.fused_optimizer.state_dict()["state"]["t.weight"]["t.iter"]) == 1


def test_passes_of_several_threads_do_not_mix():
    modules = [make(backend="torch") for _ in range(4)]
    shared = make(backend="torch")
    losses = [shared(BAGS)["f"].sum() for _ in range(8)]
    threads = [threading.Thread(target=loss.backward) for loss in losses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not collected(shared)
    for module in modules:
        module(BAGS)["f"].sum().backward()
        assert table(module)[:, 0].tolist() == [0.5, 0.0, 1.0, 0.5, 1.0]


def test_an_index_that_is_changed_before_the_backward_pass_is_an_error():
    module = make()
    values = torch.tensor([0, 1])
    loss = module({"f": (values, torch.tensor([0, 2]))})["f"].sum()
    values[0] = 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    assert torch.equal(table(module).detach(), torch.ones(5, 4))


def test_a_second_derivative_is_an_error():
    weights = torch.ones(4, requires_grad=True)
    config = fused.EmbeddingBagConfig(5, 4, "t", feature_names=["f"])
    module = fused.EmbeddingBagCollection([config], fused.SGD, {"lr": 0.5}, is_weighted=True)
    output = module({"f": (*BAGS["f"], weights)})["f"].square().sum()
    (slope,) = torch.autograd.grad(output, weights, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        slope.sum().backward()


@pytest.mark.parametrize("change", ["options", "dtype"])
def test_a_change_between_forward_and_backward_counts(change):
    module = make(backend="torch")
    loss = module(BAGS)["f"].sum()
    if change == "options":
        module.set_optimizer(torch.optim.SGD, [table(module)], {"lr": 0.25})
    else:
        module.double()
    loss.backward()
    step = 0.25 if change == "options" else 0.5
    assert table(module)[:, 0].tolist() == [1 - step, 1 - 2 * step, 1.0, 1 - step, 1.0]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_has_a_leaf_of_its_own(how):
    module = make(fused.Adagrad)
    module(BAGS)["f"].sum().backward()
    other = how(module)
    for each in (module, other):
        each(BAGS)["f"].sum().backward()
    assert torch.equal(table(module), table(other))
    assert other._backward._leaf is not module._backward._leaf


def test_a_module_is_freed():
    module = make()
    module(BAGS)["f"].sum().backward()
    seen = weakref.ref(module)
    del module
    gc.collect()
    assert seen() is None


# --- backends -------------------------------------------------------------------------------------


def test_auto_takes_the_fast_one_where_it_can():
    def chosen(module):
        return {group.backend.name for group in module.current_layout().groups}

    fast = "torch" if backends.available()["native"] else "native"
    assert chosen(make()) == {fast}
    assert chosen(make(dtype=torch.float64)) == {"torch"}
    assert chosen(make(backend="torch")) == {"torch"}


def test_the_environment_may_prefer_one(monkeypatch):
    monkeypatch.setenv(backends.PREFERRED, "torch")
    assert make().current_layout().groups[0].backend.name == "torch"
    monkeypatch.setenv(backends.PREFERRED, "fast")
    with pytest.raises(ValueError, match="fast"):
        make()


def test_an_unknown_backend_is_refused():
    with pytest.raises(ValueError, match="backend must be"):
        make(backend="cublas")


def test_a_missing_backend_names_its_extra(monkeypatch):
    monkeypatch.setitem(
        backends.BACKENDS, "fbgemm", backends.Registered("keyedopt.fused.backends.gone", "Gone", "cpu")
    )
    backends._load.cache_clear()
    try:
        assert "keyedopt[cpu]" in backends.available()["fbgemm"]
        with pytest.raises(RuntimeError, match=r"keyedopt\[cpu\]"):
            make(backend="fbgemm")
    finally:
        backends._load.cache_clear()


def test_a_backend_that_cannot_is_refused_at_once():
    if backends.available()["native"]:
        pytest.skip("the native backend was not built")
    with pytest.raises(ValueError, match="native"):
        make(backend="native", dtype=torch.float64)
    module = make(None, backend="native")
    with pytest.raises(ValueError, match="lr"):
        module.set_optimizer(fused.SGD, [table(module)], {"lr": -1.0})
    assert not module.fused_optimizer.param_groups


# --- steps ----------------------------------------------------------------------------------------


def test_nothing_is_written_where_one_of_two_groups_is_refused():
    configs = [fused.EmbeddingBagConfig(5, 4, name, feature_names=["f"], init_fn=ones) for name in ("t", "u")]
    module = fused.EmbeddingBagCollection(configs)
    first, second = module.parameters()
    module.set_optimizer(fused.SGD, [first], {"lr": 0.5})
    module.set_optimizer(fused.Adam, [second], {"lr": 0.5})
    module.fused_optimizer.param_groups[1]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr"):
        sum(output.sum() for output in module(BAGS).values()).backward()
    assert torch.equal(first.detach(), torch.ones(5, 4))
    module.fused_optimizer.param_groups[1]["lr"] = 1.0
    sum(output.sum() for output in module(BAGS).values()).backward()
    assert first[0, 0] == 0.5
    assert float(second[0, 0].detach()) == pytest.approx(0.0, abs=1e-6)


def test_tables_count_their_own_steps():
    configs = [
        fused.EmbeddingBagConfig(5, 4, name, feature_names=[name], init_fn=ones) for name in ("t", "u")
    ]
    module = fused.EmbeddingBagCollection(configs, fused.Adam, {"lr": 0.5})
    bags = dict.fromkeys(("t", "u"), BAGS["f"])
    for names in (("t",), ("t", "u"), ("u", "t")):
        outputs = module(bags)
        sum(outputs[name].sum() for name in names).backward()
    state = module.fused_optimizer.state_dict()["state"]
    assert [int(state[f"{name}.weight"][f"{name}.iter"]) for name in ("t", "u")] == [3, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["torch", "native"])
def test_stochastic_rounding_is_right_in_the_mean(dtype, backend):
    if backends.available()[backend]:
        pytest.skip("the native backend was not built")
    step = torch.finfo(dtype).eps / 16  # nearest rounding would never move a weight of 1
    means = []
    for seed in (0, 1):
        module = make(backend=backend, dtype=dtype, width=4096, lr=step, rounding_seed=1000 * seed)
        for _ in range(8):
            module({"f": (torch.tensor([2]), torch.tensor([0, 1]))})["f"].sum().backward()
        assert torch.equal(table(module)[0], torch.ones(4096, dtype=dtype))
        means.append(float((1 - table(module)[2].detach().double()).mean()) / (8 * step))
    # Each of 4096 columns takes 8 steps of a sixteenth, below 1 of an eighth, of a unit: σ is about 3 %.
    assert all(abs(mean - 1) < 0.15 for mean in means), means
    assert means[0] != means[1]


@pytest.mark.parametrize("seed", [-1, 1 << 63, 1.5, True, "7"])
def test_a_seed_that_no_backend_can_use_is_refused_before_a_table_is_made(seed):
    with pytest.raises(ValueError, match=r"rounding_seed must be an integer in \[0, 2\*\*63\), not"):
        make(dtype=torch.float16, rounding_seed=seed)


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_the_largest_seed_rounds(backend):
    if backends.available()[backend]:
        pytest.skip("the native backend was not built")
    module = make(backend=backend, dtype=torch.float16, rounding_seed=(1 << 63) - 1)
    for _ in range(2):
        module(BAGS)["f"].sum().backward()
    assert table(module).detach()[:, 0].tolist() == [0.0, -1.0, 1.0, 0.0, 1.0]


def test_weights_of_lookups_have_the_gradient_of_the_rows_as_they_were():
    config = fused.EmbeddingBagConfig(5, 4, "t", feature_names=["f"], init_fn=ones)
    module = fused.EmbeddingBagCollection([config], fused.SGD, {"lr": 0.5}, is_weighted=True)
    weights = torch.ones(4, requires_grad=True)
    output = module({"f": (*BAGS["f"], weights)})["f"]
    with torch.no_grad():
        table(module).mul_(3.0)
    output.sum().backward()
    assert weights.grad.tolist() == [4.0] * 4


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feature", "values", "offsets"),
    [
        ("f", [0, 1], [0, 1, 2]),
        ("g", [], [0]),
        ("g", [], [0, 0]),
        ("f", [5], [0, 1]),
        ("g", [3], [0, 1]),
        ("g", [-1], [0, 1]),
        ("f", [0, 1], [0, 2, 1]),
        ("f", [0, 1], [0, 2, 1, 2]),
        ("g", [0, 1], [1, 2]),
        ("h", [0, 1], [0, 1]),
        ("h", [0, 1], [0, 3]),
        ("h", [4, 4], [0, 1, 1, 2]),
    ],
)
def test_all_features_are_checked_together_as_one_by_one(feature, values, offsets):
    rows = {"f": 5, "g": 3, "h": 5}
    bags = {name: (torch.tensor([0, 2, 1]), torch.tensor([0, 0, 3])) for name in rows}
    bags[feature] = (torch.tensor(values, dtype=torch.int64), torch.tensor(offsets))
    inputs = parse(bags, list(rows), weighted=False)
    if inputs._are_valid(rows):
        inputs.check_contents(rows)
    else:
        with pytest.raises(ValueError, match=f"'{feature}'"):
            inputs.check_contents(rows)


@pytest.mark.parametrize("backend", ["native", "torch", "fbgemm"])
@pytest.mark.parametrize("sizes", [(2, 5), (5, 2)])
def test_a_row_that_one_of_two_tables_lacks_is_refused_with_the_name_of_the_feature(backend, sizes):
    configs = [
        fused.EmbeddingBagConfig(rows, 4, name, feature_names=["f"], init_fn=ones)
        for name, rows in zip("tu", sizes, strict=True)
    ]
    module = fused.EmbeddingBagCollection(configs, fused.SGD, {"lr": 0.5}, backend=backend)
    with pytest.raises(ValueError, match="'f'"):
        module({"f": (torch.tensor([3]), torch.tensor([0, 1]))})


def test_features_on_another_device_are_refused():
    module = make()
    values, offsets = (part.to("meta") for part in BAGS["f"])
    with pytest.raises(ValueError, match="'f' must be where table 't' is"):
        module({"f": (values, offsets)})
    with pytest.raises(ValueError, match="offsets of feature 'f'"):
        module({"f": (BAGS["f"][0], offsets)})


@pytest.mark.parametrize("backend", ["native", "torch", "fbgemm"])
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize(
    "memory",
    [torch.ones(5, 8), torch.ones(9, 4), torch.ones(4, 5).t(), torch.ones(1, 4).expand(5, 4)],
    ids=["wide", "high", "turned", "one row"],
)
def test_memory_that_state_does_not_go_with_is_not_written(backend, stepped, memory):
    if backends.available()[backend]:
        pytest.skip(f"{backend}: {backends.available()[backend]}")
    module = make(fused.Adagrad, backend=backend, eps=1e-8)
    if stepped:
        module(BAGS)["f"].sum().backward()
    (state,) = (entry["t.momentum1"] for entry in module.fused_optimizer.state.values())
    before = state.clone(), memory.clone()
    table(module).data = memory
    if backend == "torch" and memory.shape == (5, 4) and memory.stride(0):
        module(BAGS)["f"].sum().backward()  # it takes every layout
        assert not torch.equal(state, before[0])
        assert not torch.equal(memory, before[1])
        return
    with pytest.raises((ValueError, RuntimeError), match=r"contiguous|not go with|a row|tensor"):
        module(BAGS)["f"].sum().backward()
    assert torch.equal(state, before[0])
    assert torch.equal(memory, before[1])


def test_a_table_without_an_optimizer_is_the_parameter_that_the_module_has_now():
    config = fused.EmbeddingBagConfig(5, 4, "t", torch.float32, ["f"], init_fn=ones)
    module = fused.EmbeddingBagCollection([config])
    assert (module(BAGS)["f"] == 2).all()
    module.embedding_bags["t"].weight = torch.nn.Parameter(torch.full((5, 4), 3.0))
    assert (module(BAGS)["f"] == 6).all()


def test_views_with_gaps_are_looked_up_as_what_they_are():
    module, other = make(), make()
    values, offsets = BAGS["f"]
    spread = values.repeat_interleave(3)[::3], offsets.repeat_interleave(2)[::2]
    module({"f": spread})["f"].sum().backward()
    other(BAGS)["f"].sum().backward()
    assert torch.equal(table(module), table(other))


def test_a_window_is_as_small_as_its_rows():
    """Micro-batches of the same rows do not pile up, and small gradients are not lost on the way."""
    options = {"use_accumulate": True, "accumulate_step": 1000}
    module = make(fused.AccumulateSGD, **options)
    window = module.fused_optimizer.state[table(module)]["t.window"]
    for _ in range(999):
        (module(BAGS)["f"].sum() * 0.1).backward()
        assert sum(len(rows) for rows, _ in window.parts()) <= 2 * 3
    assert window.count == 999
    assert torch.equal(table(module).detach(), torch.ones(5, 4))
    (module(BAGS)["f"].sum() * 0.1).backward()
    assert window.count == 0
    assert table(module).detach()[:, 0].tolist() == pytest.approx([-49.0, -99.0, 1.0, -49.0, 1.0], rel=1e-5)
