"""Tables and FBGEMM's kernels have the same defaults; every default that differs is on the migration page."""

import inspect
import pathlib

import pytest
import torch

from keyedopt import fused, reference

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [reference, fused])
#: The argument of FBGEMM's module that is an option of an optimizer of tables.
NAMES = {
    "learning_rate": "lr",
    "eps": "eps",
    "weight_decay": "weight_decay",
    "momentum": "momentum",
    "eta": "eta",
    "beta1": "betas",
    "beta2": "betas",
}
#: The optimizers that FBGEMM has.
OPTIMIZERS = (
    "SGD",
    "LarsSGD",
    "Adagrad",
    "RowWiseAdagrad",
    "Adam",
    "PartialRowWiseAdam",
    "LAMB",
    "PartialRowWiseLAMB",
)
PAGE = pathlib.Path(__file__).parents[2] / "docs" / "tutorials" / "torchrec.md"


def options_of_tables(implementation, optimizer_class):
    table = implementation.EmbeddingBagConfig(4, 4, name="t", feature_names=["t"])
    module = implementation.EmbeddingBagCollection([table], optimizer_class)
    return module.fused_optimizer.param_groups[0]


def fbgemms_defaults(torchrec):
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

    signature = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__)
    return {name: signature.parameters[name].default for name in NAMES}


@IMPLEMENTATIONS
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_tables_have_the_defaults_of_fbgemm(torchrec, implementation, optimizer):
    defaults = fbgemms_defaults(torchrec)
    defaults = {NAMES[name]: value for name, value in defaults.items() if "beta" not in name} | {
        "betas": (defaults["beta1"], defaults["beta2"])
    }
    if optimizer == "SGD":
        defaults["momentum"] = 0.0  # only LARS has the argument
    options = options_of_tables(implementation, getattr(implementation, optimizer))
    common = defaults.keys() & options.keys()
    assert {name: options[name] for name in common} == {name: defaults[name] for name in common}
    assert "lr" in common


@IMPLEMENTATIONS
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_tables_with_torchs_class_have_the_defaults_of_those_with_keyedopts(implementation, name):
    theirs = options_of_tables(implementation, getattr(torch.optim, name))
    ours = options_of_tables(implementation, getattr(implementation, name))
    same = [key for key in ours if key not in ("params", "foreach", "fused", "capturable", "differentiable")]
    assert {key: theirs[key] for key in same} == {key: ours[key] for key in same}


@IMPLEMENTATIONS
def test_a_derived_class_and_arguments_come_first(implementation):
    class RowWiseAdagrad(implementation.RowWiseAdagrad):
        def __init__(self, params, lr=0.5, eps=0.25):
            super().__init__(params, lr, eps=eps)

    table = implementation.EmbeddingBagConfig(4, 4, name="t", feature_names=["t"])
    given = implementation.EmbeddingBagCollection([table], implementation.RowWiseAdagrad, {"eps": 0.125})
    assert given.fused_optimizer.param_groups[0]["eps"] == 0.125
    derived = options_of_tables(implementation, RowWiseAdagrad)
    assert (derived["lr"], derived["eps"]) == (0.5, 0.25)


@IMPLEMENTATIONS
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_page_lists_the_defaults_that_differ_from_those_of_the_class(implementation, optimizer):
    kind = getattr(implementation, optimizer)
    own = kind([torch.nn.Parameter(torch.zeros(4, 4))]).param_groups[0]
    options = options_of_tables(implementation, kind)
    differing = {key for key in own if key != "params" and own[key] != options[key]}
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `") and "1e-8 |" in line]
    rows += [line for line in PAGE.read_text().splitlines() if line.startswith("| `lr` of ")]
    listed = {
        row.split("`")[1]: row.split("|")[1].split(" of ")[1].replace(" and ", " ").split() for row in rows
    }
    assert differing == {key for key, names in listed.items() if optimizer in names}


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e-8])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RowWiseAdagrad"])
@IMPLEMENTATIONS
def test_a_step_without_options_is_that_of_torchrecs_fused_tables(torchrec, implementation, name, scale):
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    def config():
        return [torchrec.EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name="t", feature_names=["f"])]

    kind = RowWiseAdagrad if name == "RowWiseAdagrad" else getattr(torch.optim, name)
    ours = implementation.RowWiseAdagrad if name == "RowWiseAdagrad" else kind
    upstream = FusedEmbeddingBagCollection(config(), kind, {}, device=torch.device("cpu"))
    module = implementation.EmbeddingBagCollection(config(), ours, {})
    module.load_state_dict(upstream.state_dict())
    before = module.embedding_bags["t"].weight.detach().clone()
    input_ = torchrec.KeyedJaggedTensor(["f"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    grad = torch.tensor([[1.0, 2, 3, 4], [-1, 1, 2, 1]]) * scale
    for one in (upstream, module):
        one(input_)["f"].backward(grad)
    wanted = upstream.state_dict()["embedding_bags.t.weight"] - before
    # Weights are at most 1/3, so that both roundings of a weight and of a difference stay below 2**-25.
    torch.testing.assert_close(
        module.embedding_bags["t"].weight.detach() - before, wanted, rtol=1e-5, atol=2**-25
    )
