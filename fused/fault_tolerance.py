"""Steps that a manager commits, re-exported from the reference."""

from keyedopt.reference.fault_tolerance import FaultTolerantOptimizer, Manager

__all__ = ["FaultTolerantOptimizer", "Manager"]
