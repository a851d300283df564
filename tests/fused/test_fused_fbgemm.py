"""FBGEMM as a backend: what it is asked for, on the CPU and on CUDA, and that this is what is meant."""

import itertools
from dataclasses import replace

import pytest
import torch

from keyedopt.fused import backends
from keyedopt.fused.backends import torch_rules
from keyedopt.fused.backends.fbgemm.arguments import Arguments, arguments, refusal
from keyedopt.fused.backends.interface import ALGORITHMS, ROW_STATE, Lookup, Step, Table

#: Options, and with which algorithms of which device they are done; with all others they are refused.
ADAMS = ("adam", "sparse_adam", "partial_rowwise_adam")
DONE = {
    "plain": (
        {},
        {"cpu": ("sgd", "adagrad", "rowwise_adagrad")},
        ("sgd", "adagrad", "rowwise_adagrad", *ADAMS),
    ),
    "maximize": (
        {"maximize": True},
        {"cpu": ("sgd", "adagrad", "rowwise_adagrad")},
        ("sgd", "adagrad", "rowwise_adagrad", *ADAMS),
    ),
    "lr_decay": ({"lr_decay": 0.5}, {"cpu": ("adagrad", "rowwise_adagrad")}, ("adagrad", "rowwise_adagrad")),
    "no eps": ({"eps": 0.0}, {"cpu": ("sgd",)}, ("sgd",)),
    "l2": ({"weight_decay": 0.1, "decay": "l2"}, {"cpu": ()}, ("rowwise_adagrad",)),
    "decoupled": ({"weight_decay": 0.1, "decay": "decoupled"}, {"cpu": ()}, ("rowwise_adagrad", *ADAMS)),
    "l2 and lr_decay": (
        {"weight_decay": 0.1, "decay": "l2", "lr_decay": 0.5},
        {"cpu": ()},
        ("rowwise_adagrad",),
    ),
    "decoupled and lr_decay": ({"weight_decay": 0.1, "decay": "decoupled", "lr_decay": 0.5}, {"cpu": ()}, ()),
    "max_norm": ({"max_norm": 0.5}, {"cpu": ()}, ("rowwise_adagrad",)),
    "max_norm of 0": ({"max_norm": 0.0}, {"cpu": ()}, ()),
    "momentum": ({"momentum": 0.9}, {"cpu": ()}, ()),
    "eps before": (
        {"eps_placement": "before_bias_correction", "eps": 0.5},
        {"cpu": ()},
        ADAMS,
    ),
}
#: Which options an algorithm has; others never come with it.
HAVE = {
    "lr_decay": ("adagrad", "rowwise_adagrad"),
    "max_norm": ("rowwise_adagrad", "partial_rowwise_adam", "partial_rowwise_lamb"),
    "momentum": ("sgd", "lars_sgd"),
    "eps_placement": ADAMS[:2],
}


def step_of(algorithm, options):
    return Step(algorithm, **{"lr": 0.25, "count": 3, "eps": 1e-3, "betas": (0.8, 0.9), **options})


def listed():
    for name, (options, cpu, cuda) in DONE.items():
        for algorithm in ALGORITHMS:
            if all(algorithm in HAVE.get(option, (algorithm,)) for option in options):
                yield pytest.param(algorithm, options, {**cpu, "cuda": cuda}, id=f"{algorithm}-{name}")


CASES = list(listed())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "cuda", "mps"])
@pytest.mark.parametrize(("algorithm", "options", "done"), CASES)
def test_what_it_is_asked_for(algorithm, options, done, device, dtype):
    step = step_of(algorithm, options)
    why = refusal(step, dtype, device)
    asked = dtype in (torch.float32, torch.float16) and algorithm in done.get(device, ())
    assert (why == "") is asked, why
    if not asked:
        with pytest.raises(ValueError, match="FBGEMM"):
            arguments(step, dtype, device)
        return
    given = arguments(step, dtype, device)
    assert given.lookup == algorithm.replace("sparse_", "")
    assert (given.iteration, given.negate) == (3, step.maximize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_it_does_not_round_by_a_seed(device, dtype):
    why = refusal(Step("sgd", lr=0.1, seed=3), dtype, device)
    assert (why == "") is (dtype is torch.float32)  # which is not rounded


@pytest.mark.parametrize(("width", "asked"), [(4, True), (1024, True), (6, False), (1028, False)])
def test_widths(width, asked):
    assert (refusal(Step("sgd", lr=0.1), torch.float32, "cuda", width) == "") is asked
    assert refusal(Step("sgd", lr=0.1), torch.float32, "cpu", width) == ""


@pytest.mark.parametrize("algorithm", ["lamb", "partial_rowwise_lamb", "lars_sgd"])
def test_a_refusal_names_the_clause(algorithm):
    assert "FUSED-037" in refusal(Step(algorithm, lr=0.1), torch.float32, "cuda")


def test_no_rate_or_count_is_read_to_refuse():
    class Remote(torch.Tensor):
        def __float__(self):
            raise AssertionError("waited for")

        __int__ = __float__

    remote = torch.zeros(1).as_subclass(Remote)
    for algorithm in ALGORITHMS:
        refusal(Step(algorithm, lr=remote, count=remote, eps=1e-8), torch.float32, "cuda")


# --- the formulas ---------------------------------------------------------------------------------


def by_fbgemms_formula(given: Arguments, w, g, states):
    """Update float64 rows as FBGEMM's document says that CUDA does with these arguments."""
    wanted = {
        "eps": 0.0,
        "beta1": 0.0,
        "beta2": 0.0,
        "weight_decay": 0.0,
        "weight_decay_mode": 0,
        "max_norm": 0.0,
    }
    o = {**wanted, **given.options}
    g = -g if given.negate else g
    rate, t, decay = given.rate, given.iteration, o["weight_decay"]
    if given.lookup == "sgd":
        w -= rate * g
    elif given.lookup == "adagrad":
        states[0] += g * g
        w -= rate * g / (states[0].sqrt() + o["eps"])
    elif given.lookup == "rowwise_adagrad":
        l2 = g + decay * w if o["weight_decay_mode"] == 1 else g
        states[0] += l2.square().mean(1)
        k = (rate / (states[0].sqrt() + o["eps"]))[:, None]
        shrink = {0: 1.0, 1: 1 - k * decay, 2: 1 - rate * decay}[o["weight_decay_mode"]]
        w.copy_(shrink * w - k * g)
        if o["max_norm"]:
            norm = w.norm(dim=1, keepdim=True)
            w *= torch.where(norm > o["max_norm"], o["max_norm"] / norm, 1.0)
    else:
        m, v = states
        partial = v.ndim == 1
        m.mul_(o["beta1"]).add_((1 - o["beta1"]) * g)
        v.mul_(o["beta2"]).add_((1 - o["beta2"]) * (g.square().mean(1) if partial else g.square()))
        root = (v / (1 - o["beta2"] ** t)).sqrt()
        direction = m / (1 - o["beta1"] ** t) / ((root[:, None] if partial else root) + o["eps"])
        w -= rate * (direction + decay * w)


def state_of(algorithm, rows, width):
    shapes = [
        (rows,) if ROW_STATE.get(algorithm) == index else (rows, width)
        for index in range(len(ALGORITHMS[algorithm]) if algorithm != "sgd" else 0)
    ]
    return [torch.rand(shape, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize(("algorithm", "options", "done"), CASES)
def test_its_formula_with_these_arguments_is_the_specifications(algorithm, options, done):
    if algorithm not in done["cuda"]:
        assert refusal(step_of(algorithm, options), torch.float32, "cuda")
        return
    torch.manual_seed(0)
    step = step_of(algorithm, options)
    rows, grads = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    states = state_of(algorithm, 5, 4)
    ours = [rows.clone(), *(state.clone() for state in states)]
    torch_rules.update(step, ours[0], grads, ours[1:])
    by_fbgemms_formula(arguments(step, torch.float32, "cuda"), rows, grads, states)
    for one, other in zip(ours, [rows, *states], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


# --- the operators --------------------------------------------------------------------------------


@pytest.fixture
def tbe():
    pytest.importorskip("fbgemm_gpu", reason="FBGEMM is in the extra `cpu`")
    from keyedopt.fused.backends.fbgemm import tbe

    assert not tbe.missing()
    yield tbe
    tbe._shape.cache_clear()


def lookups():
    torch.manual_seed(1)
    return [
        Lookup(0, torch.tensor([1, 1, 3, 5]), torch.tensor([0, 2, 2, 4]), None, True, torch.randn(3, 6)),
        Lookup(0, torch.tensor([1, 2]), None, torch.tensor([0.5, 2.0]), False, torch.randn(2, 6)),
        Lookup(1, torch.tensor([0, 0]), torch.tensor([0, 2]), None, False, torch.randn(1, 4)),
        Lookup(0, torch.tensor([], dtype=torch.int64), torch.tensor([0, 0]), None, False, torch.randn(1, 6)),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("algorithm", "options", "done"), CASES)
@pytest.mark.usefixtures("tbe")
def test_on_the_cpu_it_does_what_torch_does(algorithm, options, done, dtype):
    step, found = step_of(algorithm, options), []
    for name in ("fbgemm", "torch"):
        torch.manual_seed(0)
        tables = []
        for rows, width in ((7, 6), (3, 4)):
            weight = torch.randn(rows, width).to(dtype)
            tables.append(Table(weight, tuple(one.float() for one in state_of(algorithm, rows, width))))
        backend = backends.get(name)
        if name == "fbgemm" and algorithm not in done["cpu"]:
            assert backend.refuses(tables, step)
            return
        assert not backend.refuses(tables, step)
        outputs = backend.look_up(tables, lookups())
        backend.update(tables, lookups(), step)
        found.append([*outputs, *itertools.chain.from_iterable((one.weight, *one.states) for one in tables)])
    for one, other in zip(*found, strict=True):
        bound = 1e-6 if one.dtype is torch.float32 else 2e-3
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


@pytest.mark.parametrize(("algorithm", "options", "done"), CASES)
def test_its_lookup_takes_what_cuda_is_given(tbe, monkeypatch, algorithm, options, done):
    """The lookups are in the wheel for the CPU too: they take apart what they get, wherever it is."""
    if algorithm not in done["cuda"]:
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    forward = "fbgemm::split_embedding_codegen_forward_weighted_pt2_wrapper"
    step, seen = step_of(algorithm, options), []
    asked = arguments(step, torch.float32, "cuda", 8)
    invoker = tbe.invoker

    class Recorded:
        def __init__(self, name):
            self._module = invoker(name)

        def invoke(self, common, options, *momenta, **more):
            seen.append((options, more))
            return self._module.invoke(common, options, *momenta, **more)

    monkeypatch.setattr(
        tbe, "invoker", lambda name: invoker(name) if name == "lookup_args" else Recorded(name)
    )
    tbe._shape.cache_clear()
    with torch.library._scoped_library("fbgemm", "FRAGMENT") as library:
        torch.library.register_fake(forward, lambda *args: args[1].new_empty(3, 8), lib=library)
        with FakeTensorMode(), torch.no_grad():
            weight = torch.empty(9, 8, device="cuda")
            values, offsets = (torch.empty(n, dtype=torch.int64, device="cuda") for n in (5, 4))
            states = [torch.empty(one.shape, device="cuda") for one in state_of(algorithm, 9, 8)]
            factors = torch.empty(5, device="cuda")
            found = tbe._looked_up(weight, values, offsets, factors, asked, states)
            assert (found.shape, found.device.type) == ((3, 8), "cuda")
    ((told, more),) = seen
    off = replace(asked, options={})
    assert {name: value for name, value in told._asdict().items() if value} == {
        name: value for name, value in asked.options.items() if value
    }
    assert more == {"mixed_D": False} | ({"iter": off.iteration} if len(states) == 2 else {})
