"""Where the host waited for the device under test."""

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def host_synchronizations(device: torch.device) -> Iterator[list[str]]:
    """Give a list that has one line for each wait of the host for a device, when the block has ended.

    On CUDA they are the warnings of `torch.cuda.set_sync_debug_mode`, elsewhere what ``synchronizations`` of
    the device's module lists, such as the pretend accelerator's. The CPU has none.

    Raises:
        NotImplementedError: torch cannot tell on this type of device.
    """
    found: list[str] = []
    if device.type == "cpu":
        yield found
    elif device.type == "cuda":
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode(before)
        found += [f"{w.filename}:{w.lineno}" for w in caught if "synchronizing CUDA" in str(w.message)]
    else:
        synchronizations = getattr(torch.get_device_module(device), "synchronizations", None)
        if synchronizations is None:
            raise NotImplementedError(f"nothing lists the synchronizations of {device.type}")
        with synchronizations() as waits:
            yield found
        found += [f"{wait.operator} in {wait.place}" for wait in waits]
