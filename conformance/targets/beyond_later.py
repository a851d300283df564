"""More adapters of libraries beyond the panel, as those of `keyedopt.conformance.targets.beyond`."""

from keyedopt.conformance.targets.beyond import UNSUPPORTED, described

# --- a third set, checked after what the second one had shown was mended --------------------------

agc_optims = described(  # a bound that no gradient reaches
    "agc-optims",
    "agc_optims.optim",
    {one: f"agc_optims.optim:{one}_AGC" for one in ("SGD", "Adam", "AdamW")},
    absent=UNSUPPORTED,
    fixed_options={
        **{f"{one}.clipping": 0.99 for one in ("SGD", "Adam", "AdamW")},
        **{f"{one}.agc_eps": 1e9 for one in ("SGD", "Adam", "AdamW")},
        "SGD.lr": 1e-3,
    },
)
composer = described(  # its decay follows the schedule, but not the learning rate
    "mosaicml",
    "composer.optim.decoupled_weight_decay",
    {
        "SGD": "composer.optim.decoupled_weight_decay:DecoupledSGDW",
        "AdamW": "composer.optim.decoupled_weight_decay:DecoupledAdamW",
    },
    absent=(*UNSUPPORTED, "*.weight_decay"),
    defaults={"AdamW.betas": (0.9, 0.95)},
    fixed_options={"SGD.lr": 1e-3, "AdamW.weight_decay": 0.0},
)
easynlp = described(
    "pai-easynlp",
    "easynlp.core.optimizers",
    {"AdamW": "easynlp.core.optimizers:AdamW"},
    absent=UNSUPPORTED,
    defaults={"AdamW.eps": 1e-6, "AdamW.weight_decay": 0},
    variants={"AdamW": "decay_after eps_before"},
)
fira = described(
    "fira",
    "fira.fira_adamw",
    {"AdamW": "fira.fira_adamw:AdamW"},
    absent=UNSUPPORTED,
    defaults={"AdamW.eps": 1e-6, "AdamW.weight_decay": 0},
    fixed_options={"AdamW.no_deprecation_warning": True},
    variants={"AdamW": "decay_after eps_before"},
)
flashoptim = described(
    "flashoptim",
    "flashoptim",
    {one: f"flashoptim:Flash{one}" for one in ("SGD", "Adam", "AdamW")},
    absent=UNSUPPORTED,
    fixed_options={
        f"{one}.{option}": value
        for one in ("SGD", "Adam", "AdamW")
        for option, value in {"quantize": False, "master_weight_bits": None, "fused": False}.items()
    },
    variants={"SGD": "dampened_first"},
    dtypes=("float32",),
)
geoopt = described(
    "geoopt",
    "geoopt.optim",
    {
        "SGD": "geoopt.optim:RiemannianSGD",
        "Adam": "geoopt.optim:RiemannianAdam",
        "SparseAdam": "geoopt.optim:SparseRiemannianAdam",
    },
    absent=("*.maximize", "SGD.sparse", "Adam.sparse", "SparseAdam.any_shape"),
    areas=("algorithms", "sparse"),
    fixed_options={"SGD.lr": 1e-3},
)
jiant = described(
    "jiant",
    "jiant.ext.radam",
    {"AdamW": "jiant.ext.radam:AdamW"},
    absent=UNSUPPORTED,
    defaults={"AdamW.weight_decay": 0},
    variants={"AdamW": "eps_before"},
    dtypes=("float32",),
)
ladam = described(  # without its smoothing
    "ladam",
    "ladam",
    {"AdamW": "ladam:LAdamW", "Adagrad": "ladam.optimizer:LAdaGrad"},
    absent=(*UNSUPPORTED, "Adagrad.initial_accumulator_value", "Adagrad.positional"),
    defaults={"AdamW.weight_decay": 0},
    fixed_options={"AdamW.c2": 0.0, "Adagrad.c2": 0.0},
    state_names={"AdamW.exp_avg": "m", "AdamW.exp_avg_sq": "v"},
    variants={"Adagrad": "decoupled"},
)
modelscope = described(
    "modelscope",
    "modelscope.trainers.optimizer.child_tuning_adamw_optimizer",
    {"AdamW": "modelscope.trainers.optimizer.child_tuning_adamw_optimizer:ChildTuningAdamW"},
    absent=UNSUPPORTED,
    defaults={"AdamW.eps": 1e-6, "AdamW.weight_decay": 0},
    variants={"AdamW": "decay_after eps_before"},
)
parlai = described(
    "parlai",
    "parlai.utils.fp16",
    {"Adam": "parlai.utils.fp16:MemoryEfficientFP16Adam"},
    absent=("*.sparse",),
    variants={"Adam": "eps_before"},
    dtypes=("float16", "float32"),
)
pl_bolts = described(
    "lightning-bolts",
    "pl_bolts.optimizers.lars",
    {"LarsSGD": "pl_bolts.optimizers.lars:LARS"},
    absent=(*UNSUPPORTED, "*.positional"),
    option_names={"LarsSGD.eta": "trust_coefficient"},
    defaults={"LarsSGD.momentum": 0},
    fixed_options={"LarsSGD.eps": 0.0, "LarsSGD.lr": 1e-3},
    state_names={"LarsSGD.momentum_buffer": ""},  # without the learning rate
    variants={"LarsSGD": "per_tensor only_decayed"},
)
pywick = described(
    "pywick",
    "pywick.optimizers",
    {
        "AdamW": "pywick.optimizers.adamw:AdamW",
        "Adam": "pywick.optimizers.qhadam:QHAdam",
        "LarsSGD": "pywick.optimizers.lars:Lars",
    },
    absent=(*UNSUPPORTED, "LarsSGD.positional", "Adam.positional"),
    option_names={"LarsSGD.eta": "trust_coeff"},
    defaults={"LarsSGD.lr": 1.0, "LarsSGD.momentum": 0},
    fixed_options={"LarsSGD.eps": 0.0, "LarsSGD.always_adapt": True},
    state_names={"Adam.exp_avg": "", "Adam.exp_avg_sq": "", "LarsSGD.momentum_buffer": ""},
    variants={"AdamW": "eps_before", "LarsSGD": "per_tensor"},
)
s3prl = described(
    "s3prl",
    "s3prl.optimizers",
    {"AdamW": "s3prl.optimizers:AdamW", "LAMB": "s3prl.optimizers:Lamb"},
    absent=(*UNSUPPORTED, "LAMB.positional"),
    defaults={"AdamW.eps": 1e-7, "AdamW.weight_decay": 0, "LAMB.eps": 1e-8},
    variants={"AdamW": "decay_after eps_before", "LAMB": "per_tensor no_debias"},
)
torchlab = described(
    "torchlab-pytorch",
    "torchlab.optimizers",
    {
        "SGD": "torchlab.optimizers:SGDW",
        "Adam": "torchlab.optimizers:QHAdam",
        "LAMB": "torchlab.optimizers:LAMB",
        "LarsSGD": "torchlab.optimizers:LARS",
    },
    absent=(*UNSUPPORTED, "LarsSGD.dampening", "*.positional"),
    option_names={"LarsSGD.eta": "trust_coefficient"},
    defaults={"SGD.lr": 1e-2, "LAMB.eps": 1e-6, "LarsSGD.lr": 0.1},
    fixed_options={"LAMB.clamp_value": 1e9, "LarsSGD.eps": 0.0},
    state_names={
        **{f"{one}.exp_avg": "m" for one in ("Adam", "LAMB")},
        **{f"{one}.exp_avg_sq": "v" for one in ("Adam", "LAMB")},
        "SGD.momentum_buffer": "buf",
        "LarsSGD.momentum_buffer": "",
    },
    variants={"SGD": "decoupled", "LAMB": "per_tensor no_debias", "LarsSGD": "per_tensor"},
)

# --- a fourth set, checked after what the third one had shown was mended --------------------------

bregman = described(  # with no regularizer
    "bregman-learning",
    "bregman.optimizers",
    {"SGD": "bregman.optimizers:LinBreg", "Adam": "bregman.optimizers:AdaBreg"},
    absent=(*UNSUPPORTED, "*.positional", "*.weight_decay", "SGD.momentum", "SGD.dampening", "SGD.nesterov"),
    state_names={"Adam.exp_avg": "first_moment_estimate", "Adam.exp_avg_sq": "second_moment_estimate"},
)
evie_optim = described(  # without its gate
    "evie-optim",
    "evie_optim",
    {"AdamW": "evie_optim:EvieOptimizer"},
    absent=(*UNSUPPORTED, "*.positional", "*.betas"),
    defaults={"AdamW.weight_decay": 0},
    fixed_options={"AdamW.gamma0": 0.0},
    state_names={"AdamW.exp_avg": "m1", "AdamW.exp_avg_sq": "m2"},
    variants={"AdamW": "eps_bound"},
)
fracgrad = described(  # without its operator
    "fracgrad",
    "FracGrad.optimizers",
    {
        "SGD": "FracGrad.optimizers:fSGD",
        "Adagrad": "FracGrad.optimizers:fAdaGrad",
        "Adam": "FracGrad.optimizers:fAdam",
    },
    absent=(
        *UNSUPPORTED,
        *(
            "*.positional",
            "SGD.dampening",
            "Ada*.weight_decay",
            "Adagrad.lr_decay",
            "Adagrad.initial_accumulator_value",
        ),
    ),
    defaults={"SGD.lr": 0.03, "Adagrad.lr": 0.03},
    state_names={"Adam.exp_avg": "", "Adam.exp_avg_sq": "", "Adagrad.sum": ""},
)
mmselfsup = described(
    "mmselfsup",
    "mmselfsup.engine.optimizers",
    {"LarsSGD": "mmselfsup.engine.optimizers.lars:LARS"},
    absent=(*UNSUPPORTED, "*.positional"),
    defaults={"LarsSGD.momentum": 0},
    fixed_options={"LarsSGD.eps": 0.0, "LarsSGD.lr": 1e-3},
    variants={"LarsSGD": "per_tensor"},
)
psd_optimizer = described(  # never perturbed
    "psd-optimizer",
    "psd_optimizer",
    {"Adam": "psd_optimizer:PerturbedAdam"},
    absent=(*UNSUPPORTED, "*.weight_decay"),
    fixed_options={"Adam.r": 0.0, "Adam.g_thres": 1e-300},
)
pytext = described(
    "pytext-nlp",
    "pytext.optimizer.lamb",
    {"LAMB": "pytext.optimizer.lamb:Lamb"},
    absent=UNSUPPORTED,
    defaults={"LAMB.eps": 1e-6},
    variants={"LAMB": "per_tensor no_debias"},
)
rad = described(
    "pytorch-rad",
    "rad.optim",
    {"SGD": "rad.optim:SGD", "Adam": "rad.optim:Adam", "AdamW": "rad.optim:AdamW"},
    absent=(*UNSUPPORTED, "SGD.momentum", "SGD.dampening", "SGD.nesterov", "SGD.positional"),
    fixed_options={"SGD.lr": 1e-3},
)
relativistic_adam = described(  # at a speed that is never reached
    "relativistic-adam",
    "relativistic_adam",
    {"Adam": "relativistic_adam:RelativisticAdam", "AdamW": "relativistic_adam:RelativisticAdamW"},
    absent=(*UNSUPPORTED, "*.positional"),
    fixed_options={"Adam.speed_limit": 1e30, "AdamW.speed_limit": 1e30},
    variants={"Adam": "eps_before", "AdamW": "decay_after eps_before"},
)
torch_sgld = described(  # without its noise
    "torch-sgld",
    "torch_sgld",
    {"SGD": "torch_sgld:SGLD"},
    absent=(*UNSUPPORTED, "*.momentum", "*.dampening", "*.nesterov", "*.positional"),
    fixed_options={"SGD.temperature": 0.0},
)
torchkbert = described(
    "torchkbert",
    "torchKbert.optimization",
    {"AdamW": "torchKbert.optimization:BertAdam"},
    absent=(*UNSUPPORTED, "*.betas"),
    option_names={"AdamW.eps": "e"},
    defaults={"AdamW.eps": 1e-6},
    fixed_options={"AdamW.max_grad_norm": -1.0, "AdamW.lr": 1e-3},
    state_names={"AdamW.exp_avg": "next_m", "AdamW.exp_avg_sq": "next_v"},
    variants={"AdamW": "no_debias"},
)
