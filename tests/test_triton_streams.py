"""What is put on a device once and used in several streams: whoever comes from another one waits for it."""

from unittest.mock import Mock

import pytest
import torch

from keyedopt.fused.backends.triton import alarms, words
from keyedopt.fused.backends.triton.streams import Filled

CPU = torch.device("cpu")


@pytest.fixture
def cuda(monkeypatch):
    """Let a test say which stream is current, and whether it is captured."""
    now = Mock(stream=Mock(), captured=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now.stream)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.captured)
    return now


def test_another_stream_waits_for_what_one_fills(cuda):
    mine, other, captured = cuda.stream, Mock(), Mock()
    tensor = Mock(device=torch.device("cuda"))
    filled = Filled.by_now(tensor)
    assert filled.here() is tensor
    mine.wait_event.assert_not_called()
    cuda.stream = other
    assert filled.here() is tensor
    other.wait_event.assert_called_once_with(mine.record_event.return_value)
    tensor.record_stream.assert_called_once_with(other)
    cuda.stream, cuda.captured = captured, True
    assert filled.here() is tensor
    captured.wait_event.assert_not_called()


def test_a_processor_has_no_streams():
    tensor = torch.zeros(1)
    assert Filled.by_now(tensor) == Filled(tensor)
    assert Filled(tensor).here() is tensor


def test_words_and_the_alarm_are_asked_for_where_they_are_used(monkeypatch):
    used = []
    here = Filled.here
    monkeypatch.setattr(Filled, "here", lambda filled: used.append(filled.tensor) or here(filled))
    given = [7, 11, 13]
    first = words.on_device(given, CPU)
    assert words.on_device(given, CPU) is first
    assert used[-1] is first
    for found in (alarms.alarm_of(CPU), alarms.sound_of(CPU)):
        assert used[-1].untyped_storage().data_ptr() == found.untyped_storage().data_ptr()
