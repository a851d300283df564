"""`explain` names the code that a step really runs, and changes neither parameters nor state."""

from functools import partial

import pytest
import torch
from torch.nn import Parameter

from keyedopt import fused
from keyedopt.fused.backends import native as kernels
from keyedopt.fused.bulk import native
from keyedopt.fused.dense import cpu_fast_path, dense_step, fused_kernels
from keyedopt.fused.sparse import sparse_step

built = pytest.mark.skipif(
    native is None or not kernels.NativeBackend.instruction_sets(), reason="the extensions are not built"
)
CLASSES = {
    "sgd": partial(fused.SGD, lr=0.1, momentum=0.9),
    "sgd, decoupled": partial(fused.SGD, lr=0.1, weight_decay=0.1, decay="decoupled"),
    "adagrad": partial(fused.Adagrad, lr=0.1),
    "rowwise_adagrad": partial(fused.RowWiseAdagrad, lr=0.1),
    "adam": partial(fused.Adam, lr=0.1),
    "adam, another formula": partial(fused.Adam, lr=0.1, eps_placement="before_bias_correction"),
    "adam, nonzero rows": partial(fused.Adam, lr=0.1, rows="nonzero"),
    "adam, all rows": partial(fused.Adam, lr=0.1, rows="all"),
    "adam, checked": partial(fused.Adam, lr=0.1, error_if_nonfinite=True),
    "adamw": partial(fused.AdamW, lr=0.1),
    "lamb": partial(fused.LAMB, lr=0.1),
    "accumulate": partial(fused.AccumulateSGD, lr=0.1),
    "sparse_adam": partial(fused.SparseAdam, lr=0.1),
}
TABLES = {
    "float32": lambda: torch.ones(5, 4),
    "bfloat16": lambda: torch.ones(5, 4, dtype=torch.bfloat16),
    "float64": lambda: torch.ones(5, 4, dtype=torch.float64),
    "strided": lambda: torch.ones(5, 8)[:, :4],
    "vector": lambda: torch.ones(7),
}
CASES = [
    (name, table, layout)
    for name in CLASSES
    for table in TABLES
    for layout in ("dense", "sparse")
    if (layout == "sparse" or name != "sparse_adam") and (table != "vector" or "rowwise" not in name)
    if not (table == "vector" and (name == "lamb" or layout == "sparse"))
]


@pytest.fixture
def ran(monkeypatch):
    """The code that steps ran since the list was cleared."""
    seen = []

    def watch(module, name, said):
        real = getattr(module, name)

        def watched(*args, **options):
            result = real(*args, **options)
            word = said(result)
            if word:
                seen.append(word)
            return result

        monkeypatch.setattr(module, name, watched)

    watch(cpu_fast_path, "try_step", lambda why: "" if why else "the fast path")
    watch(
        fused_kernels.cpu_dense_steps, "run", lambda done: "C++ kernels for dense gradients" if done else ""
    )
    watch(dense_step.torch_rules, "update", lambda _: "torch's operators")
    for algorithm in fused_kernels.KERNELS:
        real = fused_kernels.KERNELS[algorithm]

        def kernel(*args, real=real, algorithm=algorithm):
            seen.append(f"torch's fused kernel for {algorithm}")
            real(*args)

        monkeypatch.setitem(fused_kernels.KERNELS, algorithm, kernel)
    watch(kernels.NativeBackend, "update_listed", lambda done: "backend 'native'" if done else "")
    for module in (dense_step, sparse_step):
        watch(module, "choose", lambda backend: f"backend {backend.name!r}")
    return seen


def trained(name, table, layout):
    param = Parameter(TABLES[table]())
    optimizer = CLASSES[name]([param])
    param.grad = torch.ones_like(param)
    if layout == "sparse":
        rows = torch.ones(2, *param.shape[1:], dtype=param.dtype)
        param.grad = torch.sparse_coo_tensor(
            torch.tensor([[0, 3]]), rows, param.shape, check_invariants=False
        )
    optimizer.step()
    return optimizer, param


@built
@pytest.mark.parametrize(("name", "table", "layout"), CASES)
def test_what_is_named_is_what_runs(name, table, layout, ran):
    optimizer, _ = trained(name, table, layout)
    text = optimizer.explain()
    named = text.partition("\n")[0]
    ran.clear()
    optimizer.step()
    assert ("by the fast path" in text) == ("the fast path" in ran), (text, ran)
    words = set(ran) - {"the fast path"}
    # The backend `torch` uses torch's operators; on the way to them a step asks for a backend.
    words -= {"backend 'torch'"} if "torch's operators" in named else set()
    words -= {"torch's operators"} if "backend 'torch'" in named else set()
    assert all(one in named for one in words), (text, ran)
    assert words or "the fast path" in ran


@built
@pytest.mark.parametrize(("name", "table", "layout"), CASES)
def test_nothing_changes(name, table, layout):
    told, param = trained(name, table, layout)
    untold, other = trained(name, table, layout)
    versions = param._version
    assert told.explain() == told.explain()
    assert param._version == versions
    for optimizer in (told, untold):
        optimizer.step()
    assert torch.equal(param, other)
    for one, state in zip(told.state.values(), untold.state.values(), strict=True):
        assert one.keys() == state.keys()
        for key in one:
            assert torch.equal(torch.as_tensor(one[key]), torch.as_tensor(state[key]))


def test_a_new_optimizer_is_explained_without_state():
    param = Parameter(torch.zeros(1_000, 4))
    optimizer = fused.Adam([param], lr=0.1)
    assert "Adam: 1 parameter (dense gradients, torch.float32, cpu): adam by " in optimizer.explain()
    assert not optimizer.state
    assert param.grad is None


def test_parameters_that_are_updated_alike_share_a_line():
    params = [Parameter(torch.zeros(3, dtype=dtype)) for dtype in (torch.float32, torch.float64) * 2]
    lines = fused.SGD(params, lr=0.1).explain().splitlines()
    starts = [line.partition(", cpu)")[0] for line in lines if not line.startswith("  ")]
    assert starts == [f"SGD: 2 parameters (dense gradients, torch.float{bits}" for bits in (32, 64)]


def test_every_part_of_a_combination_is_explained():
    table = fused.EmbeddingBagConfig(5, 4, name="t", feature_names=["f"])
    bags = fused.EmbeddingBagCollection([table], fused.RowWiseAdagrad, {"lr": 0.1})
    dense, plain = ({"w": Parameter(torch.zeros(3))} for _ in range(2))
    whole = fused.WarmupOptimizer(
        fused.CombinedOptimizer(
            [
                ("tables", bags.fused_optimizer),
                (
                    "tower",
                    fused.GradientClippingOptimizer(
                        fused.KeyedOptimizerWrapper(dense, lambda params: fused.Adam(params, lr=0.1)),
                        clipping=fused.GradientClipping.NORM,
                    ),
                ),
                ("other", fused.KeyedOptimizerWrapper(plain, lambda params: torch.optim.SGD(params, lr=0.1))),
            ]
        ),
        [fused.WarmupStage(max_iters=1)],
    )
    text = fused.explain(whole)
    assert text.startswith("tables: t (torch.float32, cpu): rowwise_adagrad by backend ")
    assert "\ntower: Adam: 1 parameter (dense gradients, torch.float32, cpu): adam by " in text
    assert text.endswith("\nother: torch.optim.sgd.SGD: its own step")
    assert fused.explain(torch.nn.ModuleDict({"bags": bags})) == f"bags: {bags.explain()}"


def test_what_cannot_be_explained_is_an_error():
    with pytest.raises(TypeError, match="int is neither"):
        fused.explain(3)
