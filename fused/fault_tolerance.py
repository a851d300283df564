"""Steps that a manager commits: the reference's own."""

from keyedopt.reference.fault_tolerance import FaultTolerantOptimizer, Manager

__all__ = ["FaultTolerantOptimizer", "Manager"]
