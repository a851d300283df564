"""Keyed optimizers: sharded state on a single rank."""

import warnings

import pytest
import torch

from keyedopt.conformance.suite.support.assertions import (
    expect,
    expect_bits,
    expect_equal,
    expect_raises,
    snapshot,
)
from keyedopt.conformance.suite.support.device import full, ones, the_device
from keyedopt.conformance.suite.support.doubles import single_rank
from keyedopt.conformance.suite.support.inputs import parameter, parameters, set_grads, train


def sharded(pieces, offsets, size):
    """Make a ShardedTensor of one rank from local tensors."""
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor

    shards = [
        Shard.from_tensor_and_offsets(piece, list(offset), 0)
        for piece, offset in zip(pieces, offsets, strict=True)
    ]
    return ShardedTensor._init_from_local_shards(shards, list(size))


def whole(value, *size):
    """Make a ShardedTensor of a single shard, filled with a value."""
    return sharded([full(size, value)], [[0] * len(size)], size)


def columns(value, *widths):
    """Make a ShardedTensor of three rows, cut into shards of the given widths."""
    offsets = [[0, sum(widths[:number])] for number in range(len(widths))]
    return sharded([full((3, width), value) for width in widths], offsets, (3, sum(widths)))


def expect_columns(live, value, *widths):
    """Expect the values that `columns` makes, with correct metadata of each shard and of the whole."""
    described = live.metadata().shards_metadata
    for number, width in enumerate(widths):
        shard = live.local_shards()[number]
        expect_bits(shard.tensor, torch.full((3, width), value), f"shard {number}")
        expect_equal(list(shard.metadata.shard_sizes), [3, width], f"size that shard {number} states")
        expect_equal(list(described[number].shard_sizes), [3, width], f"size stated for shard {number}")
        begin = sum(widths[:number])
        expect_equal(list(described[number].shard_offsets), [0, begin], f"offset stated for shard {number}")


def keyed(impl, entry):
    """Make an optimizer of one parameter with the given state."""
    params = parameters(1)
    return impl.KeyedOptimizer(params, {params["p0"]: entry}, [])


@pytest.mark.clause("KEYED-057")
def test_sharded_tensors_are_loaded_in_place(impl):
    """The local shards of a ShardedTensor are filled in place."""
    with warnings.catch_warnings(), single_rank():
        warnings.simplefilter("ignore")
        live = whole(1.0, 4, 2)
        tensor = live.local_shards()[0].tensor
        optimizer = keyed(impl, {"m": live, "n": 1})
        optimizer.load_state_dict({"state": {"p0": {"m": whole(5.0, 4, 2), "n": 2}}})
        expect(next(iter(optimizer.state.values()))["m"] is live, "the same ShardedTensor", "another")
        expect(live.local_shards()[0].tensor is tensor, "the same local tensor", "another")
        expect_bits(tensor, torch.full((4, 2), 5.0), "the local shard")
        saved = optimizer.state_dict()["state"]["p0"]["m"]
        expect(saved is live, "the live ShardedTensor in the state dict", type(saved).__name__)


@pytest.mark.clause("KEYED-057")
@pytest.mark.parametrize("cut", ["columns", "rows"])
def test_every_local_shard_is_filled_by_its_own(impl, cut):
    """Each of several local shards, by columns or rows, gets its own values."""

    def pieces(*numbers):
        offsets = [[0, 2 * i] if cut == "columns" else [3 * i, 0] for i in range(len(numbers))]
        size = (3, 2 * len(numbers)) if cut == "columns" else (3 * len(numbers), 2)
        return sharded([full((3, 2), number) for number in numbers], offsets, size)

    with warnings.catch_warnings(), single_rank():
        warnings.simplefilter("ignore")
        live = pieces(1.0, 2.0, 3.0)
        tensors = [shard.tensor for shard in live.local_shards()]
        optimizer = keyed(impl, {"m": live})
        optimizer.load_state_dict({"state": {"p0": {"m": pieces(5.0, 6.0, 7.0)}}})
        for number, (shard, tensor) in enumerate(zip(live.local_shards(), tensors, strict=True)):
            expect(shard.tensor is tensor, f"the same tensor in shard {number}", "another")
            expect_bits(tensor, torch.full((3, 2), 5.0 + number), f"shard {number}")


@pytest.mark.clause("KEYED-058")
@pytest.mark.parametrize("given", ["more shards", "other whole", "other rows", "cut by rows", "plain"])
def test_sharded_tensors_that_do_not_fit_are_refused(impl, given):
    """Another number of shards, another size or a plain tensor raises."""
    with warnings.catch_warnings(), single_rank():
        warnings.simplefilter("ignore")
        live = columns(1.0, 2, 2)
        optimizer = keyed(impl, {"m": live})
        wrong = {
            "more shards": lambda: columns(5.0, 1, 1, 2),
            "other whole": lambda: columns(5.0, 3, 3),
            "other rows": lambda: sharded([full((2, 2), 5.0), full((2, 2), 5.0)], [[0, 0], [0, 2]], (2, 4)),
            "cut by rows": lambda: sharded([full((1, 4), 5.0), full((2, 4), 5.0)], [[0, 0], [1, 0]], (3, 4)),
            "plain": lambda: full((3, 4), 5.0),
        }[given]()
        expect_raises(
            lambda: optimizer.load_state_dict({"state": {"p0": {"m": wrong}}}),
            Exception,
            expected=f"an error ({given})",
        )
        for shard in live.local_shards():
            expect_bits(shard.tensor, torch.ones(3, 2), "a local shard after a failed load")


@pytest.mark.clause("KEYED-111")
@pytest.mark.parametrize("cut", ["columns", "rows"])
def test_shards_in_another_order(impl, cut):
    """Local shards in another order raise, or are loaded to the offsets in their metadata."""

    def pieces(numbers, more=0.0):
        offsets = [[0, 2 * number] if cut == "columns" else [3 * number, 0] for number in numbers]
        size = (3, 4) if cut == "columns" else (6, 2)
        return sharded([full((3, 2), number + more) for number in numbers], offsets, size)

    with warnings.catch_warnings(), single_rank():
        warnings.simplefilter("ignore")
        live, more = pieces([0, 1]), 5.0
        optimizer = keyed(impl, {"m": live})
        try:
            optimizer.load_state_dict({"state": {"p0": {"m": pieces([1, 0], more)}}})
        except Exception:
            more = 0.0
        for shard in live.local_shards():
            place = sum(shard.metadata.shard_offsets) // (2 if cut == "columns" else 3)
            expect_bits(shard.tensor, torch.full((3, 2), place + more), f"the shard at {place}")


@pytest.mark.clause("KEYED-059")
def test_a_wrong_number_of_shards_is_named(impl):
    """The error for another number of shards has the published text and the path."""
    with warnings.catch_warnings(), single_rank():
        warnings.simplefilter("ignore")
        optimizer = keyed(impl, {"deep": {"m": columns(1.0, 2, 2)}})
        expect_raises(
            lambda: optimizer.load_state_dict({"state": {"p0": {"deep": {"m": columns(5.0, 4)}}}}),
            ValueError,
            mentions=['Different number of shards 2 vs 1 for the path of ["p0", "deep", "m"]'],
            expected="a ValueError that says how many shards, and where",
        )


@pytest.mark.clause("KEYED-060")
def test_column_wise_shards_may_take_another_width(impl):
    """Column-wise shards of other widths load, with correct metadata."""
    with warnings.catch_warnings(), single_rank():
        warnings.simplefilter("ignore")
        first, live = columns(1.0, 2, 2), columns(1.0, 2, 2)
        optimizer = keyed(impl, {"first": first, "m": live})
        given = {"first": columns(7.0, 3, 1), "m": columns(5.0, 1, 3)}
        optimizer.load_state_dict({"state": {"p0": given}})
        expect_columns(first, 7.0, 3, 1)
        expect_columns(live, 5.0, 1, 3)


@pytest.mark.clause("KEYED-060")
@pytest.mark.needs("CombinedOptimizer", "OptimizerWrapper")
def test_shards_of_another_width_in_a_combination(impl):
    """They also load inside wrappers and combinations, with their metadata."""
    with warnings.catch_warnings(), single_rank():
        warnings.simplefilter("ignore")
        live = columns(1.0, 2, 2)
        optimizer = impl.CombinedOptimizer([("a", impl.OptimizerWrapper(keyed(impl, {"m": live})))])
        optimizer.load_state_dict({"state": {"a.p0": {"m": columns(5.0, 1, 3)}}})
        expect_columns(live, 5.0, 1, 3)


@pytest.mark.clause("KEYED-061")
@pytest.mark.parametrize("placement", ["shard", "replicate"])
def test_dtensors_are_loaded_in_place(impl, placement):
    """The local part of a DTensor is filled in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with single_rank():
        mesh = init_device_mesh(the_device().type, (1,))
        placements = [Shard(0) if placement == "shard" else Replicate()]
        live = distribute_tensor(ones(4, 2), mesh, placements)
        memory = live.to_local().data_ptr()
        optimizer = keyed(impl, {"m": live})
        given = distribute_tensor(full((4, 2), 5.0), mesh, placements)
        optimizer.load_state_dict({"state": {"p0": {"m": given}}})
        expect(next(iter(optimizer.state.values()))["m"] is live, "the same DTensor", "another")
        expect_equal(live.to_local().data_ptr(), memory, "memory of the local part")
        expect_bits(live.to_local(), torch.full((4, 2), 5.0), "the local part")


@pytest.mark.clause("KEYED-061")
def test_dtensors_that_are_placed_otherwise(impl):
    """A DTensor with another placement is loaded in place, or raises an error."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with single_rank():
        mesh = init_device_mesh(the_device().type, (1,))
        live = distribute_tensor(ones(4, 2), mesh, [Shard(0)])
        optimizer = keyed(impl, {"m": live})
        value = 5.0
        given = distribute_tensor(full((4, 2), value), mesh, [Replicate()])
        try:
            optimizer.load_state_dict({"state": {"p0": {"m": given}}})
        except Exception:
            value = 1.0
        expect(next(iter(optimizer.state.values()))["m"] is live, "the same DTensor", "another")
        expect_bits(live.to_local(), torch.full((4, 2), value), "the local part")
        expect_equal(live.placements, (Shard(0),), "its placements")


@pytest.mark.clause("KEYED-061")
@pytest.mark.parametrize("placement", ["shard", "replicate"])
def test_dtensors_of_several_local_shards(impl, placement):
    """If a DTensor has several local shards, each is filled; or the load raises."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    with single_rank():
        mesh = init_device_mesh(the_device().type, (1,))

        def made(*numbers):
            columns = [full((3, 2), number) for number in numbers]
            local = LocalShardsWrapper(columns, [(0, 2 * index) for index in range(len(columns))])
            where, size = [Shard(1) if placement == "shard" else Replicate()], (3, 2 * len(columns))
            whole = DTensor.from_local(local, mesh, where, run_check=False, shape=size, stride=(size[1], 1))
            return whole, columns

        live, columns = made(1.0, 2.0)
        optimizer = keyed(impl, {"m": live})
        wanted = [5.0, 6.0]
        try:
            optimizer.load_state_dict({"state": {"p0": {"m": made(*wanted)[0]}}})
        except Exception:  # a kind of DTensor that the implementation does not support
            wanted = [1.0, 2.0]
        expect(next(iter(optimizer.state.values()))["m"] is live, "the same DTensor", "another")
        for number, (column, value) in enumerate(zip(columns, wanted, strict=True)):
            expect_bits(column, torch.full((3, 2), value), f"shard {number}")


@pytest.mark.clause("KEYED-062")
@pytest.mark.parametrize("given", ["shape", "plain", "broadcast", "shape, split", "broadcast, split"])
def test_dtensors_that_do_not_fit_are_refused(impl, given):
    """A DTensor of another shape, or a plain tensor, over a DTensor raises."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    with single_rank():
        mesh = init_device_mesh(the_device().type, (1,))
        live = distribute_tensor(ones(4, 2), mesh, [Replicate()])
        optimizer = keyed(impl, {"m": live})
        what, _, split = given.partition(", ")
        wrong = full({"shape": (3, 2), "plain": (4, 2), "broadcast": (1, 2)}[what], 5.0)
        if given != "plain":
            wrong = distribute_tensor(wrong, mesh, [Shard(0) if split else Replicate()])
        expect_raises(
            lambda: optimizer.load_state_dict({"state": {"p0": {"m": wrong}}}),
            Exception,
            expected=f"an error ({given})",
        )
        expect_bits(live.to_local(), torch.ones(4, 2), "the local part after a failed load")


@pytest.mark.clause("KEYED-063")
def test_parameters_may_be_dtensors(impl):
    """DTensor parameters are initialized, trained, saved and loaded like others."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with single_rank():
        mesh = init_device_mesh(the_device().type, (1,))
        plain = {"p0": parameter(4, 2)}
        split = {"p0": torch.nn.Parameter(distribute_tensor(plain["p0"].detach().clone(), mesh, [Shard(0)]))}

        def make(params):
            return impl.KeyedOptimizerWrapper(
                params, lambda listed: torch.optim.SGD(listed, lr=0.1, momentum=0.9, foreach=False)
            )

        one, other = make(plain), make(split)
        other.init_state()
        expect_bits(split["p0"].to_local(), plain["p0"], "the parameter after init_state")
        train(one, plain, 2)
        for step in range(2):
            set_grads(plain, seed=1 + step)
            split["p0"].grad = distribute_tensor(plain["p0"].grad.clone(), mesh, [Shard(0)])
            other.step()
        expect_bits(split["p0"].to_local(), plain["p0"], "the parameter after two steps")
        moment = other.state[split["p0"]]["momentum_buffer"]
        other.load_state_dict(snapshot(other.state_dict()))
        expect(other.state[split["p0"]]["momentum_buffer"] is moment, "the same state", "another")


@pytest.mark.clause("KEYED-064")
def test_state_may_be_keyed_by_sharded_parameters(impl):
    """A ShardedTensor parameter has a key, state and a group like others."""
    with warnings.catch_warnings(), single_rank():
        warnings.simplefilter("ignore")
        param = whole(1.0, 4, 2)
        optimizer = impl.KeyedOptimizer(
            {"table": param}, {param: {"m": whole(0.0, 4, 2)}}, [{"params": [param], "lr": 0.1}]
        )
        optimizer.save_param_groups(True)
        saved = optimizer.state_dict()
        expect_equal(list(saved["state"]), ["table"], "keys of the state")
        expect_equal(saved["param_groups"], [{"params": ["table"], "lr": 0.1}], "groups")
        given = {"state": {"table": {"m": whole(3.0, 4, 2)}}, "param_groups": saved["param_groups"]}
        optimizer.load_state_dict(given)
        local = optimizer.state[param]["m"].local_shards()[0].tensor
        expect_bits(local, torch.full((4, 2), 3.0), "the loaded shard")
