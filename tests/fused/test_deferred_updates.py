"""Updates of tables that are deferred to a step, so that a norm of all gradients can be clipped."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch

from keyedopt import fused, reference
from keyedopt.fused.backends.interface import RowGradients, Table
from keyedopt.fused.embedding import update

BAGS = {"f": (torch.tensor([0, 1, 1, 3]), torch.tensor([0, 2, 4]))}


def make(library, kind="Adam", **options):
    config = library.EmbeddingBagConfig(5, 4, "t", torch.float32, ["f"], init_fn=torch.nn.init.ones_)
    return library.EmbeddingBagCollection([config], getattr(library, kind), {"lr": 0.5, **options})


def table(module):
    return module.embedding_bags["t"].weight


class Bound:
    """A clip that defers updates."""


@pytest.mark.parametrize("library", [fused, reference], ids=lambda library: library.__name__)
def test_an_update_can_be_deferred_until_a_norm_is_known(library):
    module, other = make(library), make(library)
    optimizer, bound = module.fused_optimizer, Bound()
    optimizer.defer_updates(bound, inside=())
    for factor in (0.5, 0.25):
        before = table(module).detach().clone()
        module(BAGS)["f"].sum().backward()
        module(BAGS)["f"].sum().backward()
        assert torch.equal(table(module).detach(), before)
        ((weight, grads),) = deferred_by(optimizer)
        assert weight is table(module)
        assert grads[:, 0].tolist() == [2.0, 4.0, 2.0]
        grads *= factor
        optimizer.step()
        assert not deferred_by(optimizer)
        (other(BAGS)["f"].sum() * 2 * factor).backward()
    assert torch.equal(table(module), table(other))
    module(BAGS)["f"].sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(table(module), table(other))
    del bound
    for each in (module, other):
        each(BAGS)["f"].sum().backward()
    assert torch.equal(table(module), table(other))


@pytest.mark.parametrize("library", [fused, reference], ids=lambda library: library.__name__)
def test_a_norm_is_measured_and_changes_nothing_with_an_infinite_bound(library):
    watched, plain = make(library), make(library)
    dense = torch.nn.Parameter(torch.tensor([3.0]))
    both = [watched.fused_optimizer, library.KeyedOptimizerWrapper({"w": dense}, torch.optim.SGD)]
    combined = library.CombinedOptimizer(both)
    clips = library.GradientClipping
    optimizer = library.GradientClippingOptimizer(combined, clips.NORM, max_gradient=float("inf"))
    for _ in range(2):
        optimizer.zero_grad()
        (watched(BAGS)["f"].sum() + dense.sum()).backward()
        optimizer.step()
        plain(BAGS)["f"].sum().backward()
        counts = torch.tensor([1.0, 2.0, 1.0]).repeat_interleave(
            4
        )  # of the rows 0, 1 and 3, which are 4 wide
        assert float(optimizer.last_total_grad_norm) == pytest.approx(
            float((counts.square().sum() + 1).sqrt())
        )
    assert torch.equal(table(watched), table(plain))


def deferred_by(optimizer):
    return optimizer.deferred.gradients()


@pytest.mark.parametrize("library", [fused, reference], ids=lambda library: library.__name__)
@pytest.mark.parametrize("between", ["load", "double", "rate", "init_state", "state_dict"])
def test_what_happens_before_a_deferred_update(library, between):
    """Whatever is done to the module before the step, the update is the one of then."""
    module, other = make(library), make(library)
    bound = Bound()
    module.fused_optimizer.defer_updates(bound, inside=())
    source = make(library)
    for _ in range(3):
        source(BAGS)["f"].sum().backward()

    def change(each):
        if between == "load":
            each.fused_optimizer.load_state_dict(copy.deepcopy(source.fused_optimizer.state_dict()))
        elif between == "double":
            each.double()
        elif between == "rate":
            each.fused_optimizer.param_groups[0]["lr"] = 0.5
        elif between == "init_state":
            each.fused_optimizer.init_state()
        else:
            saved = pickle.loads(pickle.dumps(each.fused_optimizer.state_dict()))
            assert str(saved) == str(make(library).fused_optimizer.state_dict())

    module(BAGS)["f"].sum().backward()
    change(module)
    module.fused_optimizer.step()
    change(other)
    other(BAGS)["f"].sum().backward()
    assert torch.equal(table(module), table(other))
    assert str(module.fused_optimizer.state_dict()) == str(other.fused_optimizer.state_dict())


@pytest.mark.parametrize("library", [fused, reference], ids=lambda library: library.__name__)
def test_a_full_window_waits_with_the_step(library):
    """A gradient that is dropped is that of the last micro-batch; the window goes on without it."""
    module = make(library, "AccumulateSGD", use_accumulate=True, accumulate_step=2)
    bound = Bound()
    module.fused_optimizer.defer_updates(bound, inside=())
    window = module.fused_optimizer.state[table(module)]["t.window"]
    module(BAGS)["f"].sum().backward()
    assert window.count == 1
    module(BAGS)["f"].sum().backward()
    assert [grads[:, 0].tolist() for _, grads in deferred_by(module.fused_optimizer)] == [[2.0, 4.0, 2.0]]
    module.fused_optimizer.zero_grad()
    assert window.count == 1
    module(BAGS)["f"].sum().backward()
    module.fused_optimizer.step()
    assert window.count == 0
    assert table(module)[:, 0].tolist() == [0.0, -1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("library", [fused, reference], ids=lambda library: library.__name__)
@pytest.mark.parametrize("inner", ["VALUE", "NORM"])
def test_bounds_inside_and_around_a_joint_norm(library, inner):
    """Bounds apply to tables in the order in which they apply to dense parameters: from the outside in."""
    kinds = library.GradientClipping
    module, twin = make(library, "SGD", lr=1.0), torch.nn.Parameter(torch.ones(5, 4))
    dense = library.KeyedOptimizerWrapper({"w": twin}, lambda params: torch.optim.SGD(params, lr=1.0))
    parts = [
        library.GradientClippingOptimizer(part, kinds[inner], 0.5) for part in (module.fused_optimizer, dense)
    ]
    joint = library.GradientClippingOptimizer(library.CombinedOptimizer(parts), kinds.NORM, 3.0)
    around = library.GradientClippingOptimizer(joint, kinds.VALUE, 1.5)
    module(BAGS)["f"].sum().backward()
    twin.grad = torch.zeros(5, 4)
    twin.grad[[0, 1, 3]] = torch.tensor([[1.0], [2.0], [1.0]])
    around.step()
    assert torch.allclose(table(module), twin, atol=1e-6)
    assert float(joint.last_total_grad_norm) == pytest.approx((8 * (2 * 1.0 + 1.5**2)) ** 0.5)


def test_padding_rows_get_no_gradient():
    """Sums that are made without synchronizing end with padding rows, which no table has."""
    given = RowGradients(0, torch.tensor([0, 2, -1, -1]), torch.tensor([[1.0], [2.0], [0.0], [0.0]]))
    group = SimpleNamespace(options={"rows": "all"}, tables=[Table(torch.ones(4, 1))])
    (found,) = update._chosen(SimpleNamespace(group=group), [given])
    assert found.rows.tolist() == [0, 1, 2, 3]
    assert found.grads.tolist() == [[1.0], [0.0], [2.0], [0.0]]
