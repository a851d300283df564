"""Which module trains a weight in its own backward pass: the reference's registry."""

from keyedopt.reference.fused import Owner, owner_of
from keyedopt.reference.fused import own as claim

__all__ = ["Owner", "claim", "owner_of"]
