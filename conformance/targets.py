"""The implementations that keyedopt knows by name: its own, and published peers."""

from keyedopt.conformance.implementation import Implementation

#: The specification in readable torch.
reference = Implementation(
    name="reference",
    root="keyedopt.reference",
    areas=("keyed", "combined", "wrapper", "clipping", "warmup", "fused", "algorithms", "fault_tolerance", "semi_sync"),
    distributions=("keyedopt",),
)

#: torchrec.optim as published.
torchrec = Implementation(
    name="torchrec",
    root="torchrec.optim",
    areas=("keyed", "combined", "wrapper", "clipping", "warmup", "fused", "semi_sync", "algorithms"),
    placeholders=("SGD", "Adagrad", "Adam", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB", "LarsSGD"),
    absent=(
        "RowWiseAdagrad.sparse",  # its docstring says that it does not take them
        *(f"RowWiseAdagrad.{name}" for name in ("decay", "rows", "max_norm", "error_if_nonfinite")),
    ),
    distributions=("torchrec",),
    install=(
        "pip install --no-deps torchrec==1.8.0 && "
        "pip install tensordict torchmetrics==1.0.3 pyre-extensions tqdm"
    ),
)

#: torchft.optim as published: the wrapper that asks a manager before each step.
torchft = Implementation(
    name="torchft",
    root="torchft.optim",
    names={"FaultTolerantOptimizer": "torchft.optim:OptimizerWrapper"},
    areas=("fault_tolerance",),
    distributions=("torchft",),
    install="pip install 'keyedopt[torchft]'",
)
