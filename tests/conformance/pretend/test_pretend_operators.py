"""Operators on the pretend accelerator give the CPU's bits, strides and gradients."""

import pytest
import torch
from torch.nn import functional

import keyedopt.conformance.pretend  # noqa: F401 - registers the device

#: Functions of two float matrices of the same shape and a vector of indices of their rows.
OPERATORS = {
    "abs": lambda x, y, i: x.abs(),
    "add": lambda x, y, i: torch.add(x, y, alpha=2),
    "add a number": lambda x, y, i: x + 1.5,
    "addcdiv": lambda x, y, i: torch.addcdiv(x, y, y.abs() + 1, value=0.5),
    "addcmul": lambda x, y, i: torch.addcmul(x, y, y, value=-0.5),
    "amax": lambda x, y, i: x.amax(0),
    "argsort": lambda x, y, i: x.argsort(1),
    "as_strided": lambda x, y, i: x.contiguous().as_strided((2, 2), (1, 1)),
    "bmm": lambda x, y, i: torch.bmm(x[None], y.T[None]),
    "boolean index": lambda x, y, i: x[x > y],
    "cat": lambda x, y, i: torch.cat([x, y], 1),
    "chunk": lambda x, y, i: torch.chunk(x, 2, 1),
    "clamp": lambda x, y, i: x.clamp(-0.5, 0.5),
    "clone": lambda x, y, i: x.clone(),
    "cumsum": lambda x, y, i: x.cumsum(1),
    "diagonal": lambda x, y, i: x.diagonal(),
    "div": lambda x, y, i: x / (y.abs() + 1),
    "embedding": lambda x, y, i: functional.embedding(i, x),
    "embedding_bag": lambda x, y, i: functional.embedding_bag(i, x, i.new_tensor([0, 1]), mode="sum"),
    "equal": lambda x, y, i: torch.equal(x, y),
    "exp": lambda x, y, i: x.exp(),
    "expand": lambda x, y, i: x[:1].expand(3, -1) * 2,
    "flip": lambda x, y, i: x.flip(0),
    "foreach add": lambda x, y, i: torch._foreach_add([x, y], [y, x], alpha=3),
    "foreach norm": lambda x, y, i: torch._foreach_norm([x, y]),
    "gather": lambda x, y, i: x.gather(0, i[:, None].expand(-1, x.shape[1])),
    "in-place": lambda x, y, i: x.clone().mul_(y).add_(1),
    "index": lambda x, y, i: x[i],
    "index_add": lambda x, y, i: x.index_add(0, i, y[i]),
    "index_copy": lambda x, y, i: x.index_copy(0, i[:1], y[:1]),
    "index_put": lambda x, y, i: x.index_put((i,), y[i], accumulate=True),
    "index_select": lambda x, y, i: x.index_select(0, i),
    "isfinite": lambda x, y, i: torch.isfinite(x / 0),
    "lerp": lambda x, y, i: torch.lerp(x, y, 0.25),
    "linear": lambda x, y, i: functional.linear(x, y),
    "log_softmax": lambda x, y, i: x.log_softmax(1),
    "masked_fill": lambda x, y, i: x.masked_fill(x > y, 0.0),
    "matmul": lambda x, y, i: x @ y.T,
    "max of a dimension": lambda x, y, i: x.max(1),
    "maximum": lambda x, y, i: torch.maximum(x, y),
    "mean": lambda x, y, i: x.mean(),
    "median": lambda x, y, i: x.median(),
    "multiply by a number on the CPU": lambda x, y, i: x * torch.tensor(2.5),
    "nonzero": lambda x, y, i: (x > y).nonzero(),
    "norm": lambda x, y, i: torch.linalg.vector_norm(x, 3, dim=1),
    "one_hot": lambda x, y, i: functional.one_hot(i, 8),
    "permute": lambda x, y, i: x.permute(1, 0),
    "pow": lambda x, y, i: x.abs() ** 1.5,
    "reshape": lambda x, y, i: x.T.reshape(-1),
    "roll": lambda x, y, i: x.roll(1, 0),
    "scatter_add": lambda x, y, i: x.scatter_add(0, i[:, None].expand(-1, x.shape[1]), y[i]),
    "searchsorted": lambda x, y, i: torch.searchsorted(x.flatten().sort().values, y),
    "sigmoid": lambda x, y, i: x.sigmoid(),
    "sort": lambda x, y, i: x.sort(1, descending=True),
    "sparse": lambda x, y, i: torch.sparse_coo_tensor(i[None], y[i], x.shape).coalesce().values(),
    "sparse to dense": lambda x, y, i: torch.sparse_coo_tensor(i[None], y[i], x.shape).to_dense(),
    "split": lambda x, y, i: x.split([1, x.shape[1] - 1], 1),
    "sqrt": lambda x, y, i: x.abs().sqrt(),
    "stack": lambda x, y, i: torch.stack([x, y]),
    "sum": lambda x, y, i: x.sum(1, keepdim=True),
    "take_along_dim": lambda x, y, i: torch.take_along_dim(x, x.argmax(1, keepdim=True), 1),
    "topk": lambda x, y, i: x.topk(2, 1),
    "unbind": lambda x, y, i: x.unbind(0),
    "unfold": lambda x, y, i: x.unfold(1, 2, 1),
    "unique": lambda x, y, i: torch.unique(i, return_inverse=True, return_counts=True),
    "var": lambda x, y, i: x.var(0),
    "view as another dtype": lambda x, y, i: x.contiguous().view(torch.uint8),
    "where": lambda x, y, i: torch.where(x > y, x, y),
    "zeros_like": lambda x, y, i: torch.zeros_like(x),
}


@pytest.mark.parametrize("device", ["npu:0", "npu:1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATORS)
def test_the_results_are_those_of_the_cpu(name, dtype, device):
    for seed, (rows, columns) in enumerate([(3, 4), (5, 2), (2, 7)]):
        drawn = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(rows, columns, generator=drawn).to(dtype) for _ in range(2))
        if seed == 1:
            x = x.T.contiguous().T  # not contiguous
        i = torch.randint(rows, (4,), generator=drawn)
        expected, gradients = _run(OPERATORS[name], x, y, i)
        found, seen = _run(OPERATORS[name], x.to(device), y.to(device), i.to(device))
        assert len(found) == len(expected)
        for one, other in zip(found + seen, expected + gradients, strict=True):
            if not isinstance(other, torch.Tensor):
                assert one == other
                continue
            assert one.device == torch.device(device)
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())
            assert torch.equal(one.cpu().nan_to_num(), other.nan_to_num())


def _run(function, *inputs):
    """Return the results, and the gradients of their sum."""
    x, y, i = inputs
    leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
    result = function(*leaves, i)
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    total = [part.float().sum() for part in results if getattr(part, "requires_grad", False)]
    if not total:
        return results, []
    gradients = torch.autograd.grad(sum(total), leaves, allow_unused=True)
    return [part.detach() for part in results], [grad for grad in gradients if grad is not None]


@pytest.mark.parametrize(
    "make",
    [
        lambda on: torch.ones(2, 3, device=on),
        lambda on: torch.zeros(2, dtype=torch.int64, device=on),
        lambda on: torch.full((2,), 3.0, device=on),
        lambda on: torch.eye(3, device=on),
        lambda on: torch.arange(2, 9, 3, device=on),
        lambda on: torch.linspace(0, 1, 5, device=on),
        lambda on: torch.tensor([[1, 2], [3, 4]], device=on),
        lambda on: torch.as_tensor([1.5], device=on),
        lambda on: torch.ones(2).to(on, torch.float64),
        lambda on: torch.ones(3, device=on).new_tensor([1.0]),
        lambda on: torch.empty(2, 3, device=on).fill_(2),
    ],
)
@pytest.mark.parametrize("device", ["npu", "npu:1"])
def test_factories_make_tensors_on_the_device(make, device):
    made = make(device)
    assert made.device == torch.device(device if ":" in device else "npu:0")
    assert type(made) is torch.Tensor
    assert torch.equal(made.cpu(), make("cpu"))


def test_random_numbers_come_from_the_generator_of_the_device():
    def draw(device):
        return [
            torch.rand(3, device=device),
            torch.randn(3, device=device),
            torch.randperm(5, device=device),
            functional.dropout(torch.ones(9, device=device)),
        ]

    torch.manual_seed(7)
    first, cpu = draw("npu"), torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(1), cpu)
    state = torch.npu.get_rng_state()
    for one, again in zip(first, draw("npu"), strict=True):
        assert torch.equal(one, again)
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="npu"), first[0])
    with torch.random.fork_rng(["npu:0"], device_type="npu"):
        torch.rand(3, device="npu")
    assert torch.equal(torch.randn(3, device="npu"), first[1])
    torch.npu.manual_seed_all(3)
    numbers = torch.rand(3, device="npu:1")
    torch.npu.manual_seed_all(3)
    assert torch.equal(torch.rand(3, device="npu:1"), numbers)
