"""The reference as a target on ``meta``, whose tensors have no values; a check refuses it otherwise."""

from dataclasses import replace

from keyedopt.conformance.run import engine, variation
from keyedopt.conformance.targets import builtin, devices

#: The reference, on ``meta`` only.
IMPLEMENTATION = replace(builtin.reference, devices=("meta",))

devices._computes = lambda device, dtype: True
# Leave out cases in situations: they need the same values as the plain case.
engine.is_plain = lambda item, implementation: variation.SITUATION in item.stash
