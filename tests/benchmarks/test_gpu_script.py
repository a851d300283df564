"""The script that measures on a GPU host, run without one by a stand-in for Python."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from making import left_behind, mark, result

from keyedopt.benchmarks.gpu import checks
from keyedopt.benchmarks.gpu import summary as gpu_summary

SCRIPT = Path(checks.__file__).with_name("gpu.sh")

#: Stands for Python in the script: notes what is asked for, and writes what the parts of the script read. It
#: needs no installed package, so it starts without them, in half the time.
RECORDER = """#!{python} -IS
import json, os, pathlib, sys

words, log = sys.argv[1:], pathlib.Path({log!r})
what = " ".join(words)
if words[0] == "-c" and "device='cuda'" in what:
    sys.exit({no_cuda})
if words[0] == "-c" and words[1].startswith("import") and "sys" not in words[1]:
    sys.exit(words[1] in {missing})
if words[:3] == ["-m", "keyedopt.tools.kernel_cache", "use"]:
    pathlib.Path(words[3]).mkdir()
    pathlib.Path(words[3], "kernel.cubin").touch()
    sys.exit(print(pathlib.Path(words[5]).name, "fits"))
if words[:2] == ["-m", "keyedopt.benchmarks.asv.machine"]:
    sys.exit(print("box"))
if words[:2] in (["-m", "keyedopt.cli.main"], ["-m", "keyedopt.benchmarks.gpu.checks"], ["-m", "asv"]):
    if "checks" in words[1] and "TRITON_CACHE_DIR" in os.environ:
        pathlib.Path(os.environ["TRITON_CACHE_DIR"]).mkdir(exist_ok=True)
        pathlib.Path(os.environ["TRITON_CACHE_DIR"], "another.cubin").touch()
    with log.open("a") as file:
        file.write(os.environ.get("KEYEDOPT_BACKEND", "-") + " " + what + chr(10))
    if "--output" in words:
        name = pathlib.Path(words[words.index("--output") + 1])
        row = dict(task="train-sgd", peer="torch", ratio=4.0, matches=True, status="publishable")
        check = dict(check="graph", algorithm="SGD", outcome="failed", message="other bits")
        holds = dict(cases=[dict(outcome="pass")]) if "conformance" in name.stem else dict(rows=[row])
        name.write_text(json.dumps(dict(checks=[check]) if name.stem == "checks" else holds))
    if {hangs!r} in what:
        import subprocess, time
        subprocess.Popen(["sleep", "1000"], process_group=0)
        with log.open("a") as file:
            file.write("hangs" + chr(10))
        time.sleep(1000)
    sys.exit(1 if {broken!r} in what else 0)
os.execv({python!r}, [{python!r}, *words])
"""


def started(folder, no_cuda=0, missing=(), broken="nothing that is asked for", hangs="no part", **more):
    """Start the script with the recorder."""
    log, python = folder / "log", folder / "python"
    log.touch()
    python.write_text(
        RECORDER.format(
            python=sys.executable,
            log=str(log),
            no_cuda=no_cuda,
            missing=list(missing),
            broken=broken,
            hangs=hangs,
        )
    )
    python.chmod(0o755)
    env = {**os.environ, "PYTHON": str(python), "HOME": str(folder), **more}
    return subprocess.Popen(
        ["bash", str(SCRIPT), str(folder / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


def scripted(folder, **options):
    """Run the script with the recorder; return what it did, what it asked for, and its summary."""
    with started(folder, **options) as process:
        stdout, stderr = process.communicate()
    assert not stderr
    done = subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)
    asked = (folder / "log").read_text().splitlines()
    return done, asked, json.loads((folder / "out" / "summary.json").read_text())


def test_the_script_does_everything_and_sums_it_up(tmp_path):
    done, asked, summary = scripted(tmp_path)
    assert done.returncode == 0, done.stdout
    parts = [line.split("/out/")[1].split(".json")[0] for line in asked if "--output" in line]
    backends = [line.split()[0] for line in asked[:3]]
    assert backends == ["triton", "torch", "fbgemm"]
    assert parts == [
        *(f"conformance-{name}" for name in backends),
        *("checks", "tables", "backward", "dense", "sparse"),
    ]
    assert all("--device cuda" in line for line in asked if "keyedopt.cli.main" in line)
    measured = [re.search(r", \.([a-z:]+)\.\\\)", line)[1] for line in asked if "-m asv run" in line]
    assert measured == ["fused:triton", "torch", "fbgemm", "torchrec"]
    assert summary["missing"] == []
    assert (summary["cut_short"], summary["interrupted"]) == ([], False)
    assert summary["conformance"] == {f"conformance-{name}": {"pass": 1} for name in sorted(backends)}
    (ratio,) = summary["ratios"]
    assert (ratio["ratio"], ratio["workloads"]) == (pytest.approx(4.0), 4)
    assert "train-sgd                    torch         4.00 x over 4 workloads, publishable\n" in done.stdout
    assert "graph                        SGD                  failed: other bits" in done.stdout


@pytest.mark.parametrize("there", [True, False])
def test_the_script_uses_kernels_that_were_compiled_ahead(tmp_path, there):
    archive = tmp_path / "kernels.tar.gz"
    if there:
        archive.touch()
    done, *_ = scripted(tmp_path, KERNELS=str(archive))
    assert done.returncode == 0, done.stdout
    assert ("kernels.tar.gz fits" in done.stdout) is there
    assert ("kernels.tar.gz: missing, so kernels are compiled here" in done.stdout) is not there
    assert f"kernels compiled ahead: {int(there)}, here: 1\n" in done.stdout


def test_without_cuda_the_script_goes_on_with_the_cpu(tmp_path):
    done, asked, summary = scripted(tmp_path, no_cuda=1)
    assert done.returncode == 2
    assert "cuda: torch cannot use it here; going on with the CPU" in done.stdout
    assert [line.split()[0] for line in asked] == ["native", "torch", "fbgemm", *"-----"]
    assert all("--device cpu" in line for line in asked if "keyedopt.cli.main" in line)
    assert "bench" in asked[3]
    assert all("-m asv run" in line for line in asked[4:])
    assert "fused:native" in asked[4]
    assert summary["missing"] == ["cuda"]


def test_what_is_missing_costs_itself_alone(tmp_path):
    missing = ("import triton", "import fbgemm_gpu", "import torchrec", "import asv")
    done, asked, summary = scripted(tmp_path, missing=missing)
    assert done.returncode == 0
    assert summary["missing"] == ["triton", "fbgemm", "torchrec", "asv"]
    for name in summary["missing"]:
        assert f"{name}: missing; going on without" in done.stdout
    assert [line.split()[0] for line in asked] == ["torch", *"-----"]
    assert all("--against torch " in line for line in asked if " bench " in line)


def test_a_part_that_breaks_is_named_and_the_rest_goes_on(tmp_path):
    done, asked, _ = scripted(tmp_path, broken="/out/backward.json")
    assert done.returncode == 1
    assert f"backward: exit code 1; the output is in {tmp_path}/out/backward.txt" in done.stdout
    assert any("dense.json" in line for line in asked)


def test_a_summary_of_nothing_and_of_broken_files(tmp_path):
    (tmp_path / "cut.json").write_text('{"rows": [')
    found = gpu_summary.summary(tmp_path, ["cuda"])
    assert found["broken"] == ["cut.json"]
    assert (found["ratios"], found["checks"], found["asv"]) == ([], [], [])
    assert gpu_summary.lines(found) == ["missing: cuda", "cannot be read: cut.json"]


def test_the_limits_of_the_script_are_within_ten_minutes():
    text = SCRIPT.read_text()
    assert int(re.search(r"BUDGET:-(\d+)", text)[1]) <= 600
    parts = [int(limit) for limit in re.findall(r"^(?:conformance|speeds) \S+ (\d+)", text, re.M)]
    assert len(parts) == 3
    parts += [int(limit) for limit in re.findall(r"^    speeds (?!usual)\w+ (\d+)", text, re.M)]
    parts += [int(limit) for limit in re.findall(r"part checks (\d+)", text)]
    assert len(parts) == 8
    assert sum(parts) <= 570, "what comes after them has time, too"


def test_what_there_is_no_time_for_is_said(tmp_path):
    done, asked, summary = scripted(tmp_path, BUDGET="0")
    assert (done.returncode, asked) == (1, [])
    for part in ("conformance-triton", "checks", "tables", "sparse", "asv-torch"):
        assert f"{part}: no time is left" in done.stdout
    assert (summary["ratios"], summary["conformance"]) == ([], {})


def test_a_script_that_is_killed_keeps_what_it_has_and_leaves_nothing_running(tmp_path):
    with started(tmp_path, hangs="/out/backward.json", **mark("gpu")) as process:
        while "hangs" not in (tmp_path / "log").read_text().splitlines():
            assert process.poll() is None
            time.sleep(0.05)
        assert json.loads((tmp_path / "out" / "summary.json").read_text())["ratios"], "at any time"
        process.send_signal(signal.SIGTERM)
        stdout, stderr = process.communicate()
    assert (process.returncode, stderr) == (2, "")
    assert not left_behind("gpu")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["interrupted"]
    assert [(row["task"], row["workloads"]) for row in summary["ratios"]] == [("train-sgd", 2)]
    assert "interrupted: these are the results so far" in stdout
    assert "dense.json" not in (tmp_path / "log").read_text(), "nothing more is begun"


def test_a_part_that_is_cut_short_is_counted_and_named(tmp_path):
    row = {
        "task": "train-sgd",
        "peer": "torch",
        "ratio": 2.0,
        "matches": True,
        "status": "unverified: busy machine",
    }
    partial = {"complete": False, "environment": {"device": "cpu"}, "rows": [row]}
    (tmp_path / "usual.partial.json").write_text(json.dumps(partial))
    head = result(complete=False).to_dict() | {"cases": []}
    case = dataclasses.asdict(result({}).cases[0])
    (tmp_path / "conformance-torch.json.journal").write_text(f"{json.dumps(head)}\n{json.dumps(case)}\n")
    found = gpu_summary.summary(tmp_path, [])
    assert found["cut_short"] == ["usual.partial", "conformance-torch.partial"]
    assert found["environment"] == {"device": "cpu"}
    assert found["conformance"] == {"conformance-torch.partial": {"pass": 1}}
    assert gpu_summary.lines(found)[-1].endswith("2.00 x over 1 workloads, unverified: busy machine")
    assert gpu_summary.lines(found)[:2] == ["cut short: usual", "cut short: conformance-torch"]


def test_results_of_an_earlier_run_are_not_mixed_in(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "usual.json").write_text("{}")
    with started(tmp_path) as process:
        stdout, stderr = process.communicate()
    assert (process.returncode, stdout) == (2, "")
    assert stderr == f"{tmp_path}/out holds results of an earlier run: name another folder\n"
    assert (tmp_path / "log").read_text() == ""


def test_fbgemm_without_cuda_kernels_is_said_on_a_gpu_host(tmp_path):
    pytest.importorskip("fbgemm_gpu", reason="FBGEMM is in the extra `cpu`")
    missing = re.search(r'has "(import fbgemm_gpu; .*?)"', SCRIPT.read_text(), re.S)[1]
    done, asked, summary = scripted(tmp_path, missing=[missing])
    assert summary["missing"] == ["fbgemm"]
    assert "fbgemm: there, but for the CPU alone; going on without" in done.stdout
    assert all("--against torch,torchrec " in line for line in asked if " bench " in line)
