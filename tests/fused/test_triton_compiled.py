"""Every Triton kernel compiled for GPUs that are not there: no spills, few registers, wide accesses.

This needs triton without its interpreter, which another test in the same process may have chosen, so all is
compiled in a process of its own, which this file is the script of.
"""

import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from sampling import Sample
from triton_dense import DENSE_STEPS, KINDS, parameters
from triton_oracle import DTYPES, STATES, STEPS, lookup_of, tables_of
from triton_packed import packed
from triton_process import hand_over, run_alone

from keyedopt.fused.backends.interface import Lookup, RowGradients, Step, Table

pytestmark = pytest.mark.complete(sample=1)

KERNELS = {
    "unpack",
    "write_keys",
    "radix_pass",
    "find_runs",
    "check_offsets",
    "pool",
    "sum_chunks",
    "fold_chunks",
    "update",
    "count_runs",
    "collect",
    "update_dense",
}


def lookups_of(tables: list[Table], **kind: Any) -> list[Lookup]:
    """Look up enough of one row for a run to be long."""
    return [lookup_of(number, one.weight, [600, 1], number, **kind) for number, one in enumerate(tables)]


def launches(backend: Any) -> Iterator[tuple[str, Any]]:
    """Name what is compiled: every algorithm at width 64, some at other widths and dtypes, and the rest."""
    for name, options in STEPS.items():
        fields = {key: value for key, value in options.items() if key != "counted"}
        tables = tables_of(((40, 64), (7, 16)), options, torch.float32)
        step = Step(lr=0.1, **fields)
        yield (
            f"step-{name}",
            lambda tables=tables, step=step: backend.update(tables, lookups_of(tables), step),
        )
    for dtype, widths in (
        ("float32", (4, 33, 128, 4096)),
        ("bfloat16", (8, 33, 64, 1024)),
        ("float16", (64,)),
    ):
        for width in widths:
            tables = tables_of(((40, width),), STEPS["adam"], DTYPES[dtype])
            step = Step(lr=0.1, seed=1, **STEPS["adam"])
            for what, call in (
                ("adam", lambda tables=tables, step=step: backend.update(tables, lookups_of(tables), step)),
                ("look_up", lambda tables=tables: backend.look_up(tables, lookups_of(tables, mean=True))),
            ):
                yield f"{what}-{width}-{dtype}", call
    halved = [
        replace(one, states=(one.states[0].bfloat16(), one.states[1]))
        for one in tables_of(((40, 64),), STEPS["adam"], torch.bfloat16)
    ]
    adam = Step(lr=0.1, **STEPS["adam"])
    yield "momentum-64-bfloat16", lambda: backend.update(halved, lookups_of(halved), adam)
    tables = tables_of(((40, 64), (7, 16)), STEPS["rowwise"], torch.float32)
    step = Step(lr=0.1, **STEPS["rowwise"])
    weighted = lookups_of(tables, weighted=True)
    rows = [RowGradients(0, torch.arange(40), torch.ones(40, 64))]
    for many in (2**24, 2**30):  # three passes, of 8 bits and of 10
        far = [Table(torch.empty(many, 1, dtype=torch.float16))]
        yield f"sort-{many}", lambda far=far: backend.prepare(far, lookups_of(far, mean=True))
    count = torch.tensor([1])
    lookups, _ = packed(weighted=True)
    three = tables_of(((40, 64), (7, 16), (9, 16)), STEPS["sgd"], torch.float32)
    yield "packed", lambda: backend.look_up_packed(three, lookups, False)
    for name, options in DENSE_STEPS.items():
        yield f"dense-{name}", lambda options=options: launch_dense(options)
    yield "dense-many", lambda: launch_dense(DENSE_STEPS["adam_decoupled"], [3] * 1030)
    yield "offsets", lambda: backend.check_offsets(tables, lookups_of(tables))
    yield "coalesce", lambda: backend.coalesce(tables, weighted)
    yield "padding", lambda: backend.coalesce_padded(tables, [replace(one, padding=True) for one in weighted])
    yield "weighted", lambda: backend.update(tables, weighted, step)
    yield "update_rows", lambda: backend.update_rows(tables, rows, step)
    yield (
        "numbers_on_device",
        lambda: backend.update(
            tables,
            weighted,
            Step("rowwise_adagrad", torch.tensor(0.1), count, counters=(count, count, count)),
        ),
    )


def launch_dense(options: dict[str, Any], sizes: Sequence[int] = (5000, 3)) -> None:
    """Launch the kernel for dense gradients."""
    from keyedopt.fused.backends.triton.dense_launch import prepare, run

    step = Step(**{"lr": 0.1, **{key: value for key, value in options.items() if key not in KINDS}})
    scale = torch.tensor(options["scale"]) if "scale" in options else None
    run(prepare(step, parameters(options, sizes), scale))


# --- in the process that compiles -----------------------------------------------------------------


def compile_all(names: Collection[str]) -> list[dict[str, Any]]:
    """Compile the kernels of these launches; return what came of each."""
    from keyedopt.fused.backends.triton import TritonBackend
    from keyedopt.tools.compile_ahead import compiled

    torch.set_num_threads(1)
    found = []
    for name, launch in launches(TritonBackend()):
        if name not in names:
            continue
        with compiled() as kernels:
            launch()
        for one in kernels:
            wide = {kind: one.wide(kind) for kind in ("ld", "st")}
            constants = {key: value for key, value in one.constants.items() if isinstance(value, (int, str))}
            what = {"case": name, "kernel": one.kernel, "architecture": one.architecture, "warps": one.warps}
            used = {"limit": one.limit, "registers": one.registers, "stack": one.stack}
            found.append({**what, **used, "wide": wide, "constants": constants, "together": one.together})
    return found


# --- in the process of pytest ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, sample: Sample) -> Any:
    """Compile a sample of the launches, and all in the complete set."""
    names = sample.choose([name for name, _ in launches(None)], 1)
    return run_alone(tmp_path_factory, __file__, *names, interpret=False)


@pytest.mark.complete
def test_every_kernel_is_compiled_for_both_architectures(found: list[dict[str, Any]]) -> None:
    seen = {(one["kernel"], one["architecture"]) for one in found}
    assert seen == {(kernel, architecture) for kernel in KERNELS for architecture in (80, 90)}


def test_nothing_spills(found: list[dict[str, Any]]) -> None:
    assert not [one for one in found if one["stack"]]


def test_registers_leave_room_for_the_warps_that_are_planned(found: list[dict[str, Any]]) -> None:
    assert not [one for one in found if one["limit"] is None or one["registers"] > one["limit"]]
    for one in found:  # four programs of the sort on a multiprocessor, of the first pass three
        if one["kernel"] == "radix_pass" and one["constants"]["BITS"] <= 8:
            assert 65536 // (32 * one["registers"]) >= (24 if one["constants"]["FIRST"] else 32), one
            assert one["warps"] == 8
    # Of 65536: 32 warps if a thread has 4 elements, 24 if it also has a run, 20 with two states;
    # 16 if it has 8 elements.
    for one in found:
        if one["kernel"] in ("pool", "update", "sum_chunks", "fold_chunks", "collect"):
            elements = one["constants"]["ROWS"] * one["constants"]["WIDTH"] // (32 * one["warps"])
            several = one["case"] == "packed"  # several lookups with scales
            planned = 24 if several or one["kernel"] in ("update", "collect") else 32
            planned = 20 if one["constants"].get("SECOND", "none") != "none" else planned
            if "33" not in one["case"].split("-"):
                assert 65536 // (32 * one["registers"]) >= (planned if elements <= 4 else 16), one


def test_row_data_moves_16_bytes_at_a_time(found: list[dict[str, Any]], sample: Sample) -> None:
    checked = set()
    for one in found:
        constants = one["constants"]
        if one["kernel"] not in ("pool", "update", "collect") or "33" in one["case"].split("-"):
            continue
        elements = constants["ROWS"] * constants["WIDTH"] // (32 * one["warps"])
        vectors = max(1, elements // 4)  # of float32
        halves = one["case"].endswith("float16")
        weight = max(1, elements // 8) if halves else vectors
        if one["kernel"] == "update":
            states = (constants["FIRST"], constants["SECOND"]).count("full")
            state = states * vectors if not one["case"].startswith("momentum") else weight + vectors
            loads, stores = vectors + weight + state, weight + state
        elif one["kernel"] == "pool":
            loads, stores = constants["UNROLL"] * weight, vectors
        else:
            loads, stores = vectors, vectors
        assert one["wide"]["ld"] >= loads, one
        assert one["wide"]["st"] >= stores, one
        checked.add(one["kernel"])
    assert checked == {"pool", "update", "collect"} or not sample.complete


def test_all_warps_of_a_program_read_the_same_error_flag(found: list[dict[str, Any]], sample: Sample) -> None:
    """They ask for it first of all; before any may leave, all have met."""
    asking = ("update", "collect", "sum_chunks", "fold_chunks")
    assert {one["kernel"] for one in found} >= set(asking) or not sample.complete
    assert not [one for one in found if one["kernel"] in asking and not one["together"]]


@pytest.mark.complete
def test_aligned_dense_parameters_move_16_bytes_at_a_time(found: list[dict[str, Any]]) -> None:
    mine = [one for one in found if one["kernel"] == "update_dense"]
    assert {one["constants"]["ALIGN"] for one in mine} == {4, 8, 16}
    for one in mine:
        vectors = 2 if one["constants"]["ALIGN"] == 16 else 0
        assert one["wide"]["ld"] == vectors * (2 + one["constants"]["STATES"]), one
        assert one["wide"]["st"] == vectors * (1 + one["constants"]["STATES"]), one
        assert 65536 // (32 * one["registers"]) >= (28 if vectors else 16), one


@pytest.mark.complete
def test_every_algorithm_is_among_them(found: list[dict[str, Any]]) -> None:
    algorithms = {one["constants"]["ALGORITHM"] for one in found if one["kernel"] == "update"}
    assert algorithms == {"sgd", *STATES} - {"sparse_adam"}  # which is Adam


if __name__ == "__main__":
    hand_over(compile_all(sys.argv[1:-1]))
