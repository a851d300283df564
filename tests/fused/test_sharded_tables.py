"""keyedopt's kernels look up and update the memory of FBGEMM's modules in torchrec's sharded tables."""

import copy

import pytest
import torch

from keyedopt import fused

OPTIMIZERS = pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD"])
POOLING = pytest.mark.parametrize("pooling", ["SUM", "MEAN", "NONE"])
BACKENDS = pytest.mark.parametrize("backend", ["auto", "torch"])
ROWS, FEATURES = 10, [0, 1, 1, 2]


@pytest.fixture
def tbe():
    return pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")


def module_of(tbe, optimizer, pooling="SUM", precision="FP32", **options):
    """Return a module of three tables, the second of which two features look up."""
    host, cpu = tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU
    module = tbe.SplitTableBatchedEmbeddingBagsCodegen(
        [
            (ROWS + more, 8 if pooling == "NONE" else width, host, cpu)
            for more, width in enumerate((8, 4, 12))
        ],
        optimizer=tbe.OptimType[optimizer],
        pooling_mode=tbe.PoolingMode[pooling],
        weights_precision=tbe.SparseType[precision],
        feature_table_map=FEATURES,
        device=torch.device("cpu"),
        **{"learning_rate": 0.5, "eps": 1e-8, "stochastic_rounding": False} | options,
    )
    module.init_embedding_weights_uniform(-1, 1)
    return module


def batch(step, bags=5):
    """Return row numbers and offsets of all features."""
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(FEATURES) * bags,), generator=draw)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.randint(0, ROWS, (int(offsets[-1]),), generator=draw), offsets


def memory_of(module):
    states = [] if module.optimizer.name == "EXACT_SGD" else module.split_optimizer_states()
    return [*module.split_embedding_weights(), *(one for some in states for one in some)]


@OPTIMIZERS
@POOLING
@BACKENDS
@pytest.mark.parametrize("precision", ["FP32", "FP16"])
def test_outputs_weights_and_states_are_fbgemms(tbe, optimizer, pooling, backend, precision):
    theirs = module_of(tbe, optimizer, pooling, precision)
    ours = copy.deepcopy(theirs)
    fused.use_keyedopt_kernels(torch.nn.Sequential(ours), backend)
    before = [one.clone() for one in memory_of(ours)]
    # In float16 a weight below 2 may be one ULP, 2⁻¹⁰, off after each of 4 steps; a bag has 3 weights.
    bound = 12 * 2**-10 if precision == "FP16" else 1e-5
    for step in range(4):
        given = batch(step)
        for module in (theirs, ours):
            module.set_learning_rate(0.5 / (step + 1))
        outputs = [module(*given) for module in (theirs, ours)]
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=bound)
        for output in outputs:
            output.backward(torch.linspace(-1, 1, output.numel()).reshape(output.shape))
    for one, other, old in zip(memory_of(ours), memory_of(theirs), before, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=bound)
        assert not torch.equal(one, old)


@BACKENDS
def test_weights_of_row_numbers_and_reading_without_training(tbe, backend):
    theirs = module_of(tbe, "EXACT_SGD")
    ours = copy.deepcopy(theirs)
    fused.use_keyedopt_kernels(ours, backend)
    values, offsets = batch(0)
    weights = torch.rand(len(values))
    outputs = [module(values, offsets, weights) for module in (theirs, ours)]
    torch.testing.assert_close(*outputs)
    for output in outputs:
        output.sum().backward()
    torch.testing.assert_close(memory_of(theirs), memory_of(ours))
    before = [one.clone() for one in memory_of(ours)]
    with torch.no_grad():
        assert not ours(values.int(), offsets.int()).requires_grad
    assert all(map(torch.equal, before, memory_of(ours)))
    empty = ours(values[:0], offsets[:1])
    assert empty.shape == (0, 8 + 4 + 4 + 12)
    empty.sum().backward()


@POOLING
@BACKENDS
def test_invalid_lookups_raise(tbe, pooling, backend):
    module = module_of(tbe, "EXACT_ADAGRAD", pooling)
    fused.use_keyedopt_kernels(module, backend)
    values, offsets = batch(1)
    before = [one.clone() for one in memory_of(module)]
    for wrong in (-1, 2**40, ROWS + 2):
        with pytest.raises(ValueError, match="row"):
            module(torch.full_like(values, wrong), offsets)
    for wrong in (offsets + 1, offsets.flip(0)):
        with pytest.raises(ValueError, match="offset"):
            module(values, wrong)
    with pytest.raises(ValueError, match="batch_size_per_feature_per_rank"):
        module(values, offsets, batch_size_per_feature_per_rank=[[1]] * 4)
    with pytest.raises(ValueError, match="need pooling and no gradient"):
        module(values, offsets, torch.rand(len(values), requires_grad=True))
    assert all(map(torch.equal, before, memory_of(module)))


@pytest.mark.parametrize(
    ("optimizer", "options", "text"),
    [
        ("EXACT_ROWWISE_ADAGRAD", {"weight_decay": 0.5}, "weight_decay=0.5"),
        ("EXACT_ADAGRAD", {"gradient_clipping": True, "max_gradient": 1.0}, "gradient_clipping=True"),
        ("EXACT_ROWWISE_ADAGRAD", {"max_norm": 2.0}, "max_norm=2.0"),
        ("EXACT_SGD", {"precision": "FP16", "output_dtype": "FP16"}, "the output float32"),
    ],
)
def test_what_no_backend_does_raises_and_changes_nothing(tbe, optimizer, options, text):
    if "output_dtype" in options:
        options = options | {"output_dtype": tbe.SparseType[options["output_dtype"]]}
    model = torch.nn.Sequential(module_of(tbe, "EXACT_SGD"), module_of(tbe, optimizer, **options))
    with pytest.raises(ValueError, match=text):
        fused.use_keyedopt_kernels(model)
    assert all("forward" not in vars(module) for module in model)
    with pytest.raises(ValueError, match="must be 'auto'"):
        fused.use_keyedopt_kernels(model[:1], "none of these")


def test_freed_memory_raises(tbe):
    module = module_of(tbe, "EXACT_ADAGRAD")
    fused.use_keyedopt_kernels(module, "native")
    output = module(*batch(0))
    module.weights_host.data.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError):
        output.sum().backward()
    with pytest.raises(RuntimeError):
        module(*batch(0))
