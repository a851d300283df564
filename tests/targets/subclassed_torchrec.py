"""An implementation that only subclasses torchrec's classes and changes nothing."""

from torchrec.optim import clipping, fused, keyed, warmup

GradientClipping = clipping.GradientClipping
WarmupPolicy = warmup.WarmupPolicy


class KeyedOptimizer(keyed.KeyedOptimizer):
    pass


class KeyedOptimizerWrapper(keyed.KeyedOptimizerWrapper):
    pass


class CombinedOptimizer(keyed.CombinedOptimizer):
    pass


class OptimizerWrapper(keyed.OptimizerWrapper):
    pass


class GradientClippingOptimizer(clipping.GradientClippingOptimizer):
    pass


class WarmupStage(warmup.WarmupStage):
    pass


class WarmupOptimizer(warmup.WarmupOptimizer):
    pass


class FusedOptimizer(fused.FusedOptimizer):
    pass


class EmptyFusedOptimizer(fused.EmptyFusedOptimizer):
    pass


class FusedOptimizerModule(fused.FusedOptimizerModule):
    pass
