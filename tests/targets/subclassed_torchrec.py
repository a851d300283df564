"""An implementation that only subclasses torchrec's classes and changes nothing."""

import importlib
from dataclasses import replace

from torchrec.optim import clipping, fused, keyed, optimizers, rowwise_adagrad, semi_sync, warmup

from keyedopt.conformance.targets.builtin import torchrec

#: The same claims; what is no class is torchrec's own.
IMPLEMENTATION = replace(torchrec, name="subclassed", root="subclassed_torchrec")

# The package has a function of that name in front of the module.
in_backward = importlib.import_module("torchrec.optim.apply_optimizer_in_backward")
apply_optimizer_in_backward = in_backward.apply_optimizer_in_backward
in_backward_optimizer_filter = optimizers.in_backward_optimizer_filter
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


class RowWiseAdagrad(rowwise_adagrad.RowWiseAdagrad):
    pass


class SemisyncOptimizer(semi_sync.SemisyncOptimizer, KeyedOptimizer):
    pass
