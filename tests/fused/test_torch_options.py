"""Options of torch's optimizers, and the groups that optimizers save."""

import copy
import pickle

import pytest
import torch

from keyedopt import fused, reference

LIBRARIES = pytest.mark.parametrize("library", [reference, fused], ids=["reference", "fused"])
NAMES = pytest.mark.parametrize("name", ["SGD", "Adagrad", "RowWiseAdagrad", "Adam", "AdamW"])


def stepped(library, name, **options):
    weight = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = getattr(library, name)([weight], lr=0.1, **options)
    weight.grad = torch.ones(4, 3)
    optimizer.step()
    return optimizer


@LIBRARIES
@NAMES
@pytest.mark.parametrize(
    "options", [{"foreach": None}, {"foreach": True}, {"fused": True}, {"differentiable": False}]
)
def test_options_without_effect_are_accepted(library, name, options):
    plain, optimizer = stepped(library, name), stepped(library, name, **options)
    torch.testing.assert_close(optimizer.state_dict(), plain.state_dict(), rtol=0, atol=0)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 3))], **options})
    assert optimizer.param_groups[0].keys() == optimizer.param_groups[1].keys()


@LIBRARIES
@pytest.mark.parametrize(
    ("name", "option"),
    [("SGD", "differentiable"), ("Adagrad", "differentiable"), ("Adam", "amsgrad"), ("AdamW", "capturable")],
)
def test_options_without_support_raise(library, name, option):
    for options in ({option: True}, {}):
        group = {"params": [torch.nn.Parameter(torch.ones(2, 3))]} | ({} if options else {option: True})
        with pytest.raises(ValueError, match=option):
            getattr(library, name)([group], **options)


@LIBRARIES
@NAMES
def test_unknown_options_raise_type_error(library, name):
    with pytest.raises(TypeError, match="unexpected keyword argument 'foreeach'"):
        stepped(library, name, foreeach=True)


@LIBRARIES
@NAMES
def test_copies_and_loads_add_no_key(library, name):
    optimizer = stepped(library, name)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert list(one.state_dict()["param_groups"][0]) == list(saved["param_groups"][0])
        torch.testing.assert_close(one.state_dict(), saved, rtol=0, atol=0)


@LIBRARIES
def test_state_dicts_with_strings_are_loaded(library):
    optimizer = stepped(library, "Adam")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0] |= {"decay": "none", "rows": "nonzero"}
    optimizer.load_state_dict(saved)
    assert (optimizer.param_groups[0]["decay"], optimizer.param_groups[0]["rows"]) == ("none", "nonzero")


@LIBRARIES
@pytest.mark.parametrize("name", ["Adam", "SparseAdam"])
def test_a_hook_may_return_a_saved_state_dict(library, name):
    optimizer = getattr(library, name)([torch.nn.Parameter(torch.ones(4, 3))], lr=0.1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.register_load_state_dict_pre_hook(lambda optimizer, given: saved)
    optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert optimizer.param_groups[0]["rows"] == "given"
    assert optimizer.state_dict() == saved


@LIBRARIES
@pytest.mark.parametrize("name", ["Adam", "AdamW", "SparseAdam"])
def test_a_hook_may_remove_options_from_the_saved_groups(library, name):
    optimizer = getattr(library, name)([torch.nn.Parameter(torch.ones(4, 3))], lr=0.1)

    def without_options(optimizer, saved):
        groups = [{"params": group["params"], "lr": group["lr"]} for group in saved["param_groups"]]
        return saved | {"param_groups": groups}

    optimizer.register_state_dict_post_hook(without_options)
    assert optimizer.state_dict()["param_groups"] == [{"params": [0], "lr": 0.1}]


@LIBRARIES
@pytest.mark.parametrize("number", [-1, 3])
def test_an_unknown_number_changes_nothing(library, number):
    optimizer = stepped(library, "Adam")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["decay"] = number
    with pytest.raises(ValueError, match="decay"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["decay"] == "l2"


@LIBRARIES
def test_torchs_state_dict_with_an_unsupported_option_is_refused(library):
    weight = torch.nn.Parameter(torch.ones(4, 3))
    weight.grad = torch.ones(4, 3)
    theirs = torch.optim.Adam([weight], amsgrad=True)
    theirs.step()
    with pytest.raises(ValueError, match="amsgrad"):
        library.Adam([weight]).load_state_dict(theirs.state_dict())


DECAYS = {"Adam": {}, "AdamW": {}, "Adam decoupled": {"decoupled_weight_decay": True}}


@LIBRARIES
@pytest.mark.parametrize("saved", DECAYS)
@pytest.mark.parametrize("loads", DECAYS)
@pytest.mark.parametrize("direction", ["from torch", "to torch", "itself"])
def test_a_checkpoint_keeps_its_decay_as_in_torch(library, saved, loads, direction):
    first = torch.optim if direction == "from torch" else library
    second = torch.optim if direction == "to torch" else library
    expected = decayed(torch.optim, saved, torch.optim, loads)
    torch.testing.assert_close(decayed(first, saved, second, loads), expected)


@LIBRARIES
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_each_group_of_torchs_checkpoint_gets_the_options_that_it_lacks(library, name):
    expected = decayed(torch.optim, name, torch.optim, name)
    torch.testing.assert_close(decayed(torch.optim, name, library, name), expected)


def decayed(first, saved, second, loads):
    """Return weights of two groups after a step of one optimizer, and another of one that has loaded it."""
    weights, before = [torch.nn.Parameter(torch.ones(4, 3)) for _ in range(2)], {}
    for library, name in ((first, saved), (second, loads)):
        groups = [{"params": [weight], "lr": rate} for weight, rate in zip(weights, (0.1, 0.3), strict=True)]
        optimizer = getattr(library, name.split()[0])(groups, weight_decay=0.5, **DECAYS.get(name, {}))
        if before:
            optimizer.load_state_dict(before)
        for weight in weights:
            weight.grad = torch.full((4, 3), 0.25)
        optimizer.step()
        before = optimizer.state_dict()
    return [weight.detach() for weight in weights]


@LIBRARIES
def test_two_names_of_decay_that_contradict_each_other_are_refused(library):
    weight = torch.nn.Parameter(torch.ones(4, 3))
    contradicting = {"decay": "none", "decoupled_weight_decay": True}
    for name, options in (("Adam", contradicting), ("AdamW", {"decoupled_weight_decay": False})):
        with pytest.raises(ValueError, match="contradicts decoupled_weight_decay"):
            getattr(library, name)([weight], **options)
    for options in ({"decoupled_weight_decay": False}, {"decay": "none"}):  # a copy would lose them
        with pytest.raises(ValueError, match="decay of AdamW must be 'decoupled'"):
            library.AdamW([{"params": [weight], **options}])
    optimizer = stepped(library, "Adam", decay="decoupled")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["decay"] = "none"  # the other name is there for torch to read
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["decay"] == "none"
    with pytest.raises(ValueError, match="decay='none' contradicts decoupled_weight_decay=True"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4, 3))], **contradicting})
    assert len(optimizer.param_groups) == 1
