"""A pretend accelerator ``npu`` for tests without hardware; importing the package registers it with torch.

Its tensors live in memory that CPU operators refuse, on two indices, ``npu:0`` and ``npu:1``. Copies to the
host with ``non_blocking=True`` arrive only when it synchronizes, and `synchronizations` lists where it did.
"""

from keyedopt.conformance.pretend.registration import register
from keyedopt.conformance.pretend.synchronizations import Synchronization, synchronizations

__all__ = ["Synchronization", "synchronizations"]

register()
