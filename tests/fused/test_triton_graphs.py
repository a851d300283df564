"""What a CUDA graph would freeze, and what threads or streams would spoil: without a GPU, by its parts."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from triton_process import hand_over, outcomes, run_alone

from keyedopt import fused
from keyedopt.fused.backends.interface import Lookup, Step, Table
from keyedopt.fused.embedding import backward, update

CPU = torch.device("cpu")


def made(algorithm: Any = fused.Adam, **more: Any) -> Any:
    config = fused.EmbeddingBagConfig(10, 8, "t", torch.bfloat16, ["f"])
    return fused.EmbeddingBagCollection([config], algorithm, {"lr": 0.1}, backend="torch", **more)


def step(module: Any) -> None:
    values, offsets = torch.tensor([1, 2, 1]), torch.tensor([0, 2, 3])
    (out,) = module({"f": (values, offsets)}).values()
    out.sum().backward()


@pytest.mark.parametrize("captured", [False, True])
def test_the_error_flag_is_not_allocated_in_a_capture(monkeypatch, captured):
    from keyedopt.fused.backends.triton import device_flags

    monkeypatch.setattr(device_flags, "capturing", lambda device: captured)
    device_flags._memory.cache_clear()
    why = pytest.raises(RuntimeError, match="take a step of the same kind before")
    with why if captured else nullcontext():
        device_flags.error_flag(CPU)
    device_flags._memory.cache_clear()


def test_an_error_of_any_stream_is_raised_before_the_flag_is_cleared(monkeypatch):
    from keyedopt.fused.backends.triton import device_flags
    from keyedopt.fused.backends.triton.streams import StreamTensors

    memory = torch.tensor([0, 1])
    flags = memory.view(torch.int32)
    kept = StreamTensors((flags[:1], flags[:1], memory[1:], flags[:1]))
    monkeypatch.setattr(device_flags, "_memory", lambda device: kept)
    another = [(1, 0), (0, 1), (0, 1)]  # what kernels in another stream still do, and then nothing
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: memory.copy_(torch.tensor(another.pop(0))))
    device = torch.device("cuda", 1)
    with pytest.raises(ValueError, match="row numbers"):
        device_flags.check(device)
    assert memory.tolist() == [0, 1]
    device_flags.check(device)
    assert not another


def test_words_that_another_thread_drops_are_put_there_again(monkeypatch):
    from keyedopt.fused.backends.triton import device_buffers

    class Shared(OrderedDict[Any, Any]):
        """After each look at it another thread has dropped everything."""

        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            self.clear()
            return found

    monkeypatch.setattr(device_buffers, "_CACHED", Shared())
    first = device_buffers.to_device([3, 4], CPU)
    second = device_buffers.to_device([3, 4], CPU)
    assert first.tolist() == second.tolist() == [3, 4]


def test_words_that_were_used_of_late_stay(monkeypatch):
    from keyedopt.fused.backends.triton import device_buffers

    monkeypatch.setattr(device_buffers, "_CACHED", OrderedDict())
    monkeypatch.setattr(device_buffers, "MAX_CACHED", 2)
    first = device_buffers.to_device([1], CPU)
    device_buffers.to_device([2], CPU)
    assert device_buffers.to_device([1], CPU) is first
    device_buffers.to_device([3], CPU)
    assert device_buffers.to_device([1], CPU) is first
    assert [key[1] for key in device_buffers._CACHED] == [(3,), (1,)]


@pytest.mark.parametrize("moved", [False, True])
def test_gradients_are_kept_for_the_stream_that_updates(monkeypatch, moved):
    """The leaf belongs to the stream of the first forward, for as long as any graph is there."""
    streams, said = iter([(0, 0, 1), (7, 0, 1) if moved else (0, 0, 1)]), []
    monkeypatch.setattr(backward, "current_id", lambda device: next(streams))
    monkeypatch.setattr(backward, "stream_of", {(7, 0, 1): "other"}.get)
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: said.append((tuple(tensor.shape), stream))
    )
    step(made())
    assert said == ([((2, 8), "other")] if moved else [])


@pytest.mark.parametrize(
    ("algorithm", "on_device", "added"),
    [
        (fused.Adam, False, [0, 1, 2]),
        (fused.Adam, True, [0, 0, 0]),
        (fused.SGD, True, [0, 1, 2]),
    ],
)
def test_what_a_graph_replays_draws_like_the_steps_that_it_replaces(monkeypatch, algorithm, on_device, added):
    """A seed is a word of the host, which is frozen; the count of steps, on the device, is not."""
    from keyedopt.fused.backends.torch import TorchBackend

    given = []
    monkeypatch.setattr(TorchBackend, "counts_steps", lambda backend, device: on_device)
    monkeypatch.setattr(TorchBackend, "update", lambda this, tables, lookups, step: given.append(step.seed))
    for seed in (7, 8):
        module = made(algorithm, rounding_seed=seed)
        for _ in range(3):
            step(module)
    assert [seed - given[0] for seed in given] == [*added, *(1 + one for one in added)]


def test_a_capture_of_the_tables_device_counts(monkeypatch):
    now = []

    class Guard:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def __enter__(self) -> None:
            now.append(self.device.index)

        def __exit__(self, *error: object) -> None:
            now.pop()

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now == [1])
    assert update.capturing(torch.device("cuda", 1))
    assert not update.capturing(torch.device("cuda", 0))
    assert not update.capturing(CPU)


BAD = {
    "falling": [0, 3, 1, 3],
    "late": [1, 2, 3],
    "short": [0, 1, 2],
    "long": [0, 1, 9],
    "far": [0, 2**40, 3],
    "negative": [0, -(2**40), 3],
}


@pytest.mark.parametrize("name", BAD)
def test_the_bags_of_wrong_offsets_are_some_of_them(name):
    """What torch does for right ones writes wherever these say."""
    offsets = torch.tensor(BAD[name])
    found = backward._bags(offsets, 3, checked=False)
    assert found.shape == (3,)
    assert 0 <= int(found.min()) <= int(found.max()) <= len(offsets) - 2


def test_the_bags_of_right_offsets():
    for offsets in ([0, 2, 2, 5, 5], [0, 0, 5], [0, 5]):
        given = torch.tensor(offsets)
        right = torch.repeat_interleave(given.diff(), output_size=5)
        for checked in (True, False):
            assert torch.equal(backward._bags(given, 5, checked), right)
    assert backward._bags(torch.tensor([0, 0]), 0, checked=False).shape == (0,)


def test_the_gradient_of_weights_checks_where_nobody_has(monkeypatch):
    asked = []
    known = backward._bags
    monkeypatch.setattr(
        backward, "_bags", lambda *given, checked: asked.append(checked) or known(*given, True)
    )
    offsets = torch.tensor([0, 2, 3])
    lookup = Lookup(0, torch.tensor([1, 2, 1]), offsets, torch.ones(3))
    found = []
    for checked in (True, False):
        monkeypatch.setattr(type(offsets), "is_cpu", checked, raising=False)
        found.append(
            backward._weights_gradient(lookup, torch.ones(3, 4), torch.tensor([[1.0] * 4, [2.0] * 4]))
        )
    assert asked == [True, False]
    assert torch.equal(*found)
    assert found[0].tolist() == [4.0, 4.0, 8.0]


@pytest.mark.parametrize("pools", [True, False])
@pytest.mark.parametrize("name", [*BAD, "large", "below"])
def test_bad_lookups_of_plain_tables_are_refused_by_name(name, pools):
    """Torch looks these up, and does not say what was wrong; on CUDA it stops the whole process."""
    kind = fused.EmbeddingBagConfig if pools else fused.EmbeddingConfig
    make = fused.EmbeddingBagCollection if pools else fused.EmbeddingCollection
    module = make([kind(10, 4, name="t", feature_names=["f"])])
    values = {"large": [1, 2, 10], "below": [1, -1, 3]}.get(name, [1, 2, 3])
    given = {"f": (torch.tensor(values), torch.tensor(BAD.get(name, [0, 1, 3])))}
    with pytest.raises(ValueError, match="feature 'f'"):
        module(given)


# --- in Triton's interpreter ----------------------------------------------------------------------


def case_draws() -> None:
    """With one seed, the draws are those of the count that the kernel reads."""
    from keyedopt.fused.backends.triton import TritonBackend

    found = []
    for count in (1, 2, 2):
        weight = torch.ones(4, 64, dtype=torch.bfloat16)
        lookup = Lookup(0, torch.arange(4), grad=torch.full((4, 64), 0.001))
        given = Step("sgd", lr=1.0, count=torch.tensor(count), seed=7)
        TritonBackend().update([Table(weight)], [lookup], given)
        found.append(weight)
    assert not torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    yield "draws", case_draws


def test_draws(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = run_alone(tmp_path_factory, __file__)
    assert found == {name: "" for name, _ in cases()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    hand_over(outcomes(cases()))
