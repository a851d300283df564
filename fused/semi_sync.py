"""Semi-synchronous training: re-exported from the reference."""

from keyedopt.reference.semi_sync import SemisyncOptimizer

__all__ = ["SemisyncOptimizer"]
