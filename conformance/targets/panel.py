"""Adapters of the published libraries that the panel checks, each in an environment of its own.

An adapter says what a library documents. `python -m keyedopt.tools.panel` installs and checks them;
``conformance/PANEL.md`` has the verdicts.
"""

from collections.abc import Mapping
from typing import Any

from keyedopt.conformance.targets.implementation import ANY_DEVICE, Implementation

#: Options and behaviour that only the reference documents.
_OWN = ("decay", "rows", "bias_correction", "eps_placement", "error_if_nonfinite")
#: What the cases of an area need from others, and torch's own kernels.
_ELSEWHERE = (
    *("KeyedOptimizerWrapper", "GradientClippingOptimizer", "WarmupOptimizer"),
    *("*.fused", "*.foreach", "*.dtensor"),
)
_ALGORITHMS = (
    *("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "AdamW", "PartialRowWiseAdam"),
    *("LAMB", "PartialRowWiseLAMB", "LarsSGD", "Ftrl"),
)


def library(
    name: str, package: str, classes: Mapping[str, str], absent: tuple[str, ...] = (), **more: Any
) -> Implementation:
    """Describe a library with some of the algorithms: documented name -> ``module:class``."""
    missing = tuple(each for each in _ALGORITHMS if each not in classes)
    return Implementation(
        name=name,
        root=package,
        names=classes,
        absent=(*_ELSEWHERE, "Accumulate*", *(f"*.{one}" for one in _OWN), *missing, *absent),
        **{
            "areas": ("algorithms",),
            "dtypes": ("float32",),
            "devices": ("cpu", "cuda", ANY_DEVICE),
            "distributions": (name,),
            **more,
        },
    )


_LAMB = {"LAMB.eps": 1e-6}
#: LARS that documents: without weight_decay a parameter is not scaled.
_DECAYED = "per_tensor only_decayed"

timm = library(
    "timm",
    "timm.optim",
    {"LAMB": "timm.optim.lamb:Lamb", "LarsSGD": "timm.optim.lars:Lars", "SGD": "timm.optim.sgdw:SGDW"},
    absent=("*.sparse", "LAMB.maximize", "LarsSGD.maximize", "LarsSGD.momentum_buffer", "*.positional"),
    option_names={"LarsSGD.eta": "trust_coeff"},
    defaults={**_LAMB, "LAMB.weight_decay": 0.01, "LarsSGD.momentum": 0},
    fixed_options={
        "LAMB.always_adapt": True,
        "LAMB.max_grad_norm": None,
        "LarsSGD.always_adapt": True,
        "LarsSGD.eps": 0.0,
    },
    state_names={"LarsSGD.momentum_buffer": ""},  # without the learning rate
    variants={"LAMB": "per_tensor", "LarsSGD": "per_tensor", "SGD": "decoupled"},
)
pytorch_optimizer = library(
    "pytorch-optimizer",
    "pytorch_optimizer",
    {"LAMB": "pytorch_optimizer:Lamb", "LarsSGD": "pytorch_optimizer:LARS", "SGD": "pytorch_optimizer:SGDW"},
    absent=("*.sparse", "*.positional", "LarsSGD.momentum_buffer"),
    option_names={"LarsSGD.eta": "trust_coefficient"},
    defaults={**_LAMB, "SGD.lr": 1e-4},
    fixed_options={"LAMB.weight_decouple": False, "LAMB.adam_debias": True},
    state_names={"LarsSGD.momentum_buffer": ""},
    variants={"LAMB": "per_tensor no_debias", "LarsSGD": "per_tensor", "SGD": "decoupled"},
    distributions=("pytorch_optimizer",),
)
torch_optimizer = library(
    "torch-optimizer",
    "torch_optimizer",
    {
        "LAMB": "torch_optimizer:Lamb",
        "LarsSGD": "torch_optimizer:LARS",
        "SGD": "torch_optimizer:SGDW",
    },
    absent=("*.sparse", "*.maximize", "*.positional", "LarsSGD.momentum_buffer"),
    option_names={"LarsSGD.eta": "trust_coefficient"},
    defaults={**_LAMB, "LarsSGD.lr": 1e-2, "LarsSGD.momentum": 0},
    fixed_options={"LarsSGD.eps": 0.0, "LarsSGD.trust_coefficient": 1e-3},
    state_names={"LarsSGD.momentum_buffer": ""},
    variants={"LAMB": "per_tensor no_debias", "LarsSGD": _DECAYED, "SGD": "decoupled"},
    distributions=("torch-optimizer",),
)
pytorch_lamb = library(
    "pytorch-lamb",
    "pytorch_lamb",
    {"LAMB": "pytorch_lamb:Lamb"},
    absent=("*.sparse", "*.maximize"),
    defaults=_LAMB,
    variants={"LAMB": "per_tensor no_debias"},
    distributions=("pytorch-lamb",),
)
optimi = library(
    "optimi",
    "optimi",
    {"SGD": "optimi:SGD", "Adam": "optimi:Adam", "AdamW": "optimi:AdamW"},
    absent=(
        *("*.sparse", "*.maximize", "*.positional", "SGD.dampening", "SGD.nesterov"),
        *("SGD.momentum_buffer", "*.exp_avg", "*.exp_avg_sq"),
    ),
    defaults={"Adam*.betas": (0.9, 0.99), "Adam*.eps": 1e-6},
    fixed_options={"*.lr": 1e-3},
    state_names={"SGD.momentum_buffer": "exp_avg", "Adam*.exp_avg": "", "Adam*.exp_avg_sq": ""},  # corrected
    distributions=("torch-optimi",),
)
bitsandbytes = library(  # its LAMB and LARS bound the norm of the update, and are other algorithms
    "bitsandbytes",
    "bitsandbytes.optim",
    {
        "SGD": "bitsandbytes.optim:SGD32bit",
        "Adam": "bitsandbytes.optim:Adam32bit",
        "AdamW": "bitsandbytes.optim:AdamW32bit",
        "Adagrad": "bitsandbytes.optim:Adagrad32bit",
    },
    absent=(
        *("*.sparse", "*.maximize", "*.positional", "*.exp_avg*", "*.sum", "*.momentum_buffer"),
        *("Adagrad.lr_decay", "Adagrad.initial_accumulator_value"),
    ),
    fixed_options={"SGD.lr": 1e-3, "SGD.momentum": 0.9},
    state_names={
        **{f"Adam*.{name}": "" for name in ("exp_avg", "exp_avg_sq")},
        "Adagrad.sum": "",
        "SGD.momentum_buffer": "",
    },
)


def _of_transformers(name: str, package: str, place: str, distribution: str) -> Implementation:
    """Describe a copy of the AdamW that transformers had until its version 5."""
    return library(
        name,
        package,
        {"AdamW": place},
        absent=("*.sparse", "*.maximize", "*.positional"),
        defaults={"AdamW.eps": 1e-6, "AdamW.weight_decay": 0.0},
        fixed_options={"AdamW.no_deprecation_warning": True},
        variants={"AdamW": "decay_after eps_before"},
        distributions=(distribution,),
    )


transformers = _of_transformers(
    "transformers", "transformers.optimization", "transformers.optimization:AdamW", "transformers"
)
apollo = _of_transformers("apollo-torch", "apollo_torch", "apollo_torch.apollo:AdamW", "apollo-torch")
galore = _of_transformers("galore-torch", "galore_torch", "galore_torch:GaLoreAdamW", "galore-torch")
dlrm = library(
    "dlrm",
    "rwsadagrad",
    {"Adagrad": "rwsadagrad:RWSAdagrad"},  # its rows are those of sparse gradients only
    absent=("*.sparse", "*.maximize"),
    distributions=(),
)
catalyst = library(
    "catalyst",
    "catalyst.contrib.optimizers.lamb",
    {"LAMB": "catalyst.contrib.optimizers.lamb:Lamb"},
    absent=("*.sparse", "*.maximize", "*.positional"),
    defaults=_LAMB,
    variants={"LAMB": "per_tensor no_debias"},
)
lightly = library(
    "lightly",
    "lightly.utils.lars",
    {"LarsSGD": "lightly.utils.lars:LARS"},
    absent=("*.sparse", "*.maximize", "*.positional", "LarsSGD.momentum_buffer"),
    option_names={"LarsSGD.eta": "trust_coefficient"},
    defaults={"LarsSGD.momentum": 0},
    fixed_options={"LarsSGD.lr": 1e-3, "LarsSGD.eps": 0.0},
    state_names={"LarsSGD.momentum_buffer": ""},
    variants={"LarsSGD": _DECAYED},
)
torchao = library(  # it quantizes the state of parameters with 4,096 elements and more
    "torchao",
    "torchao.optim",
    {"Adam": "torchao.optim:Adam8bit"},
    absent=("*.sparse", "*.maximize", "*.positional"),
    compiles=True,
)
deepspeed = library(
    "deepspeed",
    "deepspeed.ops",
    {
        "Adam": "deepspeed.ops.adam:DeepSpeedCPUAdam",
        "Adagrad": "deepspeed.ops.adagrad:DeepSpeedCPUAdagrad",
    },
    absent=(
        *(
            "*.maximize",
            "*.positional",
            "Adam.sparse",
            "Adagrad.lr_decay",
            "Adagrad.initial_accumulator_value",
        ),
        *("Adagrad.sum", "Adagrad.sparse"),
    ),
    fixed_options={"Adam.adamw_mode": False},
    state_names={"Adagrad.sum": "exp_avg_sq"},
    devices=("cpu",),
    compiles=True,
)
colossalai = library(  # its CPUAdam finds no kernel without CUDA
    "colossalai",
    "colossalai.nn.optimizer",
    {
        "LAMB": "colossalai.nn.optimizer.lamb:Lamb",
        "LarsSGD": "colossalai.nn.optimizer.lars:Lars",
    },
    absent=("*.sparse", "*.maximize", "*.positional", "LarsSGD.momentum_buffer"),
    option_names={"LarsSGD.eta": "eeta"},
    defaults={**_LAMB, "LarsSGD.momentum": 0},
    state_names={"LarsSGD.momentum_buffer": ""},
    variants={"LAMB": "per_tensor no_debias", "LarsSGD": "per_tensor"},
)
heavyball = library(  # its averages include the bias correction, and its state has other names
    "heavyball",
    "heavyball",
    {"AdamW": "heavyball:AdamW", "SGD": "heavyball:SGD"},
    absent=(
        *("*.sparse", "*.maximize", "*.positional", "*.exp_avg", "*.exp_avg_sq"),
        *("SGD.momentum_buffer", "SGD.dampening", "SGD.nesterov"),
    ),
    option_names={"SGD.momentum": "beta"},
    defaults={"*.lr": 0.0025, "AdamW.betas": (0.9, 0.99), "AdamW.weight_decay": 0, "SGD.momentum": 0.9},
    state_names={"*.exp_avg": "", "*.exp_avg_sq": "", "SGD.momentum_buffer": ""},
    variants={"AdamW": "eps_bound", "SGD": "decoupled"},
    compiles=True,
)
