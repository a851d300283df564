"""Each stage of the first run on a GPU, on the CPU; scripts stand for the programs of a GPU host."""

import json
import os
from types import SimpleNamespace

import pytest
import torch
from making import result

from keyedopt.benchmarks import compare, resources
from keyedopt.benchmarks.gpu import (
    asv_runs,
    checks,
    checks_and_sanitizer,
    conformance_runs,
    counters,
    machine_report,
    speed,
)
from keyedopt.benchmarks.gpu.stage import STAGES, Context
from keyedopt.benchmarks.timing import Job
from keyedopt.tools import compare_kernels


def context(tmp_path, seconds=60.0, device="cpu"):
    """Return the context of a stage, which saves in a list, the last item of which is the result."""
    saved = []
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    made = Context(
        tmp_path / "x.json", device, True, seconds, work, lambda one: saved.append(json.dumps(one))
    )
    return made, saved


def program(tmp_path, name, body):
    """Make a program, and return the folder that it is in."""
    place = tmp_path / "programs"
    place.mkdir(exist_ok=True)
    (place / name).write_text(f"#!/bin/sh\n{body}\n")
    (place / name).chmod(0o755)
    return place


def test_the_environment_is_reported(tmp_path, monkeypatch):
    made, saved = context(tmp_path)
    monkeypatch.setattr(Context, "command", lambda *_, **__: (0, "all right"))
    monkeypatch.setattr(machine_report, "MODULES", ("numpy", "nothing_of_this_name"))
    machine_report.run(made)
    found = json.loads(saved[-1])
    assert found["environment"]["versions"]["torch"] == torch.__version__
    assert "ModuleNotFoundError" in found["imports"]["nothing_of_this_name"]
    assert (found["doctor_code"], found["doctor"]) == (0, "all right")
    assert found["programs"]["ncu"]
    assert len(saved) > 2, "each part is saved at once"


def test_kernels_are_compared_and_a_wrong_one_is_named(monkeypatch):
    case = compare_kernels.CASES[2]
    assert compare_kernels.compare(case, "cpu", "native") == []
    native = compare_kernels.get("native")
    update = type(native).update

    def wrong(self, tables, lookups, step):
        update(self, tables, lookups, step)
        tables[1].weight[3] += 1

    monkeypatch.setattr(type(native), "update", wrong)
    (found,) = compare_kernels.compare(case, "cpu", "native")
    assert (found.stage, found.shape, found.row) == ("update", [7, 64], 3)
    assert found.seen[0] == pytest.approx(found.right[0] + 1)
    plain = {"algorithm": "adam", "dtype": "float32", "width": 64, "hashes": {"update": "ptx 1234"}}
    text = compare_kernels.summary({0: {**plain, "wrong": [vars(found)]}}, 1)["first_wrong"]
    assert text.startswith("update (update) for adam in float32, width 64, shape [7, 64], row 3: [")
    assert text.endswith("{'update': 'ptx 1234'}")


def test_kernels_are_compared_with_the_reference_in_float64(monkeypatch):
    case = next(one for one in compare_kernels.CASES if one.algorithm == "adam")
    assert compare_kernels.against_reference(case, "cpu", "native") == []
    monkeypatch.setattr(compare_kernels, "TOLERANCE", 0.0)
    (found,) = compare_kernels.against_reference(case, "cpu", "native")
    assert (found.stage, found.kernel) == ("reference", "a step of the module")


def test_dense_steps_are_compared_with_the_reference_in_float64(monkeypatch):
    case = next(one for one in compare_kernels.CASES if one.algorithm == "adam")
    assert compare_kernels.dense(case, "cpu") == []
    step = compare_kernels.fused.Adam.make_step

    def imprecise(self, group, *given):
        betas = [float(torch.tensor(beta)) for beta in group["betas"]]  # as torch's fused kernel on CUDA has
        return step(self, {**group, "betas": betas}, *given)

    monkeypatch.setattr(compare_kernels.fused.Adam, "make_step", imprecise)
    monkeypatch.setattr("keyedopt.fused.dense.cpu_fast_path.try_step", lambda optimizer: "not now")
    (found,) = compare_kernels.dense(case, "cpu")
    assert (found.stage, found.kernel) == ("dense", "update_dense")


def test_checks_and_a_sanitizer(tmp_path, monkeypatch):
    made, saved = context(tmp_path)
    tool = program(tmp_path, "compute-sanitizer", 'echo "$@"; [ "$2" = memcheck ] || { echo RACE; exit 9; }')
    monkeypatch.setenv("PATH", f"{tool}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(checks, "ALGORITHMS", ("SGD",))
    monkeypatch.setitem(checks.CHECKS, "first step", (checks.first_step_equals_a_warm_one, ("SGD",)))
    checks_and_sanitizer.run(made)
    found = json.loads(saved[-1])
    assert [(one["check"], one["outcome"]) for one in found["checks"]] == [("first step", "held")]
    assert found["sanitizer"]["memcheck"]["outcome"] == "held"
    assert "keyedopt.benchmarks.gpu.checks_and_sanitizer Adam cpu" in found["sanitizer"]["memcheck"]["output"]
    assert found["sanitizer"]["racecheck"]["outcome"] == "failed"
    assert "RACE" in found["sanitizer"]["racecheck"]["output"]


def test_the_sanitized_step_runs_without_a_sanitizer():
    checks_and_sanitizer.step("SGD", "cpu")


def test_speeds_host_times_and_kernels(tmp_path, monkeypatch):
    made, saved = context(tmp_path)
    monkeypatch.setattr(speed, "PEERS", ("torch", "nothing_of_this_name"))
    monkeypatch.setattr(speed, "ROUNDS", 1)
    monkeypatch.setattr(speed, "STEPS", 2)
    speed.run(made)
    found = json.loads(saved[-1])
    assert [why.partition(":")[0] for why in found["left_out"]] == ["nothing_of_this_name"]
    ((row,),) = (report["rows"] for report in found["reports"])
    assert (row["workload"], row["task"], row["peer"], row["matches"]) == (
        "small-step",
        "train-adagrad",
        "torch",
        True,
    )
    assert [one["tables"] for one in found["host"]] == [8, 8]
    assert found["host"][0]["seconds"] > 0
    clock = iter([0.0, 4.0])
    job = Job(lambda: None, dict)
    assert speed.host_seconds(job, "cpu", lambda: next(clock)) == pytest.approx(2.0)
    assert resources.kernel_times(job.run, "cpu") is None


def test_the_workloads_of_the_model_are_measured_first():
    pairs = speed.pairs()
    assert len({work.name for work, _ in pairs[:18]}) == 6
    assert {task.name for _, task in pairs[:18]} == set(speed.TABLES)
    assert all(compare.chosen(works, names) for works, names in speed.MORE)


NCU = """
cat <<'TABLE'
==PROF== Connected to process 1
"ID","Kernel Name","Grid Size","Metric Name","Metric Unit","Metric Value"
"0","radix_pass","(132, 1, 1)","dram__bytes_read.sum","byte","1,024"
"0","radix_pass","(132, 1, 1)","lts__t_bytes.sum","byte","n/a"
"1","update","(9, 1, 1)","dram__bytes_read.sum","byte","77"
==PROF== Disconnected
TABLE
"""


def test_counters_of_nsight_compute(tmp_path, monkeypatch):
    made, saved = context(tmp_path)
    monkeypatch.setenv("PATH", f"{program(tmp_path, 'ncu', NCU)}{os.pathsep}{os.environ['PATH']}")
    counters.run(made)
    found = json.loads(saved[-1])["workloads"]["small-step"]
    assert found["outcome"] == "exit code 0"
    assert [(one["kernel"], one["dram__bytes_read.sum"]) for one in found["kernels"]] == [
        ("radix_pass", 1024.0),
        ("update", 77.0),
    ]
    counters.step("small-step", "cpu")


def test_commits_without_a_repository_are_said(tmp_path, monkeypatch):
    made, saved = context(tmp_path)
    monkeypatch.setenv(asv_runs.REPOSITORY, str(tmp_path / "none"))
    asv_runs.run(made)
    assert "is no git repository" in json.loads(saved[-1])["outcome"]
    (tmp_path / "commits" / "b").mkdir(parents=True)
    (tmp_path / "commits" / "commits.txt").write_text("a\nb\n")
    monkeypatch.setenv(asv_runs.COMMITS, str(tmp_path / "commits"))
    assert [path.name for path in asv_runs.earlier()] == ["b"]
    outside = tmp_path / "result.json"
    outside.write_text(json.dumps({"files": {"../x": ""}}))
    with pytest.raises(ValueError, match="outside"):
        asv_runs.unpack(outside, tmp_path / "history")


def test_a_check_that_is_cut_short_keeps_its_cases(tmp_path, monkeypatch):
    """The command stands for `keyedopt check`: it writes a journal, and hangs."""
    made, saved = context(tmp_path, seconds=9.0)
    head = result(complete=False).to_dict() | {"cases": []}
    journal = [json.dumps(head), json.dumps(vars(result({}).cases[0]))]
    script = tmp_path / "python"
    lines = "\n".join(journal)
    script.write_text(
        "#!/bin/sh\n"
        f"echo $4 ${{KEYEDOPT_BACKEND:-default}} >> {tmp_path}/log\n"
        f"[ $4 = torch ] && exit 7\ncat > {made.work}/fused-first.json.journal <<'E'\n{lines}\nE\nsleep 100\n"
    )
    script.chmod(0o755)
    monkeypatch.delenv("KEYEDOPT_BACKEND", raising=False)
    monkeypatch.setattr(conformance_runs, "sys", SimpleNamespace(executable=str(script)))
    monkeypatch.setattr(conformance_runs, "CONTROL_RESERVE", 1.5)
    monkeypatch.setattr(made, "device", "cuda")
    conformance_runs.run(made)
    found = json.loads(saved[-1])["checks"]
    assert found["fused-first"]["outcome"] == "cut short"
    assert len(found["fused-first"]["result"]["cases"]) == 1
    assert found["torch-control"]["outcome"] == "exit code 7", "the check before it leaves time for it"
    assert (tmp_path / "log").read_text().split() == ["fused", "default", "torch", "default"]


def test_the_control_has_its_own_time():
    order = [name for name, *_ in conformance_runs.runs(small=False)]
    assert order == ["fused-first", "torch-control", "fused-rest"]
    assert [areas for name, _, areas in conformance_runs.runs(small=True)] == [("clipping",), ("algorithms",)]
    left = next(one.seconds for one in STAGES if one.name == "conformance")
    first = conformance_runs.limit("fused-first", left)
    assert first == left - 20
    assert conformance_runs.limit("torch-control", left - first) == 20
    assert conformance_runs.limit("torch-control", left) == 25
    assert conformance_runs.limit("fused-rest", 50.0) == 50
    assert conformance_runs.limit("fused-first", 8.0) == 6
