"""Learning-rate schedules: the reference's own."""

from keyedopt.reference.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__all__ = ["WarmupOptimizer", "WarmupPolicy", "WarmupStage"]
