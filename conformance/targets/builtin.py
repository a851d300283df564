"""The implementations that keyedopt knows by name: its own, and published peers."""

from dataclasses import replace

from keyedopt.conformance.targets.implementation import ANY_DEVICE, Implementation

#: These run wherever torch does.
EVERYWHERE = ("cpu", "cuda", ANY_DEVICE)

#: The specification in readable torch.
reference = Implementation(
    name="reference",
    root="keyedopt.reference",
    areas=(
        "keyed",
        "combined",
        "wrapper",
        "clipping",
        "warmup",
        "fused",
        "algorithms",
        "fault_tolerance",
        "semi_sync",
        "accumulate",
        "sparse",
        "in_backward",
    ),
    devices=EVERYWHERE,
    distributions=("keyedopt",),
)

#: The same surface, as fast as the hardware allows.
fused = replace(
    reference,
    name="fused",
    root="keyedopt.fused",
    backends="keyedopt.fused.backends:ran",
    backend_variable="KEYEDOPT_BACKEND",
    other_backends=("torch", "fbgemm"),
)

#: torchrec.optim as published.
torchrec = Implementation(
    name="torchrec",
    root="torchrec.optim",
    areas=(
        "keyed",
        "combined",
        "wrapper",
        "clipping",
        "warmup",
        "fused",
        "semi_sync",
        "algorithms",
        "in_backward",
    ),
    placeholders=("SGD", "Adagrad", "Adam", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB", "LarsSGD"),
    absent=(
        *(
            "EmbeddingBagCollection",
            "EmbeddingBagConfig",
            "EmbeddingCollection",
            "EmbeddingConfig",
            "PoolingType",
        ),
        *("AdamW", "Ftrl"),
        "Accumulate*",
        "RowWiseAdagrad.sparse",  # its docstring says that it does not take them
        *(f"RowWiseAdagrad.{name}" for name in ("decay", "rows", "max_norm", "error_if_nonfinite")),
    ),
    devices=EVERYWHERE,
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
    devices=EVERYWHERE,
    distributions=("torchft",),
    install="pip install 'keyedopt[torchft]'",
)

#: FBGEMM's table-batched embeddings as published, as a fused module; see adapters/fbgemm.py.
fbgemm = Implementation(
    name="fbgemm",
    root="keyedopt.conformance.targets.adapters.fbgemm",
    names={"SGD": "torch.optim:SGD", "Adagrad": "torch.optim:Adagrad"},
    areas=("fused",),
    absent=(
        # bases and wrappers, which are torchrec's
        *(
            "FusedOptimizer",
            "EmptyFusedOptimizer",
            "FusedOptimizerModule",
            "KeyedOptimizer",
            "CombinedOptimizer",
        ),
        *("GradientClippingOptimizer", "WarmupOptimizer"),
        # not on a CPU: Adam and its kin, LARS, unpooled lookups
        *("Adam", "AdamW", "SparseAdam", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB", "LarsSGD"),
        *("Ftrl", "EmbeddingCollection", "EmbeddingConfig"),
        # its documents do not promise them
        *("SGD.momentum", "Adagrad.lr_decay", "RowWiseAdagrad.step", "*.error_if_nonfinite"),
        *("*.rows", "*.checks_options", "*.checks_rates", "*.errors_name_arguments", "*.tensor_rate"),
        *(
            "*.maximize",
            "*.any_width",
            "*.process_group",
            "*.frozen_tables",
            "*.without_optimizer",
            "*.shared_features",
            "*.converted_tables",
        ),
        *("EmbeddingBagCollection.state_dict", "EmbeddingBagCollection.initial_values"),
        *("EmbeddingBagCollection.keyed_jagged_tensors", "EmbeddingBagCollection.unlike_batches"),
        "*.optimizer_state_dtypes",
    ),
    devices=("cpu", "cuda"),
    dtypes=("float32", "float16"),
    distributions=("fbgemm-gpu-cpu", "fbgemm-gpu"),
    install="pip install 'keyedopt[cpu]'",
)

#: torch.optim as published, and torch.distributed.optim's optimizers in the backward pass.
torch = Implementation(
    name="torch",
    root="torch.optim",
    names={
        "apply_optimizer_in_backward": "torch.distributed.optim:_apply_optimizer_in_backward",
        "OtherOptimizer": "torch.optim:RAdam",  # of several: each is judged by itself if it is the target
    },
    areas=("algorithms", "sparse", "in_backward"),
    absent=(
        *("in_backward_optimizer_filter", "EmbeddingBagCollection", "Accumulate*"),
        *("RowWiseAdagrad", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB", "LarsSGD", "Ftrl"),
        *("KeyedOptimizerWrapper", "GradientClippingOptimizer", "WarmupOptimizer"),
        *("Adam.sparse", "AdamW.sparse", "OtherOptimizer.sparse"),  # its own error says to use SparseAdam
        *("OtherOptimizer.fused",),
        # options of the reference
        *(
            f"*.{name}"
            for name in ("decay", "rows", "bias_correction", "eps_placement", "error_if_nonfinite")
        ),
    ),
    devices=EVERYWHERE,
    distributions=("torch",),
    install="pip install 'keyedopt[cpu]'",
)
