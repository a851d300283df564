"""What the reference and `fused` promise, and no clause asks of other implementations."""

import copy

import pytest
import torch

from keyedopt import fused, reference
from keyedopt.conformance.suite.support.sharded import process_group

both = pytest.mark.parametrize("library", [reference, fused])


def listed(rows: list[int], values: torch.Tensor, size: int) -> torch.Tensor:
    """Return a sparse gradient with these rows, which may occur twice."""
    return torch.sparse_coo_tensor(
        torch.tensor([rows]), values, (size, values.shape[1]), check_invariants=True
    )


@both
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RowWiseAdagrad", "Adam", "SparseAdam"])
@pytest.mark.parametrize("size", [2, 5])
def test_a_sparse_gradient_of_another_size_is_refused(library, name, size):
    first, second = (torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    optimizer = getattr(library, name)([{"params": [first]}, {"params": [second]}], lr=0.5)
    for param in (first, second):
        param.grad = listed([1], torch.ones(1, 2), 3)
    second.data = torch.ones(size, 2)
    with pytest.raises(RuntimeError, match=r"gradient is \(3, 2\)"):
        optimizer.step()
    assert first.eq(1).all()
    assert second.eq(1).all()


@both
@pytest.mark.parametrize("name", ["SGD", "AccumulateSGD"])
def test_a_sum_of_duplicates_that_half_precision_lacks(library, name):
    param = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.float16))
    param.grad = listed([1, 1], torch.full((2, 2), 2.0**15, dtype=torch.float16), 3)
    getattr(library, name)([param], lr=2.0**-16).step()
    assert param.tolist() == [[0, 0], [-1, -1], [0, 0]]


@both
def test_a_window_that_becomes_shorter_than_what_it_holds_ends_with_the_next_step(library):
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = library.AccumulateSGD([param], lr=1.0, use_accumulate=True, accumulate_step=4)
    for step in range(4):
        if step == 3:
            optimizer.param_groups[0]["accumulate_step"] = 2
        param.grad = torch.ones(2)
        assert not param.any()
        optimizer.step()
    assert param.eq(-4).all()


@both
def test_the_numbers_of_options_in_checkpoints_stay(library):
    table = torch.nn.Parameter(torch.ones(2, 2))
    for name, option, values in (
        ("SGD", "rows", ("given", "all", "nonzero")),
        ("Adam", "decay", ("none", "l2", "decoupled")),
        ("Adam", "bias_correction", ("global", "per_row")),
    ):
        for number, value in enumerate(values):
            saved = getattr(library, name)([table], lr=0.5, **{option: value}).state_dict()
            assert saved["param_groups"][0][option] == number


@both
def test_members_whose_hooks_save_the_same_entry_are_refused(library):
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    members = [library.KeyedOptimizerWrapper({f"p{n}": one}, library.SGD) for n, one in enumerate(params)]
    for member in members:
        member.register_state_dict_post_hook(lambda one, saved: saved["state"].update(extra={"n": 1.0}))
    with pytest.raises(ValueError, match="extra"):
        library.CombinedOptimizer(members).state_dict()


@both
def test_init_state_takes_no_step_that_hooks_see(library):
    param = torch.nn.Parameter(torch.ones(2))
    seen = []
    inner = torch.optim.Adam([param])
    optimizer = library.KeyedOptimizerWrapper({"p": param}, lambda listed: inner)
    for one in (inner, optimizer):
        one.register_step_pre_hook(lambda *_: seen.append("before"))
        one.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.init_state()
    assert optimizer.state[param]
    assert not seen


@both
def test_init_state_completes_the_state_of_both_semi_synchronous_optimizers(library):
    params = {f"p{n}": torch.nn.Parameter(torch.ones(2)) for n in range(2)}
    local = library.KeyedOptimizerWrapper(params, lambda listed: library.Adam(listed, lr=0.5))
    shared = library.KeyedOptimizerWrapper(params, lambda listed: Sums(listed, lr=0.5))
    optimizer = library.SemisyncOptimizer(list(params.values()), local, shared, num_local_steps=1)
    optimizer.init_state()
    for one in (local, shared):
        kept = one.state[params["p0"]]
        del one.state[params["p1"]]
        optimizer.init_state()
        assert one.state[params["p0"]] is kept
        assert one.state[params["p1"]].keys() == kept.keys()


class Sums(torch.optim.SGD):
    """A global optimizer with state."""

    def global_step(self, step, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("sum", torch.zeros_like(param))


@both
def test_a_pass_without_rows_is_a_step_of_the_tables_that_it_reaches(library):
    tables = [library.EmbeddingBagConfig(3, 2, name, feature_names=[name]) for name in "tu"]
    module = library.EmbeddingBagCollection(tables, library.Adam, {"lr": 0.5})
    bag = torch.tensor([], dtype=torch.int64), torch.tensor([0, 0])
    module({"t": bag, "u": bag})["u"].sum().backward()
    state = module.fused_optimizer.state_dict()["state"]
    assert [int(state[f"{name}.weight"][f"{name}.iter"]) for name in "tu"] == [0, 1]


@both
def test_a_copy_of_a_clipping_optimizer_has_the_same_process_groups(library):
    with process_group("gloo", 1):
        param = torch.nn.Parameter(torch.zeros(2))
        group = torch.distributed.new_group([0])
        optimizer = library.GradientClippingOptimizer(
            library.KeyedOptimizerWrapper({"p": param}, lambda listed: library.SGD(listed, lr=1.0)),
            library.GradientClipping.NORM,
            1.0,
            enable_global_grad_clip=True,
            param_to_pgs={param: [group]},
        )
        copied = copy.deepcopy(optimizer)
        (mine,) = copied.params.values()
        mine.grad = torch.tensor([3.0, 4.0])
        copied.step()
    assert torch.allclose(mine.detach(), torch.tensor([-0.6, -0.8]))
    assert not param.any()


@both
def test_names_of_torch_that_are_set_in_a_group(library):
    param = torch.nn.Parameter(torch.ones(2))
    optimizer = library.Adam([param], weight_decay=0.5, decoupled_weight_decay=True)
    (group,) = optimizer.param_groups
    param.grad = torch.ones(2)
    optimizer.step()
    group["decoupled_weight_decay"] = False
    resumed = library.Adam([param], decoupled_weight_decay=True)
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0]["decay"] == "l2"
    before, group["amsgrad"] = param.detach().clone(), True
    assert "amsgrad" not in optimizer.state_dict()["param_groups"][0]
    with pytest.raises(ValueError, match="amsgrad must be False"):
        optimizer.step()
    assert param.equal(before)
