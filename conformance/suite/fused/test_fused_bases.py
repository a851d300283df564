"""The base classes of optimizers that are fused into the backward pass."""

import abc
import copy
import pickle
import warnings
from typing import Any

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_close,
    expect_derived,
    expect_equal,
    expect_raises,
    expect_unchanged,
    outcome,
    snapshot,
)
from keyedopt.conformance.suite.support.device import arange, full, ones, tensor, the_device, zeros
from keyedopt.conformance.suite.support.doubles import Stateful, single_rank
from keyedopt.conformance.suite.support.inputs import parameter, parameters, sgd

pytestmark = pytest.mark.needs("FusedOptimizer")


def fused_class(impl: Any) -> Any:
    """Make the smallest possible subclass of FusedOptimizer."""

    class Fused(impl.FusedOptimizer):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None: ...

        def zero_grad(self, set_to_none: bool = False) -> None: ...

    return Fused


def of_one_table(impl: Any, state: Any = None) -> tuple[Any, Any]:
    """Make a fused optimizer of one table with one state tensor, and return it with the table."""
    weight = parameter(4, 2)
    held = {"table.momentum1": arange(4.0)} if state is None else state
    groups = [{"params": [weight], "lr": 0.1}]
    return fused_class(impl)({"table.weight": weight}, {weight: held}, groups), weight


@pytest.mark.clause("FUSED-001")
@pytest.mark.parametrize("missing", ["both", "step", "zero_grad"])
def test_abstract(impl: Any, missing: str) -> None:
    """FusedOptimizer, and a subclass without step or zero_grad, cannot be instantiated."""
    body = {
        "step": lambda self, closure=None: None,
        "zero_grad": lambda self, set_to_none=False: None,
    }
    given = {} if missing == "both" else {key: body[key] for key in body if key != missing}
    cls = impl.FusedOptimizer if missing == "both" else type("Half", (impl.FusedOptimizer,), given)
    expect_raises(lambda: cls({}, {}, []), TypeError, expected=f"TypeError, abstract: {missing}")


@pytest.mark.clause("FUSED-002")
@pytest.mark.parametrize("name", ["FusedOptimizer", "EmptyFusedOptimizer"])
def test_is_keyed(impl: Any, name: str) -> None:
    """Fused optimizers are keyed optimizers and therefore torch optimizers; the base class is an ABC."""
    cls = getattr(impl, name)
    for base in (impl.KeyedOptimizer, impl.FusedOptimizer, torch.optim.Optimizer, abc.ABC):
        expect_derived(cls, base)


@pytest.mark.clause("FUSED-003")
def test_constructor(impl: Any) -> None:
    """The constructor takes parameters, state and groups and exposes them; state_dict has the keys."""
    optimizer, weight = of_one_table(impl)
    expect_equal(list(optimizer.params), ["table.weight"], "keys of params")
    expect(optimizer.params["table.weight"] is weight, "the parameter itself", optimizer.params)
    expect_equal([group["lr"] for group in optimizer.param_groups], [0.1], "learning rates of the groups")
    saved = optimizer.state_dict()["state"]
    expect_equal(set(saved), {"table.weight"}, "keys of the state")
    expect_bits(saved["table.weight"]["table.momentum1"], torch.arange(4.0), "state")


@pytest.mark.clause("FUSED-004")
def test_state_of_a_stranger(impl: Any) -> None:
    """State for a tensor that is not a parameter raises ValueError."""
    weight, stranger = parameter(2), parameter(2, seed=1)
    expect_raises(
        lambda: fused_class(impl)({"w": weight}, {stranger: {}}, [{"params": [weight]}]),
        ValueError,
        expected="ValueError for state without a parameter",
    )


@pytest.mark.clause("FUSED-005")
def test_repr(impl: Any) -> None:
    """The text of repr shows the name of the class and the options of the groups."""
    optimizer, _ = of_one_table(impl)
    shown = repr(optimizer)
    for part in ("Fused", "lr: 0.1"):
        expect(part in shown, f"{part!r} in repr()", shown)
    expect(
        "EmptyFusedOptimizer" in repr(impl.EmptyFusedOptimizer()),
        "the name of the class in repr()",
        "another",
    )


@pytest.mark.clause("FUSED-006")
def test_rate_is_live(impl: Any) -> None:
    """A subclass sees a learning rate that is written into the groups in its next step."""
    seen: list[float] = []

    class Passing(impl.FusedOptimizer):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            seen.extend(group["lr"] for group in self.param_groups)

        def zero_grad(self, set_to_none: bool = False) -> None: ...

    weight = parameter(2)
    optimizer = Passing({"w": weight}, {}, [{"params": [weight], "lr": 0.5}])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    optimizer.step()
    scheduler.step()
    optimizer.step()
    expect_equal(seen, [0.5, 0.25], "learning rates at the two steps")


@pytest.mark.clause("FUSED-007")
@pytest.mark.parametrize("wrapping", ["none", "wrapper", "combined"])
def test_loads_in_place(impl: Any, wrapping: str) -> None:
    """A load writes into the state tensors that the backward pass uses, through any wrapping."""
    fused, weight = of_one_table(impl)
    used = fused.state[weight]["table.momentum1"]
    optimizer = {
        "none": lambda: fused,
        "wrapper": lambda: impl.OptimizerWrapper(fused),
        "combined": lambda: impl.CombinedOptimizer([fused, impl.EmptyFusedOptimizer()]),
    }[wrapping]()
    wanted = tensor([9.0, 8.0, 7.0, 6.0])
    optimizer.load_state_dict({"state": {"table.weight": {"table.momentum1": wanted.clone()}}})
    expect_bits(used, wanted, "the state tensor that was there before")


@pytest.mark.clause("FUSED-008")
@pytest.mark.parametrize("wrong", ["no state", "other key", "other shape", "other state key"])
def test_wrong_checkpoints_change_nothing(impl: Any, wrong: str) -> None:
    """Loading a checkpoint that does not fit raises ValueError and writes nothing."""
    optimizer, _ = of_one_table(impl)
    before = snapshot(optimizer.state_dict())
    other = full((4,), 5.0)
    state: dict[str, Any] = {
        "no state": {},
        "other key": {"other.weight": {"table.momentum1": other}},
        "other shape": {"table.weight": {"table.momentum1": other[:1]}},
        "other state key": {"table.weight": {"table.exp_avg": other}},
    }[wrong]
    expect_raises(
        lambda: optimizer.load_state_dict({"state": state}),
        ValueError,
        expected=f"ValueError for a checkpoint with {wrong}",
    )
    expect_unchanged(before, optimizer.state_dict(), "state after the refusal")


@pytest.mark.clause("FUSED-009")
def test_init_state_changes_nothing(impl: Any) -> None:
    """init_state leaves the table and the state of a fused optimizer unchanged, bit by bit."""
    optimizer, weight = of_one_table(impl)
    before = [weight.detach().clone(), snapshot(optimizer.state_dict())]
    optimizer.init_state()
    expect_bits(weight.detach(), before[0], "table")
    expect_unchanged(before[1], optimizer.state_dict(), "state")


@pytest.mark.clause("FUSED-010")
@pytest.mark.parametrize("kind", ["dtensor", "sharded tensor", "stateful"])
def test_kinds_of_state(impl: Any, kind: str) -> None:
    """State may be a DTensor, a ShardedTensor or a stateful object, and is loaded in place."""
    with single_rank(), warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def make(numbers: torch.Tensor) -> Any:
            if kind == "stateful":
                return Stateful(numbers)
            if kind == "dtensor":
                from torch.distributed.device_mesh import init_device_mesh
                from torch.distributed.tensor import Shard, distribute_tensor

                return distribute_tensor(numbers, init_device_mesh(the_device().type, (1,)), [Shard(0)])
            from torch.distributed._shard.sharded_tensor import init_from_local_shards
            from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

            shard = LocalShard.from_tensor_and_offsets(numbers, [0, 0], 0)
            return init_from_local_shards([shard], *numbers.shape)

        def read(value: Any) -> Any:
            if kind == "stateful":
                return value.tensor
            return value.to_local() if kind == "dtensor" else value.local_shards()[0].tensor

        held = make(zeros(4, 1))
        optimizer, _ = of_one_table(impl, {"table.momentum1": held})
        other, _ = of_one_table(impl, {"table.momentum1": make(arange(4.0).reshape(4, 1))})
        optimizer.load_state_dict(other.state_dict())
        expect_bits(read(held), torch.arange(4.0).reshape(4, 1), "state that was there before")


@pytest.mark.clause("FUSED-011")
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies(impl: Any, how: str) -> None:
    """A copy of an EmptyFusedOptimizer is an EmptyFusedOptimizer, and both continue to work."""
    optimizer = impl.EmptyFusedOptimizer()
    other = copy.deepcopy(optimizer) if how == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
    for each in (other, optimizer, impl.EmptyFusedOptimizer()):
        expect(isinstance(each, impl.EmptyFusedOptimizer), "an EmptyFusedOptimizer", type(each))
        each.step()
        each.zero_grad()
        expect_equal(each.state_dict(), {"state": {}}, "state_dict()")


@pytest.mark.clause("FUSED-012")
def test_empty_has_nothing(impl: Any) -> None:
    """EmptyFusedOptimizer takes no arguments and has no parameters, state or groups."""
    optimizer = impl.EmptyFusedOptimizer()
    seen = [len(optimizer.params), len(optimizer.state), len(optimizer.param_groups)]
    expect_equal(seen, [0, 0, 0], "numbers of parameters, states and groups")
    expect_equal(optimizer.state_dict(), {"state": {}}, "state_dict()")


@pytest.mark.clause("FUSED-013")
def test_empty_does_nothing(impl: Any) -> None:
    """Its step and zero_grad are no-ops with the documented arguments."""
    optimizer = impl.EmptyFusedOptimizer()
    for call in (
        optimizer.step,
        lambda: optimizer.step(closure=None),
        optimizer.zero_grad,
        lambda: optimizer.zero_grad(set_to_none=True),
        optimizer.init_state,
    ):
        call()
    expect_equal(optimizer.state_dict(), {"state": {}}, "state_dict() afterwards")


@pytest.mark.clause("FUSED-014")
def test_empty_and_closures(impl: Any) -> dict[str, Any]:
    """Observe whether the step of an EmptyFusedOptimizer evaluates a closure, and what it returns."""
    calls: list[int] = []

    def closure() -> float:
        calls.append(1)
        return 7.0

    returned = outcome(lambda: impl.EmptyFusedOptimizer().step(closure))
    return {"evaluations": len(calls), "step": returned}


@pytest.mark.clause("FUSED-015")
def test_empty_loads(impl: Any) -> None:
    """EmptyFusedOptimizer loads its own state_dict and raises ValueError for other state."""
    optimizer = impl.EmptyFusedOptimizer()
    optimizer.load_state_dict(optimizer.state_dict())
    expect_raises(
        lambda: optimizer.load_state_dict({"state": {"w": {"sum": zeros(1)}}}),
        ValueError,
        expected="ValueError for state that the optimizer lacks",
    )
    optimizer.save_param_groups(True)
    expect_equal(optimizer.state_dict(), {"state": {}, "param_groups": []}, "with groups saved")
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.clause("FUSED-016")
def test_empty_takes_no_group(impl: Any) -> None:
    """Adding a group with parameters raises an error: step would never train them."""
    optimizer = impl.EmptyFusedOptimizer()
    expect_raises(
        lambda: optimizer.add_param_group({"params": {"w": parameter(2)}}),
        ValueError,
        TypeError,
        NotImplementedError,
        expected="an error",
    )
    expect_equal(len(optimizer.param_groups), 0, "groups afterwards")


@pytest.mark.clause("FUSED-017")
def test_empty_in_compositions(impl: Any) -> None:
    """An EmptyFusedOptimizer does not affect the combinations and wrappers that contain it."""
    params = parameters(1)
    dense = sgd(impl, params, lr=1.0, momentum=0.9)
    combined = impl.CombinedOptimizer([("dense", dense), ("none", impl.EmptyFusedOptimizer())])
    stages = [impl.WarmupStage(impl.WarmupPolicy.CONSTANT, max_iters=10, value=0.5)]
    optimizer = impl.WarmupOptimizer(combined, stages, lr=0.2)
    params["p0"].grad = ones(3)
    before = params["p0"].detach().clone()
    optimizer.step()
    optimizer.zero_grad()
    expect_close(params["p0"].detach(), before.double() - 0.1, "dense parameter after a step")
    expect_equal(set(combined.state_dict()["state"]) >= {"dense.p0"}, True, "state of the dense part")
    alone = impl.WarmupOptimizer(impl.EmptyFusedOptimizer(), stages, lr=0.2)
    alone.step()
    impl.OptimizerWrapper(impl.EmptyFusedOptimizer()).step()


@pytest.mark.clause("FUSED-018")
@pytest.mark.parametrize("which", ["empty", "subclass"])
def test_hooks(impl: Any, which: str) -> None:
    """Every hook of a torch optimizer can be registered and runs once per event."""
    optimizer = impl.EmptyFusedOptimizer() if which == "empty" else of_one_table(impl)[0]
    events: list[str] = []
    for name in ("step_pre", "step_post", "state_dict_pre", "load_state_dict_post"):
        register = getattr(optimizer, f"register_{name}_hook")
        register(lambda *_, said=name: events.append(said))
    optimizer.step()
    expect_equal(events, ["step_pre", "step_post"], "events of a step")
    events.clear()
    optimizer.load_state_dict(optimizer.state_dict())
    expect_equal(events, ["state_dict_pre", "load_state_dict_post"], "events of saving and loading")


@pytest.mark.clause("FUSED-019")
def test_module_is_abstract(impl: Any) -> None:
    """FusedOptimizerModule is abstract: a class without fused_optimizer cannot be instantiated."""
    expect_raises(impl.FusedOptimizerModule, TypeError, expected="TypeError, abstract")

    class Half(impl.FusedOptimizerModule):  # type: ignore[misc]
        pass

    expect_raises(Half, TypeError, expected="TypeError, fused_optimizer is missing")


@pytest.mark.clause("FUSED-020")
@pytest.mark.parametrize("order", ["module first", "mixin first"])
def test_module_is_a_mixin(impl: Any, order: str) -> None:
    """A torch module can be a FusedOptimizerModule, whose property returns a keyed optimizer."""
    bases = (torch.nn.Module, impl.FusedOptimizerModule)
    bases = bases if order == "module first" else bases[::-1]
    body = {"fused_optimizer": property(lambda self: impl.EmptyFusedOptimizer())}
    module = type("Table", bases, body)()
    expect(isinstance(module, impl.FusedOptimizerModule), "a FusedOptimizerModule", type(module))
    found = module.fused_optimizer
    expect_derived(type(found), impl.KeyedOptimizer)


@pytest.mark.clause("FUSED-021")
@pytest.mark.parametrize("rate", [0.25])
def test_warmup_sets_the_rate(impl: Any, rate: float) -> None:
    """A warmup around a fused optimizer only sets the learning rate in the groups."""
    optimizer, weight = of_one_table(impl)
    before = weight.detach().clone()
    stages = [impl.WarmupStage(impl.WarmupPolicy.CONSTANT, max_iters=10, value=0.5)]
    warmup = impl.WarmupOptimizer(optimizer, stages, lr=2 * rate)
    expect_close(optimizer.param_groups[0]["lr"], rate, "learning rate before the first step")
    warmup.step()
    expect_close(optimizer.param_groups[0]["lr"], rate, "learning rate after a step")
    expect_bits(weight.detach(), before, "table")
