"""Semi-synchronous training: the reference's own."""

from keyedopt.reference.semi_sync import SemisyncOptimizer

__all__ = ["SemisyncOptimizer"]
