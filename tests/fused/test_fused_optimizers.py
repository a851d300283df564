"""The optimizers of `fused` beside those of `reference`: the same way with any options, by fast kernels."""

import copy
import pickle
import random
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from keyedopt import fused, reference
from keyedopt.fused.backends.sums import PIECE
from keyedopt.fused.dense import cpu_dense_steps

TABLES = ("RowWiseAdagrad", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB", "LarsSGD")
ALGORITHMS = ("SGD", "Adagrad", "Adam", "Ftrl", "SparseAdam", *TABLES)
#: Absolute and relative, for weights and gradients around 1 and a few steps.
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}

every = pytest.mark.parametrize("algorithm", ALGORITHMS)


def draw_options(algorithm, draw):
    """Draw options that an algorithm takes, in every combination."""
    choices = {"lr": [0.1, 0.0, torch.tensor([0.3], dtype=torch.float64)], "maximize": [False, True]}
    if algorithm == "Ftrl":
        choices |= {"lr": [0.1, torch.tensor([0.3], dtype=torch.float64)], "lr_power": [-0.5, -0.75, 0.0]}
        choices |= {name: [0.0, 0.1] for name in ("l1", "l2", "l2_shrinkage", "beta")}
    if algorithm != "SparseAdam":
        choices |= {"rows": ["given", "all", "nonzero"], "weight_decay": [0.0, 0.1]}
    if algorithm not in ("Ftrl", "LarsSGD", "SparseAdam"):
        choices["decay"] = ["none", "l2", "decoupled"]
    if algorithm in ("SGD", "LarsSGD"):
        choices["momentum"] = [0.0, 0.9]
    if algorithm == "LarsSGD":
        choices["eta"] = [0.0, 0.1]
    if "Adagrad" in algorithm or algorithm == "Ftrl":
        choices["initial_accumulator_value"] = [0.0, 0.1]
    if "Adagrad" in algorithm:
        choices["lr_decay"] = [0.0, 0.1]
    if "RowWise" in algorithm:
        choices["max_norm"] = [None, 0.5]
    if algorithm not in ("SGD", "Ftrl", "LarsSGD"):
        choices["eps"] = [0.0, 1e-8, 1e-3]
    if "Adam" in algorithm or "LAMB" in algorithm:
        choices["betas"] = [(0.9, 0.999), (0.0, 0.9)]
        if algorithm != "SparseAdam":
            choices["bias_correction"] = ["global", "per_row"]
    if algorithm == "Adam":
        choices["eps_placement"] = ["inside_denominator", "before_bias_correction"]
    options = {name: draw.choice(values) for name, values in choices.items()}
    if algorithm == "SGD" and options["momentum"]:
        options |= draw.choice([{"nesterov": True}, {"dampening": 0.5}, {}])
    return options


def draw_strides(tensor, draw):
    """Lay a tensor out otherwise in memory, now and then."""
    if tensor.ndim < 2 or draw.random() < 0.7:
        return tensor
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


def draw_gradient(algorithm, param, draw, least=0):
    """Draw a gradient, dense or sparse, of some rows, with rows of zeros, or none."""
    if draw.random() < 0.15:
        return None
    shape, dtype = param.shape, param.dtype
    if algorithm != "SparseAdam" and draw.random() < 0.6:
        grad = torch.randn(shape, dtype=torch.float64).to(dtype)
        if len(grad) and draw.random() < 0.4:
            grad[0] = 0
        return draw_strides(grad, draw)
    ways = draw.choice([1, len(shape)]) if algorithm == "SparseAdam" else 1
    count = draw.choice([least, 1, 4]) if shape[:ways].numel() else 0
    indices = torch.stack([torch.randint(0, max(size, 1), (count,)) for size in shape[:ways]])
    values = torch.randn((count, *shape[ways:]), dtype=torch.float64).to(dtype)
    if count and draw.random() < 0.3:
        values[0] = 0
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)


def made(package, algorithm, params, **options):
    return getattr(package, algorithm)([torch.nn.Parameter(param.clone()) for param in params], **options)


def parameters(optimizer):
    return [param for group in optimizer.param_groups for param in group["params"]]


def step(optimizer, grads):
    for param, grad in zip(parameters(optimizer), grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    optimizer.step()


def assert_alike(one, other):
    """Both have the same state, and all of it, and the weights, are close."""
    for param, twin in zip(parameters(one), parameters(other), strict=True):
        assert set(one.state[param]) == set(other.state[twin])
        pairs = [(param.detach(), twin.detach())]
        pairs += [(value, other.state[twin][name]) for name, value in one.state[param].items()]
        for expected, seen in pairs:
            if not isinstance(expected, torch.Tensor):
                assert seen == expected
                continue
            assert (seen.shape, seen.dtype, seen.stride()) == (
                expected.shape,
                expected.dtype,
                expected.stride(),
            )
            tolerance = TOLERANCE[param.dtype]
            torch.testing.assert_close(seen, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@every
@pytest.mark.parametrize("seed", range(40))
def test_it_goes_the_reference_s_way(algorithm, seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    options = draw_options(algorithm, draw)
    dtype = draw.choice([torch.float64, torch.float64, torch.float32, torch.float16, torch.bfloat16])
    shapes = [(5, 3), (7, 1), (1, 4), (4, 64)]
    least = 1 if options.get("rows") == "nonzero" else 0  # the reference cannot choose among no rows at all
    if not least:
        shapes.append((0, 3))
    if algorithm not in TABLES:
        shapes += [(6,), (3, 2, 2)]
    if dtype in (torch.float16, torch.bfloat16) and "eps" in options:
        options["eps"] = 1e-3  # without, a square that half precision loses makes an infinite step
    params = [torch.randn(draw.choice(shapes), dtype=torch.float64).to(dtype) for _ in range(3)]
    params = [draw_strides(param, draw) for param in params]
    one = made(reference, algorithm, params, **options)
    other = made(fused, algorithm, params, **options)
    for _ in range(4):
        grads = [draw_gradient(algorithm, param, draw, least) for param in params]
        step(one, grads)
        step(other, grads)
        assert_alike(one, other)


@contextmanager
def files_called():
    """Yield the set of the files whose functions were called."""
    files = set()
    sys.setprofile(lambda frame, event, _: files.add(frame.f_code.co_filename) if event == "call" else None)
    try:
        yield files
    finally:
        sys.setprofile(None)


ACCUMULATING = (
    "AccumulateSGD",
    "AccumulateAdagrad",
    "AccumulateRowWiseAdagrad",
    "AccumulateAdam",
    "AccumulateAdamW",
)


@pytest.mark.parametrize("layout", ["dense", "sparse"])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *ACCUMULATING])
def test_a_step_uses_no_arithmetic_of_the_reference(algorithm, layout):
    layout = "sparse" if algorithm == "SparseAdam" else layout
    options = {"use_accumulate": True, "accumulate_step": 2} if algorithm in ACCUMULATING else {"lr": 0.1}
    params, found = [torch.ones(5, 3), torch.ones(3, 5).t()], []
    for library in (reference, fused):
        optimizer = made(library, algorithm, params, **options)
        grad = torch.ones(5, 3) if layout == "dense" else torch.ones(5, 3).to_sparse(1)
        with files_called() as files:
            for _ in range(2):
                step(optimizer, [grad, grad])
        folder = Path(reference.rules.__file__).parent
        found.append({path.name for path in map(Path, files) if path.parent == folder} - {"options.py"})
    assert found[0]
    assert not found[1]


@every
def test_a_class_is_the_reference_s_with_other_steps(algorithm):
    assert issubclass(getattr(fused, algorithm), getattr(reference, algorithm))


@pytest.mark.parametrize("library", [reference, fused])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_group_is_added_to_a_copy_of_an_accumulating_optimizer(library, duplicate):
    options = {"lr": 1.0, "use_accumulate": True, "accumulate_step": 2}
    optimizer = duplicate(made(library, "AccumulateSGD", [torch.ones(2, 1)], **options))
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2, 1))]})
    assert optimizer.param_groups[1]["accumulate_step"] == 2
    for _ in range(2):
        step(optimizer, [torch.ones(2, 1)] * 2)
    assert all(torch.equal(param, -torch.ones(2, 1)) for param in parameters(optimizer))


@every
@pytest.mark.parametrize("direction", ["reference to fused", "fused to reference"])
def test_checkpoints_move(algorithm, direction):
    torch.manual_seed(0)
    draw = random.Random(0)
    first, second = (reference, fused) if direction.startswith("reference") else (fused, reference)
    params = [torch.randn(5, 3, dtype=torch.float64) for _ in range(2)]
    options = {"momentum": 0.9} if algorithm == "SGD" else {}
    one = made(first, algorithm, params, **options)
    for _ in range(3):
        step(one, [draw_gradient(algorithm, param, draw) for param in params])
    other = made(second, algorithm, parameters(one))
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    for _ in range(3):
        grads = [draw_gradient(algorithm, param, draw) for param in params]
        step(one, grads)
        step(other, grads)
    assert_alike(one, other)


@every
@pytest.mark.parametrize("layout", ["dense", "sparse"])
def test_gradients_divided_in_the_step(algorithm, layout):
    if algorithm == "SparseAdam" and layout == "dense":
        layout = "sparse"
    params = [torch.randn(5, 3), torch.randn(4, 2)]
    one, other = (
        (made(fused, algorithm, params, weight_decay=0.1) for _ in range(2))
        if (algorithm != "SparseAdam")
        else (made(fused, algorithm, params) for _ in range(2))
    )
    for _ in range(3):
        grads = [torch.randn_like(param) for param in params]
        if layout == "sparse":
            grads = [grad.to_sparse(1) for grad in grads]
        step(one, [grad / 4 for grad in grads])
        other.grad_scale = torch.tensor(4.0)
        step(other, grads)
        del other.grad_scale
    assert_alike(one, other)


@pytest.mark.parametrize(
    ("algorithm", "options", "kernel"),
    [
        ("Adam", {"weight_decay": 0.1}, "_fused_adam_"),
        ("Adam", {"weight_decay": 0.1, "decay": "decoupled"}, "_fused_adamw_"),
        ("SGD", {"momentum": 0.9}, "_fused_sgd_"),
        ("Adagrad", {"lr_decay": 0.1}, "_fused_adagrad_"),
    ],
)
def test_one_kernel_for_all_parameters(monkeypatch, algorithm, options, kernel):
    """Without `fused.bulk`, torch's kernel; test_cpu_dense_steps.py tests the kernels of `fused.bulk`."""
    monkeypatch.setattr(cpu_dense_steps, "native", None)
    calls = []
    original = getattr(torch, kernel)
    monkeypatch.setattr(torch, kernel, lambda *a, **k: calls.append(len(a[0])) or original(*a, **k))
    params = [torch.randn(5, 3) for _ in range(7)]
    optimizer = made(fused, algorithm, params, **options)
    step(optimizer, params)
    step(optimizer, params)
    assert calls == [7, 7]


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "SparseAdam"])
def test_no_synchronization_for_a_rate_on_the_device(algorithm):
    """Fake tensors have no values, so whoever reads one on the host raises; no GPU is needed for that."""
    with FakeTensorMode():
        weight = torch.nn.Parameter(torch.empty(5, 3, device="cuda"))
        optimizer = getattr(fused, algorithm)([weight])
        optimizer.param_groups[0]["lr"] = torch.empty((), device="cuda")
        weight.grad = torch.empty(5, 3, device="cuda")
        optimizer.step()
        optimizer.step()
        counts = [state["step"] for state in optimizer.state.values() if "step" in state]
    assert all(count.device.type == "cuda" for count in counts)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("decay", ["none", "l2", "decoupled"])
def test_without_eps_what_is_lost_of_squares_shows_in_the_same_places(dtype, sparse, decay):
    small = 2e-3 if dtype is torch.float16 else 1e-22
    trained = []
    for library in (reference, fused):
        weight = torch.nn.Parameter(torch.tensor([[0.5, -0.5, 0.5, 0.3]], dtype=dtype))
        optimizer = library.Adam([weight], lr=0.1, eps=0.0, weight_decay=0.1, decay=decay)
        for numbers in ([small, -small, 1, 0], [0] * 4, [small, small, 1, 0]):
            grad = torch.tensor([numbers], dtype=dtype)
            if sparse:
                grad = torch.sparse_coo_tensor([[0]], grad, weight.shape, check_invariants=True)
            weight.grad = grad
            optimizer.step()
        trained.append(weight.detach())
    kept = torch.tensor([[decay == "l2", decay == "l2", True, True]])  # L2 decay makes gradients large
    for weight in trained:
        assert torch.equal(weight.isfinite(), kept)
    torch.testing.assert_close(trained[1][kept], trained[0][kept], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("library", [reference, fused])
def test_nonzero_rows_of_an_empty_gradient_are_none(library):
    param = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = library.SGD([param], lr=0.1, rows="nonzero")
    nothing = torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 2)
    param.grad = torch.sparse_coo_tensor(*nothing, (3, 2), check_invariants=True)
    optimizer.step()
    assert torch.equal(param.detach(), torch.ones(3, 2))


@pytest.mark.parametrize("library", [reference, fused])
def test_an_empty_gradient_counts_as_a_step_of_sparse_adam_as_in_torch(library):
    params = [torch.nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    optimizers = [
        kind([one], lr=0.1)
        for kind, one in zip((library.SparseAdam, torch.optim.SparseAdam), params, strict=True)
    ]
    for rows in ([], [1]):
        for param, optimizer in zip(params, optimizers, strict=True):
            listed = torch.tensor([rows], dtype=torch.int64)
            param.grad = torch.sparse_coo_tensor(
                listed, torch.ones(len(rows), 2), (3, 2), check_invariants=False
            )
            optimizer.step()
    torch.testing.assert_close(*params)
    assert not torch.equal(params[0].detach(), torch.ones(3, 2))


@pytest.mark.parametrize("library", [reference, fused])
def test_nothing_listed_in_no_dimension_changes_nothing(library):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = library.SparseAdam([param], lr=0.1)
    for listed in (1, 0):  # such a gradient lists the whole parameter, so many times
        before = param.detach().clone(), *(optimizer.state[param].get(name) for name in ("step", "exp_avg"))
        before = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in before)
        nothing = torch.empty(0, listed, dtype=torch.int64), torch.ones(listed, 3)
        param.grad = torch.sparse_coo_tensor(*nothing, (3,), check_invariants=True)
        optimizer.step()
    assert optimizer.state[param]["step"] == before[1] + 1
    assert torch.equal(param.detach(), before[0])
    assert torch.equal(optimizer.state[param]["exp_avg"], before[2])


@pytest.mark.parametrize("library", [reference, fused])
@pytest.mark.parametrize("algorithm", ["SGD", "Adagrad", "RowWiseAdagrad", "Adam", "LAMB"])
def test_a_rate_in_float32_costs_no_precision(library, algorithm):
    decay = {"lr_decay": 0.3} if algorithm.endswith("Adagrad") else {"weight_decay": 0.01}
    found = []
    rate = torch.tensor(0.1, dtype=torch.float32)
    for lr in (rate, float(rate)):
        param = torch.nn.Parameter(torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4))
        optimizer = getattr(library, algorithm)([param], lr=lr, **decay)
        for step in range(1, 4):
            param.grad = torch.linspace(1, 2, 8, dtype=torch.float64).reshape(2, 4) / step
            optimizer.step()
        found.append(param.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("preferred", ["", "torch"])
@pytest.mark.parametrize("algorithm", ["SGD", "Adagrad", "SparseAdam", "RowWiseAdagrad"])
def test_autograd_knows_of_an_update(monkeypatch, algorithm, preferred):
    monkeypatch.setenv("KEYEDOPT_BACKEND", preferred)
    param = torch.nn.Parameter(torch.ones(5, 3))
    saved = (param * param).sum()
    param.grad = torch.sparse_coo_tensor([[1, 1]], torch.ones(2, 3), (5, 3), check_invariants=False)
    getattr(fused, algorithm)([param], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that any operation makes, beside one that is there already."""

    def __init__(self, there):
        super().__init__()
        self.bytes, self._there = 0, there.untyped_storage().data_ptr()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        made = operation(*args, **(kwargs or {}))
        for one in made if isinstance(made, list | tuple) else (made,):
            if isinstance(one, torch.Tensor) and one.layout is torch.strided:
                memory = one.untyped_storage()
                if memory.data_ptr() != self._there:
                    self.bytes = max(self.bytes, memory.nbytes())
        return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_needs_memory_for_distinct_rows_and_not_for_lookups(dtype):
    lookups, width = 400_000, 32
    param = torch.nn.Parameter(torch.zeros(50, width, dtype=dtype))
    optimizer = fused.AccumulateSGD([param], lr=1.0, use_accumulate=True, accumulate_step=3)
    rows = torch.arange(lookups) % 7
    values = torch.full((lookups, width), 2.0**-17, dtype=dtype)
    with Largest(values) as largest:
        for _ in range(3):
            param.grad = torch.sparse_coo_tensor(rows[None], values, param.shape, check_invariants=False)
            optimizer.step()
    assert largest.bytes <= 8 * PIECE < 8 * lookups * width / 10
    sums = 3 * torch.bincount(rows, minlength=50) * 2.0**-17
    torch.testing.assert_close(param.detach(), -sums[:, None].expand(50, width).to(dtype))


@every
@pytest.mark.parametrize("rows", ["given", "nonzero"])
def test_a_transposed_table_gets_the_bits_of_a_contiguous_one(algorithm, rows):
    numbers = torch.Generator().manual_seed(0)
    transposed = torch.nn.Parameter(torch.randn(3, 6, generator=numbers).t())
    contiguous = torch.nn.Parameter(transposed.detach().contiguous())
    made = getattr(fused, algorithm)
    options = {"lr": 0.25, **({} if algorithm == "SparseAdam" else {"rows": rows})}
    optimizers = [made([param], **options) for param in (transposed, contiguous)]
    for lookups in (5, 0, 2):
        listed = torch.randint(0, 6, (1, lookups), generator=numbers)
        values = torch.randn(lookups, 3, generator=numbers)
        for param, optimizer in zip((transposed, contiguous), optimizers, strict=True):
            param.grad = torch.sparse_coo_tensor(listed, values, param.shape, check_invariants=True)
            optimizer.step()
        assert torch.equal(transposed, contiguous)
    assert transposed.stride() == (1, 6)
