"""Workloads of tables of many sizes, and those that are replayed from a file."""

import dataclasses
import os
import zipfile

import pyarrow as pa
import pytest
import torch
from making import refused
from pyarrow import parquet

from keyedopt.benchmarks import compare, traces
from keyedopt.benchmarks.peers import OWN_WAY
from keyedopt.benchmarks.tasks import TASKS, make
from keyedopt.benchmarks.tasks.keyed import concatenated
from keyedopt.benchmarks.timing import CpuClock
from keyedopt.benchmarks.workloads import DLRM_LENGTHS, DLRM_ROWS, WORKLOADS, Lookups, dlrm
from keyedopt.conformance.targets.find import find

MIXED = Lookups("mixed", "for tests", 3, (50, 7, 20), 4, 6, (3, 1, 2), "uniform")
GOOD = {"indices": [4, 0, 4, 2], "offsets": [0, 3, 3], "lengths": [3, 0, 1]}


def run(name, task, work):
    surface = find(name).surface()
    made = compare.start(
        lambda: OWN_WAY.get(name, make)(surface, TASKS[task], work, "cpu"), CpuClock(), 0.0, "cpu"
    )
    assert any(not torch.equal(value, made.after[key]) for key, value in made.before.items())
    return made


def test_mlperfs_tables_are_as_published():
    full = WORKLOADS["dlrm-dcnv2"]
    assert (full.tables, full.dim, sum(full.lengths), sum(full.heights)) == (26, 128, 214, 204_184_588)
    assert full.heights == DLRM_ROWS
    assert full.lengths == DLRM_LENGTHS
    assert full.table_bytes() == 204_184_588 * 512


def test_mlperfs_tables_can_be_scaled():
    small = dlrm("x", 1 / 1000, 4)
    assert small.lengths == DLRM_LENGTHS
    for full, rows in zip(DLRM_ROWS, small.heights, strict=True):
        assert rows == (full if full <= 1000 else max(1000, round(full / 1000)))
    assert [len(values) for values in small.values()] == [4 * length for length in DLRM_LENGTHS]
    assert all(values.max() < rows for values, rows in zip(small.values(), small.heights, strict=True))


def test_tables_may_differ_in_size_and_in_pooling():
    assert MIXED.offsets(0).tolist() == [0, 3, 6, 9, 12, 15, 18]
    assert MIXED.offsets(1).tolist() == [0, 1, 2, 3, 4, 5, 6]
    even = dataclasses.replace(MIXED, rows=(50, 7, 20), indices="distinct")
    indices, rows, bags = 8 * 36, 16 * 36, 16 * 18
    assert even.forward_bytes() == indices + rows + bags
    with pytest.raises(ValueError, match="one for each table"):
        dataclasses.replace(MIXED, rows=(50, 7))
    with pytest.raises(ValueError, match="distinct"):
        dataclasses.replace(MIXED, rows=(50, 5, 20), indices="distinct")


def test_offsets_of_several_tables_are_concatenated():
    parts = [MIXED.offsets(table) for table in range(3)]
    assert concatenated(parts).tolist() == [*range(0, 19, 3), *range(19, 25), *range(26, 37, 2)]


def recorded(tmp_path, features, name="x.pt"):
    path = tmp_path / name
    if name.endswith(".pt"):
        plain = {
            feature: {key: torch.tensor(value) for key, value in columns.items()}
            for feature, columns in features.items()
        }
        torch.save(plain, path)
    else:
        parquet.write_table(
            pa.Table.from_pylist([{"feature": feature, **columns} for feature, columns in features.items()]),
            path,
        )
    return path


TWO = {"a": GOOD, "b": {"indices": [1, 1, 1], "lengths": [0, 1, 2]}}


@pytest.mark.parametrize("name", ["x.pt", "x.parquet"])
def test_a_trace_is_what_was_recorded(tmp_path, name):
    trace = traces.read(recorded(tmp_path, TWO, name), dim=4)
    assert [values.tolist() for values in trace.values()] == [[4, 0, 4, 2], [1, 1, 1]]
    assert [trace.offsets(table).tolist() for table in (0, 1)] == [[0, 3, 3, 4], [0, 0, 1, 3]]
    assert (trace.heights, trace.batch, trace.dim) == ((5, 2), 3, 4)
    assert [rows.tolist() for rows in trace.unique()] == [[0, 2, 4], [1]]
    assert trace.forward_bytes() == 8 * 7 + 4 * 4 * (4 + 6)
    assert [gradient.shape for gradient in trace.gradients()] == [(3, 4)] * 2


def test_two_traces_are_never_taken_for_one(tmp_path):
    first = traces.read(recorded(tmp_path, {"a": GOOD}), 4)
    other = traces.read(recorded(tmp_path, {"a": {**GOOD, "indices": [4, 0, 4, 3]}}), 4)
    assert first != other
    assert first == traces.read(recorded(tmp_path, {"a": GOOD}), 4)


def test_a_single_feature_needs_no_name_and_may_say_its_rows(tmp_path):
    path = tmp_path / "x.pt"
    torch.save(
        {"indices": torch.tensor([1, 2], dtype=torch.int32), "offsets": torch.tensor([0, 2]), "rows": 9}, path
    )
    trace = traces.read(path, 8)
    assert trace.heights == (9,)
    assert trace.offsets().tolist() == [0, 2]


@pytest.mark.parametrize("peer", ["reference", "torch", "fbgemm"])
@pytest.mark.parametrize("kind", ["trace", "mixed"])
def test_all_do_the_same_with_it(tmp_path, peer, kind):
    if peer == "fbgemm":
        pytest.importorskip("fbgemm_gpu")
    work = traces.read(recorded(tmp_path, TWO), 4) if kind == "trace" else MIXED
    for task in ("train-adagrad", "forward"):
        ours = run("keyedopt.fused", task, work)
        assert compare.error_between(ours, run(peer, task, work)) < compare.TOLERANCE


def test_a_trace_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(traces, "SIZE", 1 << 20)
    monkeypatch.setattr(traces, "INTEGERS", 1 << 20)
    many, bags = torch.zeros(1, dtype=torch.int64).expand(1 << 40), {"lengths": torch.tensor([1])}
    torch.save({"indices": many, **bags}, tmp_path / "repeated.pt")
    torch.save({"indices": torch.tensor([1]), **bags, "rows": many}, tmp_path / "rows.pt")
    with zipfile.ZipFile(tmp_path / "packed.pt", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("x/data.pkl", bytes(traces.SIZE + 1))
    table = pa.table({"indices": [[0] * (traces.INTEGERS // 4 + 1)] * 4})
    parquet.write_table(table, tmp_path / "repeated.parquet")
    os.mkfifo(tmp_path / "pipe.pt")
    (tmp_path / "endless.parquet").symlink_to("/dev/zero")
    for name, said in {
        "repeated.pt": "at most 1,048,576 are read",
        "rows.pt": "rows must be a number",
        "packed.pt": "larger than 1 MB",
        "repeated.parquet": "at most 1,048,576 are read",
        "pipe.pt": "not a regular file",
        "endless.parquet": "not a regular file",
    }.items():
        with pytest.raises(traces.TraceError, match=said):
            traces.read(tmp_path / name, 4)


WRONG = [
    ({}, "is empty"),
    ({"a": {}}, "columns are none"),
    ({"a": {"values": [1], "lengths": [1]}}, "columns are values, lengths"),
    ({"a": {"indices": [1]}}, "columns are indices"),
    ({"a": {"indices": [], "lengths": [0]}}, "it has no indices"),
    ({"a": {"indices": [1, -3], "lengths": [2]}}, "negative indices: -3"),
    ({"a": {"indices": [1.5], "lengths": [1]}}, "list of integers"),
    ({"a": {"indices": [1], "lengths": [-1]}}, "negative lengths"),
    ({"a": {"indices": [1, 2], "lengths": [1]}}, "1 indices in all, but there are 2"),
    (
        {"a": {"indices": [1, 2, 3], "lengths": [2**62] * 4 + [3]}},
        "4611686018427387904 indices, but there are 3",
    ),
    ({"a": {"indices": [1, 2, 3], "offsets": [0, 2, 1]}}, "must not decrease"),
    ({"a": {"indices": [1, 2], "offsets": [1, 2]}}, "must begin with 0"),
    ({"a": {"indices": [1, 2], "offsets": [0, 5]}}, "go to 5"),
    ({"a": {"indices": [1, 2], "offsets": [0, 1], "lengths": [2, 0]}}, "must agree"),
    ({"a": {"indices": [4], "lengths": [1], "rows": 4}}, "above the largest index"),
    (
        {"a": {"indices": [4], "lengths": [1]}, "b": {"indices": [4], "lengths": [1, 0]}},
        "same number of bags",
    ),
]


@pytest.mark.parametrize("name", ["x.pt", "x.parquet"])
@pytest.mark.parametrize(("features", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_cannot_be_replayed_is_refused(run_line, tmp_path, features, said, name):
    path = recorded(tmp_path, features, name)
    assert said in refused(run_line("bench", "run", "--trace", path))


def test_a_file_that_is_no_trace_is_refused(run_line, tmp_path):
    for name, data in (("x.pt", b"no"), ("y.parquet", b"no"), ("z.csv", b"1"), ("empty.pt", b"")):
        (tmp_path / name).write_bytes(data)
        assert name in refused(run_line("bench", "run", "--trace", name))
    assert "nowhere.pt" in refused(run_line("bench", "run", "--trace", "nowhere.pt"))
    torch.save([1], tmp_path / "list.pt")
    assert "must contain a dictionary" in refused(run_line("bench", "run", "--trace", "list.pt"))


def test_what_only_a_file_of_torch_can_hold_is_refused(run_line, tmp_path):
    lengths, plain = torch.tensor([1, 2]), torch.tensor([1, 2, 3])
    for columns, said in (
        ({"indices": plain.to("meta"), "lengths": lengths}, "indices must be a list of integers"),
        ({"indices": plain.to_sparse(), "lengths": lengths}, "indices must be a list of integers"),
        ({"indices": plain, "lengths": lengths, "rows": torch.empty((), device="meta")}, "rows must be"),
        ({"indices": plain, "lengths": lengths, "rows": 2**70}, "too large"),
        ({"indices": torch.tensor([1, 2**63 - 1]), "lengths": torch.ones(2, dtype=torch.int64)}, "too large"),
    ):
        torch.save(columns, tmp_path / "x.pt")
        assert said in refused(run_line("bench", "run", "--trace", "x.pt", "--against", "torch"))


def test_a_row_for_each_bag_is_not_taken_for_one_of_each_feature(run_line, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is in the extra `reports`")
    import pyarrow

    rows = {"feature": ["a", "a"], "indices": [[1, 2], [3]], "lengths": [[2], [1]]}
    parquet.write_table(pyarrow.table(rows), tmp_path / "x.parquet")
    assert "feature 'a' occurs twice" in refused(run_line("bench", "run", "--trace", "x.parquet"))
    for changed, said in (
        (
            {"indices": [["1"], ["2"]]},
            "indices.list.element must be a list of integers",
        ),  # texts are not read
        ({"feature": ["a" * (17 << 20), "b"]}, "the names of its features have more than 16 MB"),
    ):
        parquet.write_table(pyarrow.table(rows | changed), tmp_path / "x.parquet")
        assert said in refused(run_line("bench", "run", "--trace", "x.parquet"))


class Harmful:
    """Something that runs code when it is loaded."""

    def __reduce__(self):
        return (print, ("loaded",))


def test_a_file_never_runs_code(run_line, tmp_path):
    torch.save({"indices": Harmful()}, tmp_path / "x.pt")
    done = run_line("bench", "run", "--trace", "x.pt")
    assert "only tensors" in refused(done)
    assert "loaded" not in done.stdout


def test_damage_for_which_pyarrow_ends_the_process_is_refused(tmp_path):
    path = tmp_path / "x.parquet"
    parquet.write_table(pa.table({"indices": [[0, 1]], "offsets": [[0, 1]]}), path)
    sound = path.read_bytes()
    refusals = []
    for place in range(244, 248):  # the statistics of a column
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        try:
            traces.read(path, dim=4)
        except traces.TraceError as error:
            refusals.append(str(error))
    assert refusals, "none of the bytes matters"
    assert all("cannot be read" in one for one in refusals)
