"""Adapters of libraries beyond the panel, on which only the musts of the suite were judged.

They show how fair the suite is to a library that nobody had checked while the suite was written.
`python -m keyedopt.tools.panel --beyond` installs and checks them; ``conformance/PANEL.md`` has the table.
"""

import functools

from keyedopt.conformance.targets.panel import library

#: What most of these libraries lack.
UNSUPPORTED = ("*.sparse", "*.maximize")
described = functools.partial(library, dtypes=("float32", "float64"))

adv_optm = described(
    "adv-optm",
    "adv_optm",
    {"AdamW": "adv_optm:AdamW_adv"},
    absent=UNSUPPORTED,
    defaults={"AdamW.weight_decay": 0},
)
flair = described(
    "flair",
    "flair.optim",
    {"SGD": "flair.optim:SGDW"},
    absent=UNSUPPORTED,
    fixed_options={"SGD.lr": 1e-3},
    variants={"SGD": "decoupled by_itself"},
)
mmpretrain = described(
    "mmpretrain",
    "mmpretrain.engine.optimizers",
    {
        "LAMB": "mmpretrain.engine.optimizers.lamb:Lamb",
        "LarsSGD": "mmpretrain.engine.optimizers.lars:LARS",
    },
    absent=UNSUPPORTED,
    defaults={"LAMB.eps": 1e-6, "LAMB.weight_decay": 0.01, "LarsSGD.momentum": 0},
    fixed_options={
        "LAMB.always_adapt": True,
        "LAMB.max_grad_norm": 1e30,
        "LarsSGD.eps": 0.0,
        "LarsSGD.lr": 1e-3,
    },
    variants={"LAMB": "per_tensor", "LarsSGD": "per_tensor"},
)
open_lars = described(
    "open-lars",
    "open_lars",
    {"LarsSGD": "open_lars:LARS"},
    absent=UNSUPPORTED,
    option_names={"LarsSGD.eta": "trust_coefficient"},
    fixed_options={"LarsSGD.eps": 0.0, "LarsSGD.lr": 1e-3},
    variants={"LarsSGD": "per_tensor"},
)
pylocron = described(
    "pylocron",
    "holocron.optim.lamb",
    {"LAMB": "holocron.optim.lamb:LAMB"},
    absent=UNSUPPORTED,
    fixed_options={"LAMB.scale_clip": (0.0, 1e9)},
    variants={"LAMB": "per_tensor"},
)
pyro = described(
    "pyro-ppl",
    "pyro.optim.clipped_adam",
    {"Adam": "pyro.optim.clipped_adam:ClippedAdam"},
    absent=UNSUPPORTED,
    fixed_options={"Adam.clip_norm": 1e9},
    variants={"Adam": "eps_before"},
)
pytorch_pretrained_bert = described(
    "pytorch-pretrained-bert",
    "pytorch_pretrained_bert.optimization",
    {"AdamW": "pytorch_pretrained_bert.optimization:BertAdam"},
    absent=(*UNSUPPORTED, "*.betas"),
    option_names={"AdamW.eps": "e"},
    defaults={"AdamW.eps": 1e-6},
    fixed_options={"AdamW.max_grad_norm": -1.0, "AdamW.lr": 1e-3},
    state_names={"AdamW.exp_avg": "next_m", "AdamW.exp_avg_sq": "next_v"},
    variants={"AdamW": "no_debias"},
)
pytorch_pretrained_gpt = described(
    "pytorch-pretrained-bert",
    "pytorch_pretrained_bert.optimization_openai",
    {"AdamW": "pytorch_pretrained_bert.optimization_openai:OpenAIAdam"},
    absent=(*UNSUPPORTED, "*.betas"),
    option_names={"AdamW.eps": "e"},
    defaults={"AdamW.weight_decay": 0},
    fixed_options={"AdamW.lr": 1e-3, "AdamW.vector_l2": True},
    variants={"AdamW": "decay_after eps_before"},
)
pytorch_transformers = described(
    "pytorch-transformers",
    "pytorch_transformers.optimization",
    {"AdamW": "pytorch_transformers.optimization:AdamW"},
    absent=UNSUPPORTED,
    defaults={"AdamW.eps": 1e-6, "AdamW.weight_decay": 0},
    variants={"AdamW": "decay_after eps_before"},
)
torch_optim_sparse = described(
    "torch-optim-sparse",
    "torch_optim_sparse",
    {"SparseAdam": "torch_optim_sparse:SparserAdam"},
    absent=("*.maximize",),
    areas=("sparse",),
)
torchastic = described(  # it rounds at random, to bfloat16
    "torchastic",
    "torchastic",
    {"AdamW": "torchastic:AdamW"},
    absent=(*UNSUPPORTED, "*.exp_avg*"),
    defaults={"AdamW.weight_decay": 0},
    dtypes=("bfloat16",),
)
torchium = described(
    "torchium",
    "torchium.optimizers",
    {
        **{one: f"torchium.optimizers:{one}" for one in ("SGD", "Adagrad", "Adam", "AdamW", "SparseAdam")},
        "LAMB": "torchium.optimizers:LAMB",
        "LarsSGD": "torchium.optimizers:LARS",
    },
    absent=("*.maximize", "L*.sparse"),
    areas=("algorithms", "sparse"),
    option_names={"LarsSGD.eta": "trust_coefficient"},
    defaults={"LAMB.eps": 1e-6, "LAMB.weight_decay": 0.01, "LarsSGD.weight_decay": 1e-4},
    fixed_options={"LAMB.clamp_value": 1e9, "LarsSGD.eps": 0.0},
    variants={"LAMB": "per_tensor", "LarsSGD": "per_tensor"},
)
torchium_sgdw = described(
    "torchium",
    "torchium.optimizers",
    {"SGD": "torchium.optimizers:SGDW"},
    absent=(*UNSUPPORTED, "SGD.dampening", "SGD.nesterov"),
    defaults={"SGD.momentum": 0.9, "SGD.weight_decay": 1e-4},
    variants={"SGD": "decoupled"},
)
torchopt = described(  # its classes are no torch optimizers
    "torchopt",
    "torchopt.optim",
    {
        **{one: f"torchopt.optim:{one}" for one in ("SGD", "Adam", "AdamW")},
        "Adagrad": "torchopt.optim:AdaGrad",
    },
    absent=("*.sparse", "*.groups"),
    defaults={"*.set_to_none": False},
    fixed_options={"SGD.lr": 1e-3},
)

# --- a second set, checked after what the first one had shown was mended --------------------------

easycv = described(
    "pai-easycv",
    "easycv.core.optimizer.lars",
    {"LAMB": "easycv.core.optimizer.lamb:Lamb", "LarsSGD": "easycv.core.optimizer.lars:LARS"},
    absent=(*UNSUPPORTED, "*.positional"),
    defaults={"LAMB.eps": 1e-6, "LAMB.weight_decay": 0.01, "LarsSGD.momentum": 0},
    fixed_options={"LAMB.always_adapt": True, "LAMB.max_grad_norm": 1e30, "LarsSGD.lr": 1e-3},
    variants={"LAMB": "per_tensor", "LarsSGD": "per_tensor"},
)
espnet = described(
    "espnet",
    "espnet2.optimizers.sgd",
    {"SGD": "espnet2.optimizers.sgd:SGD"},
    absent=("*.maximize", "*.tensor_rate"),
    defaults={"SGD.lr": 0.1},
)
funasr = described(
    "funasr",
    "funasr.optimizers",
    {"AdamW": "funasr.optimizers.fairseq_adam:FairseqAdam", "SGD": "funasr.optimizers.sgd:SGD"},
    absent=UNSUPPORTED,
    option_names={"AdamW.betas": "adam_betas", "AdamW.eps": "adam_eps"},
    defaults={"AdamW.weight_decay": 0, "SGD.lr": 0.1},
    variants={"AdamW": "eps_before"},
    dtypes=("float32",),
)
ipex = described(
    "intel_extension_for_pytorch",
    "intel_extension_for_pytorch.optim",
    {
        "LAMB": "intel_extension_for_pytorch.optim._lamb:Lamb",
        "LarsSGD": "intel_extension_for_pytorch.optim._lars:Lars",
    },
    absent=(*UNSUPPORTED, "LarsSGD.positional", "LarsSGD.tensor_rate"),
    option_names={"LarsSGD.eta": "eeta"},
    defaults={"LarsSGD.momentum": 0},
    variants={"LAMB": "per_tensor", "LarsSGD": "per_tensor"},
)
labml = described(  # its weight_decay is an object
    "labml-nn",
    "labml_nn.optimizers.adam",
    {"Adam": "labml_nn.optimizers.adam:Adam"},
    absent=(*UNSUPPORTED, "*.weight_decay", "*.positional"),
    defaults={"Adam.eps": 1e-16},
    variants={"Adam": "eps_before"},
)
llama_cookbook = described(
    "llama-cookbook",
    "llama_cookbook.policies.anyprecision_optimizer",
    {"AdamW": "llama_cookbook.policies.anyprecision_optimizer:AnyPrecisionAdamW"},
    absent=UNSUPPORTED,
    defaults={"AdamW.weight_decay": 0},
    fixed_options={"AdamW.momentum_dtype": "torch.float32", "AdamW.variance_dtype": "torch.float32"},
    dtypes=("float32",),
)
qhoptim = described(  # with both nus at 1 it is Adam; its averages include the bias correction
    "qhoptim",
    "qhoptim.pyt.qhadam",
    {"Adam": "qhoptim.pyt.qhadam:QHAdam"},
    absent=(*UNSUPPORTED, "*.positional"),
    state_names={"Adam.exp_avg": "", "Adam.exp_avg_sq": ""},
)
simclr = described(
    "simclr",
    "simclr.modules.lars",
    {"LarsSGD": "simclr.modules.lars:LARS"},
    absent=(*UNSUPPORTED, "*.positional"),
    option_names={"LarsSGD.eta": "eeta"},
    fixed_options={"LarsSGD.lr": 1e-3},
    variants={"LarsSGD": "per_tensor"},
)
tape = described(
    "tape-proteins",
    "tape.optimization",
    {"AdamW": "tape.optimization:AdamW"},
    absent=UNSUPPORTED,
    defaults={"AdamW.eps": 1e-6, "AdamW.weight_decay": 0},
    variants={"AdamW": "decay_after eps_before"},
)
torchbiggraph = described(
    "torchbiggraph",
    "torchbiggraph.row_adagrad",
    {"RowWiseAdagrad": "torchbiggraph.row_adagrad:RowAdagrad"},
    absent=("*.maximize", "*.eps", "*.initial_accumulator_value", "*.any_shape"),
)
