"""Learning-rate schedules: re-exported from the reference."""

from keyedopt.reference.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__all__ = ["WarmupOptimizer", "WarmupPolicy", "WarmupStage"]
