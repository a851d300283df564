"""What a vendor may hand over: namespaces, classes, modules, and implementations that say more."""

from types import SimpleNamespace

from keyedopt import reference
from keyedopt.conformance.targets.implementation import Implementation

NAMES = {name: getattr(reference, name) for name in reference.__all__}

NAMESPACE = SimpleNamespace(**NAMES)
CLASS = type("CLASS", (), NAMES)
MODULE = reference
KEYED_ALONE = SimpleNamespace(
    KeyedOptimizer=reference.KeyedOptimizer, KeyedOptimizerWrapper=reference.KeyedOptimizerWrapper
)
COMBINED_ALONE = SimpleNamespace(CombinedOptimizer=reference.CombinedOptimizer)

IMPLEMENTATION = Implementation(
    name="acme",
    root="vendor:KEYED_ALONE",
    names={"OptimizerWrapper": "keyedopt.reference.keyed:OptimizerWrapper"},
    areas=("keyed", "wrapper", "clipping"),
    dtypes=("float32",),
    variants={"LAMB": "per_tensor"},
    distributions=("nothing-of-this-name", "keyedopt"),
)
OBJECT = Implementation(name="an object", root=NAMESPACE, placeholders=("CombinedOptimizer",))
ABSENT = Implementation(name="absent", root="not_installed.optim", install="pip install not-installed")
