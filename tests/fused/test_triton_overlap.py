"""The sort beside the forward: in a stream of its own, in order with all that uses the same memory.

The kernels run in Triton's interpreter, in a process of its own, of which this file is the script, on a model
of streams (`triton_model`).
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from sampling import chosen
from triton_process import hand_over, outcomes, run_alone

CPU = torch.device("cpu")
SORT = ("write_keys", "radix_pass", "find_runs")
SIDE, MAIN, OTHER = "side", "main", "other"


def overlap(asked: str) -> Any:
    """Ask for the sort beside the forward ("1"), or in its stream ("0")."""
    return patch.dict(os.environ, {"KEYEDOPT_OVERLAP": asked})


def made(weighted: bool = False, pools: bool = True) -> Any:
    """Make a module of two tables, and what is looked up in three features."""
    from keyedopt import fused

    config: Any = fused.EmbeddingBagConfig if pools else fused.EmbeddingConfig
    tables = [
        config(10, 4, name="t", feature_names=["f"]),
        config(300, 8, name="u", feature_names=["g", "h"]),
    ]
    torch.manual_seed(0)
    kind = fused.EmbeddingBagCollection if pools else fused.EmbeddingCollection
    more = {"is_weighted": True} if weighted else {}
    module = kind(tables, fused.Adam, {"lr": 0.1}, backend="triton", **more)
    return module, features(weighted)


def features(weighted: bool = False, **changed: Any) -> dict[str, Any]:
    given = {}
    for name in ("f", "g", "h"):
        values, offsets = changed.get(name, ([1, 2, 3, 1] * 3, [0, 5, 5, 12]))
        parts = [torch.tensor(values), torch.tensor(offsets)]
        given[name] = (*parts, torch.rand(len(values)).half()) if weighted else tuple(parts)
    return given


def contents(module: Any) -> list[torch.Tensor]:
    state = module.fused_optimizer.state  # `state_dict` would ask for errors
    found = [*module.parameters(), *(value for entry in state.values() for value in entry.values())]
    return [tensor.detach() for tensor in found]


def model_for(module: Any, *given: Any) -> Any:
    from triton_model import Device

    return Device(contents(module), [tensor for one in given for parts in one.values() for tensor in parts])


def backward(outputs: dict[str, torch.Tensor]) -> None:
    torch.autograd.backward(list(outputs.values()), [torch.ones_like(one) for one in outputs.values()])


def refill(given: dict[str, Any]) -> None:
    """Write what is looked up next into the same memory."""
    for parts in given.values():
        for part in parts:
            part.mul_(1)


def sound(device: Any) -> None:
    assert not device.wrong, device.wrong
    assert not device.unsaid(), device.unsaid()


def case_order(asked: str, **kinds: Any) -> None:
    """Two steps, after a forward of which nothing is used: the sort where it belongs, and the same bits."""
    results = []
    for setting in (asked, "0"):
        module, given = made(**kinds)
        with overlap(setting), model_for(module, given) as device:
            refill(given)
            module(given)
            for _ in range(2):
                backward(module(given))
                refill(given)
        sound(device)
        names = [name for name, _ in device.launches]
        for kernel in SORT:
            assert set(device.of(kernel)) == {SIDE if setting == "1" else MAIN}, device.launches
        assert set(device.of("pool") + device.of("update")) == {MAIN}
        assert names.index("find_runs") < names.index("pool"), "the sort is launched first"
        results.append([tensor.clone() for tensor in contents(module)])
    assert all(map(torch.equal, *results))
    assert names.count("update") == 2
    assert names.count("find_runs") == 3


def case_other_stream(deferred: bool) -> None:
    """The backward runs in another stream than the forward, and the next forward in a third one."""
    from triton_model import Stream

    from keyedopt import fused

    module, given = made()
    clipped = fused.GradientClippingOptimizer(module.fused_optimizer, fused.GradientClipping.NORM, 0.5)
    if not deferred:
        del clipped
    with overlap("1"), model_for(module, given) as device:
        first = device.now
        for name in (OTHER, "third"):
            outputs = module(given)
            stream = Stream(name)
            stream.wait_stream(device.now)  # as autograd sees to for what it is given
            for one in outputs.values():
                one.record_stream(stream)
            with device.within(stream):
                backward(outputs)
                if deferred:
                    clipped.step()
            first.wait_stream(stream)
    assert not device.wrong, device.wrong
    sorts = [one for one in device.unsaid() if " in side, " in one]
    assert not sorts, sorts
    used = device.of("collect" if deferred else "update")
    assert used == [OTHER, "third"]
    assert set(device.of("find_runs")) == {SIDE}


def case_let_go() -> None:
    """What is looked up is written anew while a sort that nobody has waited for may still read it.

    This alone is not in order: who does it does not go backward. It does no harm, see `streams.side_stream`.
    """
    module, given = made()
    with overlap("1"), model_for(module, given) as device:
        module(given)
        for values, _ in given.values():
            values.add_(1).remainder_(4)
        backward(module(given))
    assert device.wrong == ["the write of add_ in main does not wait for the read of write_keys in side"]
    assert not device.unsaid()


def case_captured() -> None:
    """In a graph all is in the stream that is captured: also of a forward that is captured alone."""
    from keyedopt.fused.backends.triton import device_buffers, sort_passes

    module, given = made()
    with overlap("1"), model_for(module, given) as device:
        for asked in ("1", "0"):
            with overlap(asked):
                backward(module(given))
        for _, stream in sort_passes._WORK:  # as torch does before
            device.now.wait_stream(stream)
        work, arena = dict(sort_passes._WORK), [torch.empty(1 << 12, dtype=torch.int64)]
        device.launches.clear()
        device.captured = True
        with patch.object(device_buffers, "_ARENA", arena):
            outputs = module(given)
            assert {stream for _, stream in device.launches} == {MAIN}
            assert set(SORT) < {name for name, _ in device.launches}
            backward(outputs)
        assert {stream for _, stream in device.launches} == {MAIN}
        assert work == sort_passes._WORK, "a graph has work memory of its own"
        sound(device)


def case_nothing_trained(how: str) -> None:
    """Where no update can follow nothing is sorted."""
    module, given = made()
    module.train(how != "eval")
    for weight in module.parameters():
        weight.requires_grad_(how != "frozen")
    with overlap("1"), model_for(module, given) as device:
        with torch.no_grad() if how == "no_grad" else nullcontext():
            module(given)
        assert [name for name, _ in device.launches] == ["pool"]
        sound(device)


def case_not_asked() -> None:
    """Unless it is asked for, everything is in the stream of the forward pass."""
    module, given = made()
    with overlap(""), model_for(module, given) as device:
        backward(module(given))
        assert set(device.of("find_runs")) == {MAIN}
        sound(device)


def case_misspelt() -> None:
    module, given = made()
    why = "KEYEDOPT_OVERLAP must be 0 or 1, not 'yes'"
    with overlap("yes"), model_for(module, given), pytest.raises(ValueError, match=f"^{why}$"):
        module(given)


def case_error_flag(asked: str) -> None:
    """A bad lookup is heard once, from the forward; a sort that comes later must not be heard again."""
    from keyedopt.fused.backends.interface import Lookup, Table
    from keyedopt.fused.backends.triton import TritonBackend
    from keyedopt.fused.backends.triton.device_flags import error_flag

    module, _ = made()
    bad = features(g=([1, 2, 300], [0, 1, 3]))
    with overlap(asked), model_for(module, bad) as device:
        before = [tensor.clone() for tensor in contents(module)]
        outputs = module(bad)
        assert int(error_flag(CPU)[0]) == 1
        backward(outputs)
        assert all(map(torch.equal, before, contents(module)))
        with pytest.raises(ValueError, match="row numbers"):
            module.check()
        table = Table(torch.ones(4, 4))
        TritonBackend().prepare([table], [Lookup(0, torch.tensor([7, -1]))])
        assert int(error_flag(CPU)[0]) == 0
        TritonBackend().look_up([table], [Lookup(0, torch.tensor([7, -1]))])
        assert int(error_flag(CPU)[0]) == 1
        sound(device)


def case_wide_keys() -> None:
    """Keys that torch sorts."""
    from keyedopt.fused.backends.triton import lookup_batch

    module, given = made()
    with overlap("1"), patch.object(lookup_batch, "MOST_KEYS", 2), model_for(module, given) as device:
        module(given)
        backward(module(given))
    sound(device)
    assert set(device.of("write_keys") + device.of("find_runs")) == {SIDE}
    assert not device.of("radix_pass")


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    for asked in ("0", "1"):
        yield f"order-{asked}", lambda asked=asked: case_order(asked)
        yield f"error_flag-{asked}", lambda asked=asked: case_error_flag(asked)
    for name, kinds in (
        ("weighted", {"weighted": True}),
        ("unpooled", {"pools": False}),
    ):
        yield f"order-{name}", lambda kinds=kinds: case_order("1", **kinds)
    for deferred in (False, True):
        yield f"other_stream-{deferred}", lambda deferred=deferred: case_other_stream(deferred)
    for how in ("eval", "no_grad", "frozen"):
        yield f"nothing_trained-{how}", lambda how=how: case_nothing_trained(how)
    yield "let_go", case_let_go
    yield "captured", case_captured
    yield "not_asked", case_not_asked
    yield "misspelt", case_misspelt
    yield "wide_keys", case_wide_keys


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run_alone(tmp_path_factory, __file__, *chosen(request, "name"))


@pytest.mark.complete(sample=1)
@pytest.mark.parametrize("name", [name for name, _ in cases()])
def test_streams(found: dict[str, str], name: str) -> None:
    assert not found[name], found[name]


if __name__ == "__main__":
    torch.set_num_threads(1)
    hand_over(outcomes((name, case) for name, case in cases() if name in sys.argv))
