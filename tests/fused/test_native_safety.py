"""The native backend refuses what would reach outside a table; rounds fairly; counts beyond 2³¹ and 2³²."""

import mmap
import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch

from keyedopt.fused.backends import choose
from keyedopt.fused.backends.interface import ALGORITHMS, Lookup, RowGradients, Step, Table
from keyedopt.fused.backends.native import NativeBackend
from keyedopt.fused.backends.native.describe import state_widths

WHY = NativeBackend("").missing()
if os.environ.get("KEYEDOPT_REQUIRE_NATIVE") == "1":
    assert not WHY, WHY
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY or "built")

SETS = NativeBackend.instruction_sets()
STEP = Step("rowwise_adagrad", 0.1, eps=1e-8)


def table(rows=10, width=4):
    return Table(torch.ones(rows, width), (torch.zeros(rows),))


def numbers(*values):
    return torch.tensor(values, dtype=torch.int64)


# --- nothing outside a table, and nothing written -------------------------------------------------


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("bad", [-1, 10, 2**31, 2**40, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("at", [0, 499, 70_000])
def test_a_row_that_is_not_there_is_refused_before_anything_is_written(bad, at, name):
    values = torch.zeros(70_001, dtype=torch.int64)
    values[at] = bad
    tables = [table(), table()]
    good = Lookup(0, numbers(1, 2), grad=torch.ones(2, 4))
    wrong = Lookup(1, values, grad=torch.ones(70_001, 4))
    backend = NativeBackend(name, 2)
    text = rf"values of lookup 1 must be row numbers from 0 to 9, and {bad} is not"
    for call in (
        lambda: backend.update(tables, [good, wrong], STEP),
        lambda: backend.coalesce(tables, [good, wrong]),
        lambda: backend.look_up(tables, [good, wrong]),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    assert all(bool((one.weight == 1).all()) and not one.states[0].any() for one in tables)


@pytest.mark.parametrize(
    "offsets", [(0, 2, 1, 3), (1, 2, 3), (0, 2), (0, 4), (0, -1, 3), (3,), (0, 2**62, 3)]
)
def test_offsets_that_do_not_rise_from_0_to_the_end_are_refused(offsets):
    one = table()
    lookup = Lookup(0, numbers(1, 2, 3), numbers(*offsets), grad=torch.ones(len(offsets) - 1, 4))
    with pytest.raises(ValueError, match="offsets of lookup 0 must"):
        NativeBackend().update([one], [lookup], STEP)
    with pytest.raises(ValueError, match="offsets of lookup 0 must"):
        NativeBackend().look_up([one], [lookup])
    assert bool((one.weight == 1).all())


@pytest.mark.parametrize("rows", [(3, 2), (2, 2), (-1, 2), (2, 10), (0, 2**40)])
def test_summed_rows_must_be_distinct_and_in_the_table(rows):
    one = table()
    with pytest.raises(ValueError, match="rows of gradient 0 must be"):
        NativeBackend().update_rows([one], [RowGradients(0, numbers(*rows), torch.ones(2, 4))], STEP)
    assert bool((one.weight == 1).all())


def test_shapes_that_do_not_fit_are_refused():
    backend, one, values = NativeBackend(), table(), numbers(1, 2, 3)
    lookups = [
        Lookup(0, values, grad=torch.ones(2, 4)),
        Lookup(0, values, grad=torch.ones(3, 5)),
        Lookup(0, values),
        Lookup(0, values, numbers(0, 3), grad=torch.ones(3, 4)),
        Lookup(0, values, numbers(), grad=torch.ones(0, 4)),
        Lookup(0, values, weights=torch.ones(2), grad=torch.ones(3, 4)),
        Lookup(1, values, grad=torch.ones(3, 4)),
        Lookup(-1, values, grad=torch.ones(3, 4)),
    ]
    for lookup in lookups:
        with pytest.raises(ValueError, match=r"must be|must have|no gradient|of table"):
            backend.update([one], [lookup], STEP)
    states = [(), (torch.zeros(10), torch.zeros(10)), (torch.zeros(10, 4),), (torch.zeros(9),)]
    for state in states:
        with pytest.raises(ValueError, match="state"):
            backend.update([Table(one.weight, state)], [Lookup(0, values, grad=torch.ones(3, 4))], STEP)
    with pytest.raises(ValueError, match="must be"):
        backend.update_rows([one], [RowGradients(0, values, torch.ones(2, 4))], STEP)
    assert bool((one.weight == 1).all())


def test_what_it_cannot_do_it_says():
    backend = NativeBackend()
    assert not backend.refuses([table()], STEP)
    cases = {
        "float64": Table(torch.ones(3, 4, dtype=torch.float64)),
        "contiguous": Table(torch.ones(4, 3).t()),
        "column": Table(torch.ones(3, 0)),
        "states must be": Table(torch.ones(3, 4), (torch.zeros(3, dtype=torch.float64),)),
        "row counter": Table(torch.ones(3, 4), (torch.zeros(3),), torch.zeros(3)),
        "CPU": Table(torch.ones(3, 4, device="meta")),
    }
    for text, one in cases.items():
        assert text in backend.refuses([table(), one], STEP)
        with pytest.raises(ValueError, match=text):
            backend.update([one], [], STEP)
    assert "nonsense" in backend.refuses([table()], Step("nonsense", 0.1))
    assert "nonsense" in NativeBackend("nonsense").missing()


# --- rounding ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1.0, 3e-6, 1000.0])
def test_stochastic_rounding_is_right_in_the_mean(size, dtype):
    """A step of a tenth of the spacing of the numbers; in float16, 3e-6 is below the normal numbers."""
    start = torch.full((2000, 50), size).to(dtype)
    spacing = float(torch.nextafter(start[0, 0], start.new_tensor(torch.inf)) - start[0, 0])
    lookup = Lookup(0, torch.arange(2000), grad=torch.full((2000, 50), -0.1 * spacing))
    results = []
    for name in SETS:
        for threads in (1, 2):
            results.append(start.clone())
            step = Step("sgd", 1.0, seed=5)
            NativeBackend(name, threads).update([Table(results[-1])], [lookup], step)
            assert torch.equal(results[-1], results[0])
    moved = (results[0].double() - start.double()) / spacing
    assert set(moved.unique().tolist()) == {0.0, 1.0}
    assert abs(float(moved.mean()) - 0.1) < 5 * (0.1 * 0.9 / moved.numel()) ** 0.5  # five standard deviations
    assert (moved.mean(0) - 0.1).abs().max() < 6 * (0.09 / 2000) ** 0.5
    assert (moved.mean(1) - 0.1).abs().max() < 6 * (0.09 / 50) ** 0.5 + 0.05
    other = start.clone()
    NativeBackend().update([Table(other)], [lookup], Step("sgd", 1.0, seed=6))
    assert not torch.equal(other, results[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_needs_no_rounding_is_not_rounded(dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).reshape(-1, 256)
    every = every[:, :].clone()
    lookup = Lookup(0, torch.arange(len(every)), grad=torch.zeros(len(every), 256))
    for seed in (None, 1):
        for name in SETS:
            got = every.clone()
            NativeBackend(name).update([Table(got)], [lookup], Step("sgd", 1.0, seed=seed))
            assert torch.equal(got.isnan(), every.isnan())
            number = ~every.isnan()
            assert torch.equal(got[number].view(torch.int16), every[number].view(torch.int16))
            (wide,) = NativeBackend(name).look_up([Table(every)], [Lookup(0, lookup.values)])
            assert torch.equal(wide[number], every.float()[number])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SETS)
def test_rounding_to_nearest_is_torchs(name, dtype):
    torch.manual_seed(0)
    exponents = torch.randint(-30, 20, (64, 512))
    values = torch.ldexp(torch.randn(64, 512), exponents)
    values[0, :8] = torch.tensor(
        [65504, 65519.99, 65520, 7e4, 2.0**-25, 2.0**-24 * 1.5, torch.inf, -torch.inf]
    )
    got = torch.zeros(64, 512, dtype=dtype)
    NativeBackend(name).update([Table(got)], [Lookup(0, torch.arange(64), grad=-values)], Step("sgd", 1.0))
    assert torch.equal(got, values.to(dtype))


# --- large tables, other processes, other threads ---------------------------------------------------


def sparse_memory(numbers_of_it, dtype):
    """A tensor of zeros that takes memory where it is written alone."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    size = numbers_of_it * torch.finfo(dtype).bits // 8
    try:
        return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype)
    except OSError as error:
        pytest.skip(f"this machine does not map {size} bytes: {error}")


@pytest.mark.parametrize(
    ("rows", "width", "dtype"),
    [(2**32 + 100, 1, torch.float16), (2**25, 128, torch.float32)],
    ids=["rows", "elements"],
)
def test_tables_beyond_32_bits(rows, width, dtype):
    weight = sparse_memory(rows * width, dtype).view(rows, width)
    chosen = numbers(rows - 1, 5, rows // 2 + 7, 5, rows - 1, 0)
    backend = NativeBackend()
    lookup = Lookup(0, chosen, grad=torch.ones(6, width))
    backend.update([Table(weight)], [lookup], Step("sgd", 0.5))
    want = {0: -0.5, 5: -1.0, rows // 2 + 7: -0.5, rows - 1: -1.0}
    for row, value in want.items():
        assert weight[row].tolist() == [value] * width
        for beside in (row + 1, row - 1):
            assert not 0 <= beside < rows or beside in want or not weight[beside].any()
    for index in ((rows - 1) % 2**32, (rows // 2 + 7) % 2**31):
        assert index in want or not weight[index].any()
    (got,) = backend.look_up([Table(weight)], [lookup])
    assert got[:, 0].tolist() == [-1.0, -1.0, -0.5, -1.0, -1.0, -0.5]
    assert backend.coalesce([Table(weight)], [lookup])[0].rows.tolist() == sorted(want)


def many():
    return Lookup(0, torch.arange(40_000) % 5000, grad=torch.ones(40_000, 16))


def one_update(threads, lookup):
    one = table(5000, 16)
    NativeBackend(threads=threads).update([one], [lookup], STEP)
    return one.weight


def _in_child(one, lookup):
    NativeBackend(threads=2).update([one], [lookup], STEP)  # and nothing of torch, whose threads do not fork
    os._exit(7)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_a_forked_process_has_threads_of_its_own():
    lookup = many()
    one_update(2, lookup)
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_in_child, args=(table(5000, 16), lookup))
    child.start()
    child.join(20)
    alive = child.is_alive()
    child.kill()
    assert not alive
    assert child.exitcode == 7


FIRST = """
import os, torch
from keyedopt.fused import SGD
torch.set_num_threads(2)
param = torch.nn.Parameter(torch.zeros(500, 1000))
param.grad = torch.zeros(500, 1000)  # by threads that a child does not have
optimizer = SGD([param], lr=1.0)
child = os.fork()
torch.set_num_threads(2)
optimizer.step()
os._exit(7) if child == 0 else os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes do not fork here")
def test_the_first_step_of_all_may_be_in_a_forked_process():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", FIRST], timeout=120, check=False)
    assert done.returncode == 7


SAME = """
import torch
from keyedopt.fused import Adam, SparseAdam
torch.set_num_threads(3)
torch.manual_seed(0)
a, b = (torch.nn.Parameter(torch.randn(9000, 64)) for _ in range(2))
rows = torch.randint(9000, (1, 50_000))
a.grad = torch.sparse_coo_tensor(rows, torch.randn(50_000, 64), a.shape, check_invariants=False)
b.grad = torch.randn(b.shape)
optimizers = SparseAdam([a]), Adam([b])
for _ in range(3):
    for optimizer in optimizers:
        optimizer.step()
print(hash((a.detach().numpy().tobytes(), b.detach().numpy().tobytes())))
"""


@pytest.mark.complete
def test_it_does_not_matter_whose_threads_work():
    """Those of torch's OpenMP spin after their work, unless they are told to wait; then there are our own."""
    said = set()
    for policy in ("active", "passive"):
        environment = {**os.environ, "OMP_WAIT_POLICY": policy, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-c", SAME]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        said.add(done.stdout)
    assert len(said) == 1
    assert said != {""}


def test_calls_at_the_same_time():
    lookup = many()
    want, wrong = one_update(1, lookup), []

    def work():
        for _ in range(10):
            if not torch.equal(one_update(2, lookup), want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_threads_flush_denormals_as_their_caller_does():
    lookup = Lookup(0, torch.arange(40_000), grad=torch.zeros(40_000, 16))
    lookups = [lookup] * 4
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine does not flush denormals")
    try:
        outputs = []
        for threads in (1, 2):
            tables = [Table(torch.full((40_000, 16), 1e-40)) for _ in lookups]
            each = [Lookup(index, lookup.values, grad=lookup.grad) for index in range(4)]
            NativeBackend(threads=threads).update(tables, each, Step("sgd", 0.1))
            outputs.append(torch.stack([one.weight for one in tables]).view(torch.int32))
        assert torch.equal(*outputs)
        assert not outputs[0].any()
    finally:
        torch.set_flush_denormal(False)


# --- what it takes, and what it leaves to others ------------------------------------------------------


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_a_table_without_rows_is_no_error(algorithm):
    widths = state_widths(algorithm, 4, len(ALGORITHMS[algorithm]))
    empty, full = (
        Table(torch.ones(rows, 4), tuple(torch.zeros(rows, width).squeeze(1) for width in widths))
        for rows in (0, 3)
    )
    step, none = Step(algorithm, 0.1, eps=1e-8), numbers()
    nothing = [
        Lookup(0, none, grad=torch.ones(0, 4)),
        Lookup(0, none, numbers(0, 0, 0), grad=torch.ones(2, 4)),
    ]
    backend = NativeBackend()
    assert not backend.refuses([empty, full], step)
    backend.update([empty, full], [*nothing, Lookup(1, numbers(1), grad=torch.ones(1, 4))], step)
    backend.update_rows([empty], [RowGradients(0, none, torch.ones(0, 4))], step)
    assert (full.weight != 1).any(1).tolist() == [False, True, False]
    assert [one.shape for one in backend.look_up([empty], nothing)] == [(0, 4), (2, 4)]
    assert [one.rows.tolist() for one in backend.coalesce([empty], nothing)] == [[]]
    with pytest.raises(ValueError, match="row numbers from 0 to -1, and 0 is not"):
        backend.update([empty], [Lookup(0, numbers(0), grad=torch.ones(1, 4))], step)


@pytest.mark.parametrize(
    ("weight", "state", "why"),
    [
        (torch.float64, torch.float64, "weights must be float32, float16 or bfloat16, not torch.float64"),
        (torch.float16, torch.float16, "states must be float32, not torch.float16"),
        (torch.bfloat16, torch.bfloat16, "states must be float32, not torch.bfloat16"),
        (torch.float32, torch.float64, "states must be float32, not torch.float64"),
    ],
    ids=str,
)
def test_what_it_refuses_another_backend_does(weight, state, why):
    one = Table(torch.ones(3, 4, dtype=weight), (torch.zeros(3, dtype=state),))
    assert why in NativeBackend().refuses([one], STEP)
    chosen = choose("auto", [one], STEP)
    assert chosen.name == "torch"
    chosen.update([one], [Lookup(0, numbers(1, 1), grad=torch.ones(2, 4))], STEP)
    assert (one.weight != 1).any(1).tolist() == [False, True, False]
    with pytest.raises(ValueError, match=why):
        choose("native", [one], STEP)
