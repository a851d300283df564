"""What is filled in one stream and used in several: whoever comes from another one waits for it."""

from contextlib import nullcontext
from unittest.mock import Mock

import pytest
import torch

from keyedopt.fused.backends.triton import device_buffers, device_flags, streams
from keyedopt.fused.backends.triton.streams import StreamTensors

CPU = torch.device("cpu")


@pytest.fixture
def cuda(monkeypatch):
    """Let a test say which stream is current, and whether it is captured."""
    now, known = Mock(stream=Mock(), captured=False), []

    def identity(index):
        known.append(now.stream)
        return known.index(now.stream), index, 1

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", identity, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(streams, "stream_of", lambda identity: known[identity[0]])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.captured)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return now


def test_another_stream_waits_for_what_one_fills(cuda):
    mine, other, captured = cuda.stream, Mock(), Mock()
    tensors = tuple(Mock(device=torch.device("cuda")) for _ in range(2))
    filled = StreamTensors.record(*tensors)
    assert filled.on_current_stream() == tensors
    mine.wait_event.assert_not_called()
    cuda.stream = other
    assert filled.on_current_stream() == tensors
    other.wait_event.assert_called_once_with(mine.record_event.return_value)
    for tensor in tensors:
        tensor.record_stream.assert_called_once_with(other)
    cuda.stream, cuda.captured = captured, True
    assert filled.on_current_stream() == tensors
    captured.wait_event.assert_not_called()


def test_an_event_is_recorded_late_for_what_seldom_crosses_streams(cuda):
    mine, other = cuda.stream, Mock()
    filled = StreamTensors.record(Mock(device=torch.device("cuda")), event=False)
    filled.on_current_stream()
    mine.record_event.assert_not_called()
    cuda.stream = other
    filled.on_current_stream()
    other.wait_event.assert_called_once_with(mine.record_event.return_value)


def test_what_a_graph_fills_is_waited_for_by_nobody(cuda):
    cuda.captured = True
    filled = StreamTensors.record(Mock(device=torch.device("cuda")))
    cuda.stream.record_event.assert_not_called()
    cuda.stream, cuda.captured = Mock(), False
    filled.on_current_stream()
    cuda.stream.wait_event.assert_not_called()


def test_a_capture_is_looked_for_on_the_device_in_question(monkeypatch):
    """Of two devices, the one that is not current is captured."""
    now = Mock(device=0)

    class Guard:
        def __init__(self, device):
            self.device = device.index

        def __enter__(self):
            now.device = self.device

        def __exit__(self, *error):
            now.device = 0

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: now.device, raising=False)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.device == 1)
    assert streams.capturing(torch.device("cuda", 1))
    assert not streams.capturing(torch.device("cuda", 0))
    assert not streams.capturing(CPU)


def test_a_processor_has_no_streams():
    tensor = torch.zeros(1)
    assert StreamTensors.record(tensor) == StreamTensors((tensor,))
    assert StreamTensors((tensor,)).on_current_stream() == (tensor,)


def test_the_stream_beside_is_one_and_goes_first(cuda, monkeypatch):
    """What is not in the model of `test_triton_overlap`: how torch is asked for it."""
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **named: made.append((args, named)) or Mock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setenv(streams.OVERLAP, "1")
    streams._side_stream.cache_clear()
    device = torch.device("cuda", 0)
    for _ in range(2):
        with streams.side_stream(device, []):
            pass
    streams._side_stream.cache_clear()
    assert made == [((device,), {"priority": -1})]


def test_device_buffers_and_the_error_flag_are_used_on_the_current_stream(monkeypatch):
    used = []
    here = StreamTensors.on_current_stream
    monkeypatch.setattr(
        StreamTensors, "on_current_stream", lambda filled: used.extend(filled.tensors) or here(filled)
    )
    given = [7, 11, 13]
    first = device_buffers.to_device(given, CPU)
    assert device_buffers.to_device(given, CPU) is first
    assert used[-1] is first
    for found in (device_flags.error_flag(CPU), device_flags.step_increment(CPU)):
        assert used[-1].untyped_storage().data_ptr() == found.untyped_storage().data_ptr()
