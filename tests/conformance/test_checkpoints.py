"""Checkpoints move between the fused module, the unfused optimizers and FBGEMM, and lose nothing."""

import copy
import importlib

import pytest
import torch

from keyedopt import reference
from keyedopt.reference.embedding import keys

ROWS, WIDTH = 6, 4
FUSED = {
    "SGD": {},
    "SGD-momentum": {"momentum": 0.9},
    "LarsSGD": {"momentum": 0.5},
    "Ftrl": {"l1": 0.01},
    "Adagrad": {"eps": 1e-8},
    "Adagrad-decay": {"eps": 1e-8, "lr_decay": 0.1},
    "RowWiseAdagrad": {"eps": 1e-8},
    "Adam": {},
    "Adam-per-row": {"bias_correction": "per_row"},
    "SparseAdam": {},
    "PartialRowWiseAdam": {},
    "LAMB": {"weight_decay": 0.01},
    "PartialRowWiseLAMB": {},
    "AccumulateSGD": {"use_accumulate": True, "accumulate_step": 2, "momentum": 0.9},
    "AccumulateAdagrad": {"use_accumulate": True, "accumulate_step": 2},
    "AccumulateAdam": {"use_accumulate": True, "accumulate_step": 2},
    "AccumulateAdamW": {"use_accumulate": True, "accumulate_step": 2},
    "AccumulateRowWiseAdagrad": {"use_accumulate": True, "accumulate_step": 2},
}
FBGEMM = ("SGD", "Adagrad", "RowWiseAdagrad")


def gradients(seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, ROWS, (5,), generator=generator)
    return rows, torch.randn(5, WIDTH, generator=generator)


def table():
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(99))


class Fused:
    """A module of the reference with one table."""

    def __init__(self, name, weight):
        kind, options = name.partition("-")[0], {"lr": 0.1, **FUSED[name]}
        config = reference.EmbeddingBagConfig(
            ROWS, WIDTH, "t", feature_names=["f"], init_fn=weight_of(weight)
        )
        self.name, self.kind = name, kind
        self.module = reference.EmbeddingBagCollection([config], getattr(reference, kind), options)
        self.weight = self.module.fused_optimizer.params["t.weight"]

    def train(self, seeds):
        for seed in seeds:
            rows, grads = gradients(seed)
            bags = {"f": (rows, torch.arange(len(rows) + 1))}
            (self.module(bags)["f"] * grads).sum().backward()

    def saved(self):
        return self.module.fused_optimizer.state_dict()["state"]["t.weight"]

    def load(self, entry):
        self.module.fused_optimizer.load_state_dict({"state": {"t.weight": entry}})


class Unfused:
    """The unfused optimizer of one table, with sparse gradients."""

    def __init__(self, name, weight):
        self.weight = torch.nn.Parameter(weight.detach().clone())
        options = {"lr": 0.1, **FUSED[name]}
        self.optimizer = getattr(reference, name.partition("-")[0])([self.weight], **options)

    def train(self, seeds):
        for seed in seeds:
            rows, grads = gradients(seed)
            self.weight.grad = torch.sparse_coo_tensor(
                rows[None], grads, self.weight.shape, check_invariants=True
            )
            self.optimizer.step()

    def saved(self):
        return self.optimizer.state_dict()["state"].get(0, {})

    def load(self, entry):
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": {0: entry} if entry else {}})


class Fbgemm:
    """FBGEMM's table-batched embeddings with one table."""

    def __init__(self, name, weight):
        from keyedopt.conformance.targets.adapters import fbgemm

        kinds = {
            "SGD": torch.optim.SGD,
            "Adagrad": torch.optim.Adagrad,
            "RowWiseAdagrad": fbgemm.RowWiseAdagrad,
        }
        config = fbgemm.EmbeddingBagConfig(ROWS, WIDTH, "t", feature_names=["f"], init_fn=weight_of(weight))
        self.module = fbgemm.EmbeddingBagCollection([config], kinds[name], {"lr": 0.1, "eps": 1e-8})
        self.tbe = self.module._tbe
        self.weight = self.tbe.split_embedding_weights()[0]

    train = Fused.train

    def saved(self):
        return {**next(iter(self.tbe.get_optimizer_state()), {}), "iter": self.tbe.iter}

    def load(self, entry):
        live = next(iter(self.tbe.get_optimizer_state()), {})
        assert set(entry) - {"iter"} == set(live)
        for name, tensor in live.items():
            assert tensor.shape == entry[name].shape
            tensor.copy_(entry[name])


MAKERS = {"fused": Fused, "unfused": Unfused, "fbgemm": Fbgemm}


def weight_of(weight):
    def fill(parameter):
        with torch.no_grad():
            parameter.copy_(weight)

    return fill


def shipped(entry):
    return copy.deepcopy(
        {key: value.clone() if torch.is_tensor(value) else value for key, value in entry.items()}
    )


def lr_decay(name):
    return FUSED[name].get("lr_decay", 0.0)


def goes_on(name, source, target, steps):
    """Train in one form, take the checkpoint to the other, and go on in both."""
    first = MAKERS[source](name, table())
    first.train(range(steps))
    second = MAKERS[target](name, first.weight)
    kind = name.partition("-")[0]
    entry = keys.convert(shipped(first.saved()), kind, source, target, "t", lr_decay=lr_decay(name))
    second.load(entry)
    first.train(range(20, 25))
    second.train(range(20, 25))
    error = float((first.weight.detach() - second.weight.detach()).abs().max())
    assert error <= 2e-6, error


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(("source", "target"), [("fused", "unfused"), ("unfused", "fused")])
def test_fused_and_unfused_go_on_along_the_same_trajectory(name, source, target, steps):
    goes_on(name, source, target, steps)


@pytest.mark.parametrize("name", FBGEMM)
@pytest.mark.parametrize("other", ["fused", "unfused"])
@pytest.mark.parametrize("way", ["to", "from"])
def test_fbgemm_goes_on_along_the_same_trajectory(name, other, way):
    pytest.importorskip("fbgemm_gpu", reason="FBGEMM is in the extra `cpu`")
    goes_on(name, *((other, "fbgemm") if way == "to" else ("fbgemm", other)), steps=4)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        (form, name)
        for form in ("unfused", "fbgemm", "torchrec")
        for name in FUSED
        if "Accumulate" not in name and (form == "unfused" or name != "Ftrl")
    ],
)
def test_there_and_back_loses_nothing(name, form):
    fused = Fused(name, table())
    fused.train(range(4))
    before, decay = shipped(fused.saved()), lr_decay(name)
    there = keys.convert(before, fused.kind, "fused", form, "t", lr_decay=decay)
    back = keys.convert(there, fused.kind, form, "fused", "t", lr_decay=decay)
    assert back.keys() == before.keys()
    for key, value in before.items():
        assert back[key].dtype == value.dtype
        assert torch.equal(back[key], value)


@pytest.mark.parametrize(
    ("state", "kind", "source", "target"),
    [
        ({"t.momentum1": torch.ones(6)}, "Adam", "fused", "unfused"),
        ({"t.momentum1": torch.ones(6, 4), "t.exp_avg_sq": torch.ones(6, 4)}, "Adam", "fused", "unfused"),
        ({"t.momentum1": torch.ones(6), "t.speed": torch.ones(1)}, "RowWiseAdagrad", "fused", "fbgemm"),
        ({"t.window": {}}, "SGD", "fused", "fbgemm"),
        ({"t.momentum1": torch.ones(6, 4), "t.linear": torch.ones(6, 4)}, "Ftrl", "fused", "fbgemm"),
        ({}, "Adagrad", "unfused", "fused"),
        ({}, "Rprop", "unfused", "fused"),
        ({}, "SGD", "unfused", "sharded"),
    ],
)
def test_what_has_no_place_is_refused(state, kind, source, target):
    with pytest.raises(ValueError, match=r"state|conversion|lacks"):
        keys.convert(state, kind, source, target, "t")


def test_the_table_in_the_docstring_names_every_state():
    for names in {name for tensors in keys.TENSORS.values() for entry in tensors for name in entry}:
        assert names in keys.__doc__
    for names in keys.COUNTS.values():
        assert all(name in keys.__doc__ for name in names)


@pytest.mark.parametrize("library", ["reference", "fused"])
def test_a_table_is_not_called_what_a_module_dict_has(library):
    """Torch's own error speaks of an attribute, not of a table."""
    impl = importlib.import_module(f"keyedopt.{library}")
    table = impl.EmbeddingBagConfig(4, 4, name="items", feature_names=["f"])
    with pytest.raises(ValueError, match="name must not be 'items'"):
        impl.EmbeddingBagCollection([table])
