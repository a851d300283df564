"""The error flag of a device reaches the host without synchronizing; streams are patched."""

from unittest.mock import patch

import pytest
import torch

pytest.importorskip("triton")

from keyedopt.fused.backends.triton import device_flags
from keyedopt.fused.backends.triton.streams import StreamTensors

DEVICE = torch.device("cuda", 0)


class Event:
    """An event that is over when a test says so."""

    done = False

    def query(self):
        return self.done


@pytest.fixture
def event(monkeypatch):
    """Return the event of each copy; the flag is on the CPU, and nothing may synchronize."""
    one, memory = Event(), torch.tensor([0, 1])
    empty = torch.empty

    class Stream:
        def record_event(self, event):
            assert event is one

    monkeypatch.setattr(device_flags, "_COPIES", {})
    monkeypatch.setattr(device_flags, "capturing", lambda device: False)
    monkeypatch.setattr(device_flags, "_SPARE", {})
    monkeypatch.setattr(device_flags, "current_id", lambda device: (0, 0, 1))
    monkeypatch.setattr(device_flags, "stream_of", lambda identity: Stream())
    monkeypatch.setattr(torch.cuda, "Event", lambda: one)
    flags = memory.view(torch.int32)
    kept = StreamTensors((flags[:3], flags[:3], memory[1:], flags[:1]))
    monkeypatch.setattr(device_flags, "_memory", lambda device: kept)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **more: empty(*shape, **more))
    one.memory = memory
    return one


def synchronizing():
    return patch.object(torch.cuda, "synchronize")


def test_a_flag_is_raised_at_the_first_step_after_it_arrived(event):
    event.memory.copy_(torch.tensor([1, 0]))
    device_flags.send_flag(DEVICE)
    with synchronizing() as synchronized:
        device_flags.check_arrived(DEVICE)
        assert not synchronized.called
        event.done = True
        with pytest.raises(ValueError, match="row numbers"):
            device_flags.check_arrived(DEVICE)
        assert synchronized.called
    assert event.memory.tolist() == [0, 1]
    device_flags.check_arrived(DEVICE)


def test_a_cleared_flag_is_cleared_for_every_stream(event):
    event.memory.copy_(torch.tensor([1, 0]))
    seen = []
    with patch.object(torch.cuda, "synchronize", lambda device: seen.append(event.memory.tolist())):
        with pytest.raises(ValueError, match="row numbers"):
            device_flags.check(DEVICE)
        assert seen == [[1, 0], [0, 1]], "once before the flag is read, once after it was cleared"
        seen.clear()
        device_flags.check(DEVICE)
        assert len(seen) == 1, "nothing was cleared"


def test_valid_steps_never_synchronize(event):
    event.done = True
    with synchronizing() as synchronized:
        for _ in range(3):
            device_flags.check_arrived(DEVICE)
            device_flags.send_flag(DEVICE)
    assert not synchronized.called


def test_a_flag_that_was_set_after_a_copy_is_seen_by_the_next(event):
    device_flags.send_flag(DEVICE)
    event.memory.copy_(torch.tensor([2, 0]))
    event.done = True
    device_flags.check_arrived(DEVICE)
    device_flags.send_flag(DEVICE)
    with synchronizing(), pytest.raises(ValueError, match="offsets"):
        device_flags.check_arrived(DEVICE)
