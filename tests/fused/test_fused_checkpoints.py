"""A checkpoint moves in the middle of training between the reference and the backends, windows included."""

import copy
import os
import subprocess
import sys

import pytest
import quick_interpreter  # noqa: F401 - which makes it so
import torch

from keyedopt import fused, reference
from keyedopt.fused import backends

ROWS, WIDTH = 7, 5
OPTIONS = {
    "SGD": {},
    "SGD-momentum": {"momentum": 0.9, "nesterov": True},
    "LarsSGD": {"momentum": 0.5},
    "Ftrl": {"l1": 0.01, "beta": 0.1},
    "Adagrad": {"eps": 1e-8},
    "Adagrad-decay": {"lr_decay": 0.1, "initial_accumulator_value": 0.1},
    "RowWiseAdagrad": {"eps": 1e-8, "weight_decay": 0.01, "decay": "decoupled"},
    "Adam": {"weight_decay": 0.01},
    "Adam-per-row": {"bias_correction": "per_row"},
    "SparseAdam": {},
    "PartialRowWiseAdam": {},
    "LAMB": {"weight_decay": 0.01},
    "PartialRowWiseLAMB": {},
    "AccumulateSGD": {"use_accumulate": True, "accumulate_step": 3, "momentum": 0.9},
    "AccumulateAdagrad": {"use_accumulate": True, "accumulate_step": 3},
    "AccumulateAdam": {"use_accumulate": True, "accumulate_step": 3},
    "AccumulateAdamW": {"use_accumulate": True, "accumulate_step": 3},
    "AccumulateRowWiseAdagrad": {"use_accumulate": True, "accumulate_step": 3},
}
#: What the Triton kernels do not have.
NOT_TRITON = ("Ftrl",)
#: Triton needs its interpreter where there is no GPU, and that a process of its own.
ALONE = ("triton",)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def place(backend):
    return DEVICE if backend == "triton" else "cpu"


def make(backend, name, dtype=torch.float32, **more):
    """Make a module with two tables, of the reference or of a backend."""
    library = reference if backend == "reference" else fused
    numbers = torch.Generator().manual_seed(3)

    def fill(weight):
        weight.data.copy_(torch.randn(weight.shape, generator=numbers))

    configs = [
        library.EmbeddingBagConfig(ROWS, WIDTH, "t", feature_names=["f", "g"], init_fn=fill, data_type=dtype),
        library.EmbeddingBagConfig(
            ROWS,
            WIDTH + 3,
            "u",
            feature_names=["h"],
            init_fn=fill,
            data_type=dtype,
            pooling=library.PoolingType.MEAN,
        ),
    ]
    kind = getattr(library, name.partition("-")[0])
    options = {"lr": 0.1, **OPTIONS[name]}
    if backend == "reference":
        return library.EmbeddingBagCollection(configs, kind, options)
    more |= {"device": place(backend), "backend": backend}
    return library.EmbeddingBagCollection(configs, kind, options, **more)


def train(module, seeds):
    device = next(module.parameters()).device
    for seed in seeds:
        numbers = torch.Generator().manual_seed(seed)
        bags = {}
        for feature in "fgh":
            offsets = torch.tensor([0, 2, 2, 5])
            bags[feature] = (torch.randint(0, ROWS, (5,), generator=numbers).to(device), offsets.to(device))
        outputs = module(bags)
        loss = torch.zeros((), device=device)
        for name in sorted(outputs):
            loss = (
                loss + (outputs[name] * torch.randn(outputs[name].shape, generator=numbers).to(device)).sum()
            )
        loss.backward()


def move(source, target):
    """Take a checkpoint from one module to another."""
    state = copy.deepcopy(source.fused_optimizer.state_dict())
    target.fused_optimizer.load_state_dict(state)
    with torch.no_grad():
        for old, new in zip(source.parameters(), target.parameters(), strict=True):
            new.copy_(old)


def needs(backend):
    why = backends.available()[backend]
    if why and not (backend in ALONE and os.environ.get("TRITON_INTERPRET") == "1"):
        pytest.skip(f"{backend}: {why}")


def elsewhere(*names):
    if set(ALONE) & set(names) and os.environ.get("TRITON_INTERPRET") != "1" and DEVICE == "cpu":
        pytest.skip("see test_in_the_interpreter")


def goes_on(name, source, target, dtype=torch.float32):
    for backend in {source, target} - {"reference"}:
        needs(backend)
    first, second = make(source, name, dtype), make(target, name, dtype)
    train(first, range(4))  # in the middle of a window, too
    train(second, [50])  # which leaves no trace
    if "Accumulate" in name:
        train(second, [51, 52])
    move(first, second)
    train(first, range(20, 25))
    train(second, range(20, 25))
    bound = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 4e-2, torch.float64: 1e-12}[dtype]
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        error = float((one.detach().cpu().double() - other.detach().cpu().double()).abs().max())
        assert error <= bound, error
    keys = [list(entry) for entry in first.fused_optimizer.state_dict()["state"].values()]
    assert keys == [list(entry) for entry in second.fused_optimizer.state_dict()["state"].values()]


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        (backend, name)
        for backend in ("native", "torch", "triton")
        for name in OPTIONS
        if backend != "triton" or name not in NOT_TRITON
    ],
)
@pytest.mark.parametrize("way", ["to", "from"])
def test_training_goes_on_along_the_same_trajectory(name, backend, way):
    elsewhere(backend)
    goes_on(name, *((backend, "reference") if way == "to" else ("reference", backend)))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize(
    ("source", "target"),
    [("native", "torch"), ("torch", "native")],  # triton's state goes to and from the reference above
)
def test_from_backend_to_backend(name, source, target):
    goes_on(name, source, target)


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "RowWiseAdagrad"])
@pytest.mark.parametrize("other", ["reference", "native", "triton"])
@pytest.mark.parametrize("way", ["to", "from"])
def test_through_fbgemm(name, other, way, monkeypatch):
    elsewhere(other)
    monkeypatch.setitem(OPTIONS, name, {} if name == "SGD" else {"eps": 1e-8})
    goes_on(name, *(("fbgemm", other) if way == "to" else (other, "fbgemm")))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["SGD", "RowWiseAdagrad", "Adam"])
def test_in_other_dtypes(name, dtype):
    goes_on(name, "reference", "torch" if dtype is torch.float64 else "native", dtype)


COUNTED = ("Adagrad-decay", "Adam", "SparseAdam", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB")


@pytest.mark.parametrize("name", ["SGD", "LarsSGD", "Adagrad", "RowWiseAdagrad", "Adam-per-row", *COUNTED])
@pytest.mark.parametrize("backend", ["native", "torch", "triton"])
def test_a_run_that_is_resumed_rounds_as_one_that_is_not(name, backend):
    elsewhere(backend)
    needs(backend)
    whole, half, other = (make(backend, name, torch.bfloat16, rounding_seed=3) for _ in range(3))
    train(whole, range(5))
    train(half, range(3))
    move(half, other)
    if name not in COUNTED:
        assert half.fused_optimizer.rounding_steps == 3
        other.fused_optimizer.rounding_steps = 3
    train(other, range(3, 5))
    pairs = zip(whole.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one.view(torch.int16), two.view(torch.int16)) for one, two in pairs)
    other.fused_optimizer.rounding_steps = 90  # matters where steps are not counted
    train(whole, [5])
    train(other, [5])
    pairs = zip(whole.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs) is (name in COUNTED)


def test_each_deferred_step_is_counted_for_rounding():
    module = make("native", "SGD", torch.bfloat16, rounding_seed=3)
    dense = torch.nn.Parameter(torch.ones(3))
    keyed = fused.KeyedOptimizerWrapper({"dense": dense}, lambda params: torch.optim.SGD(params, lr=0.1))
    both = fused.CombinedOptimizer([("tables", module.fused_optimizer), ("dense", keyed)])
    clipped = fused.GradientClippingOptimizer(both, fused.GradientClipping.NORM, 1e6)
    for step in range(2):
        train(module, [step])
        clipped.step()
        assert module.fused_optimizer.rounding_steps == step + 1


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_rounding_that_would_be_alike_in_every_replay_of_a_graph_is_refused(name, monkeypatch):
    module = make("torch", name, torch.bfloat16, rounding_seed=3)
    before = [weight.detach().clone() for weight in module.parameters()]
    monkeypatch.setattr("keyedopt.fused.embedding.update.capturing", lambda device: True)
    if name == "Adam":
        train(module, [0])
    else:
        with pytest.raises(RuntimeError, match="cannot be captured"):
            train(module, [0])
    assert all(map(torch.equal, module.parameters(), before)) is (name == "SGD")


@pytest.mark.complete
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is that already")
def test_in_the_interpreter():
    pytest.importorskip("triton", reason="triton is in the extra `cuda`")
    options = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-k", "triton"]
    command = [sys.executable, "-m", "pytest", *options, __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    with_fbgemm = 0 if backends.available()["fbgemm"] else 2 * 3
    assert (
        f"{2 * len(OPTIONS.keys() - set(NOT_TRITON)) + with_fbgemm + 5 + len(COUNTED)} passed" in done.stdout
    )


def unfused_gradient(seed):
    numbers = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, ROWS, (1, 5), generator=numbers)
    return torch.sparse_coo_tensor(
        rows, torch.randn(5, WIDTH, generator=numbers), (ROWS, WIDTH), check_invariants=True
    )


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("way", ["to", "from"])
def test_unfused_optimizers_go_on_along_the_same_trajectory(name, way):
    libraries = (fused, reference) if way == "to" else (reference, fused)
    weights = [torch.nn.Parameter(torch.ones(ROWS, WIDTH)) for _ in libraries]
    kind, options = name.partition("-")[0], {"lr": 0.1, **OPTIONS[name]}
    first, second = (
        getattr(library, kind)([weight], **options)
        for library, weight in zip(libraries, weights, strict=True)
    )

    def step(optimizer, weight, seeds):
        for seed in seeds:
            weight.grad = unfused_gradient(seed)
            optimizer.step()

    step(first, weights[0], range(4))
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    with torch.no_grad():
        weights[1].copy_(weights[0])
    step(first, weights[0], range(20, 25))
    step(second, weights[1], range(20, 25))
    assert float((weights[0] - weights[1]).detach().abs().max()) <= 4e-6


@pytest.mark.parametrize("library", [reference, fused])
def test_entries_of_a_wrapper_stay_out_of_the_wrapped_optimizer(library):
    class Counting(library.OptimizerWrapper):
        def __init__(self, optimizer):
            super().__init__(optimizer)
            self.params["counter"] = counter = torch.zeros(1)
            self.state[counter] = {"count": torch.ones(1)}

    weights = {"w": torch.nn.Parameter(torch.ones(2))}
    inner = library.KeyedOptimizerWrapper(weights, lambda params: torch.optim.SGD(params, lr=0.1))
    outer = Counting(inner)
    assert ([*outer.params], [*inner.params]) == (["w", "counter"], ["w"])
    assert ([*outer.state_dict()["state"]], [*inner.state_dict()["state"]]) == (["counter"], [])
