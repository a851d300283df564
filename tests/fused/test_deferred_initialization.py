"""Tables are made on the device "meta", get memory by `to_empty`, and train as tables made at once."""

import copy
import pickle

import pytest
import torch

from keyedopt import fused, reference

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [reference, fused])
OPTIMIZERS = (
    ("SGD", {"momentum": 0.5}),
    ("Adagrad", {"initial_accumulator_value": 0.25, "lr_decay": 0.5}),
    ("RowWiseAdagrad", {}),
    ("Adam", {"bias_correction": "per_row"}),
    ("Adam", {"optimizer_state_dtypes": {"momentum1": torch.bfloat16}}),
    ("AccumulateSGD", {"use_accumulate": True, "accumulate_step": 2}),
    (None, {}),
)


def steps_of_five(weight):
    return weight.copy_(torch.arange(weight.numel()).view_as(weight) / 5)


def make(implementation, name, options, device):
    table = implementation.EmbeddingBagConfig(6, 4, "t", feature_names=["f"], init_fn=steps_of_five)
    kind = None if name is None else getattr(implementation, name)
    kwargs = None if name is None else {"lr": 0.1, **options}
    return implementation.EmbeddingBagCollection([table], kind, kwargs, device=device)


def train(module):
    for rows in ([1, 2, 1], [3], [1], [2]):
        bags = {"f": (torch.tensor(rows), torch.tensor([0, len(rows)]))}
        module(bags)["f"].square().sum().backward()


def everything(module):
    return {
        "weights": module.state_dict(),
        **{
            key: {name: value for name, value in entry.items() if torch.is_tensor(value)}
            for key, entry in module.fused_optimizer.state_dict()["state"].items()
        },
    }


@IMPLEMENTATIONS
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS)
def test_tables_from_the_meta_device_train_as_others(implementation, name, options):
    at_once = make(implementation, name, options, "cpu")
    deferred = make(implementation, name, options, "meta")
    assert all(param.is_meta for param in deferred.parameters())
    deferred.to_empty(device="cpu")
    deferred.reset_parameters()
    for module in (at_once, deferred):
        train(module)
    torch.testing.assert_close(everything(deferred), everything(at_once), rtol=0, atol=0)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(deferred)))
    for module in (copied, deferred):
        train(module)
    torch.testing.assert_close(everything(copied), everything(deferred), rtol=0, atol=0)


@IMPLEMENTATIONS
def test_values_are_drawn_between_the_bounds(implementation):
    table = implementation.EmbeddingBagConfig(
        50, 4, "t", feature_names=["f"], weight_init_min=2.0, weight_init_max=3.0
    )
    module = implementation.EmbeddingBagCollection([table], device="meta").to_empty(device="cpu")
    module.reset_parameters()
    (weight,) = module.parameters()
    assert 2.0 <= weight.min() < 2.2
    assert 2.8 < weight.max() <= 3.0


@IMPLEMENTATIONS
def test_the_module_is_inside_another(implementation):
    model = torch.nn.Sequential(make(implementation, "RowWiseAdagrad", {}, "meta"))
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    at_once = make(implementation, "RowWiseAdagrad", {}, "cpu")
    for module in (at_once, model[0]):
        train(module)
    torch.testing.assert_close(everything(model[0]), everything(at_once), rtol=0, atol=0)
