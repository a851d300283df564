"""Processes that run the code of an implementation: copies of one that has torch, or new ones."""

import os
import signal
import subprocess
import sys

import pytest
from making import CLAUSE, left_behind, mark, module

from keyedopt.conformance.run import protocol, runner
from keyedopt.conformance.run.processes import ProcessError, Processes
from keyedopt.conformance.run.runner import Options, RunError

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=2, spread=True)

#: Each run of these tests begins with a new process.
pytestmark = pytest.mark.usefixtures("cold")

SEEN = """
import os, sys
print("torch._dynamo" in sys.modules, sys.argv[1:], os.getpgid(0) == os.getpid())
"""


@pytest.fixture
def at_start(tmp_path, monkeypatch):
    """Run something at the start of every Python, before anything else."""

    def write(source):
        module(tmp_path / "start", "sitecustomize", source)
        monkeypatch.setenv(
            "PYTHONPATH", f"{tmp_path / 'start'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        )

    return write


@pytest.fixture
def words(tmp_path):
    """Return what a module prints last when it is run, and how it ends."""

    def run(source, *arguments):
        module(tmp_path, "one", source)
        with Processes(tmp_path, [str(tmp_path)]) as processes:
            process = processes.start("one", arguments)
            assert process.wait(60)
            return process.last_words(), process.ending()

    return run


def test_a_process_is_a_copy_of_one_that_has_torch_in_a_group_of_its_own(words):
    assert words(SEEN, "a", "b c") == ("True ['a', 'b c'] True", "exit status 0")


@slow
def test_the_suite_is_collected_once_and_without_the_target(tmp_path):
    module(tmp_path, "one", "import sys; sys.exit('keyedopt.conformance.run.engine' in sys.modules)")
    module(tmp_path, "target", "import sys; from keyedopt.reference import *; print(len(sys.modules))")
    options = Options(clauses=(CLAUSE,))
    with Processes(tmp_path, [str(tmp_path)]) as processes:
        before = processes.start("one", [])
        processes.collect([*runner.pytest_arguments("target", options, tmp_path), "--keyedopt-defer"])
        assert before.code == 0
        channels = [protocol.Channel() for _ in range(2)]
        workers = [processes.start_worker("target", channel.theirs, 60.0) for channel in channels]
        assert [worker.code for worker in workers] == [0, 0]
    assert "target" not in (tmp_path / "server.log").read_text()
    readers = [protocol.Reader(channel.messages, tmp_path) for channel in channels]
    records = [record for reader in readers for record in reader.new(last=True)]
    count = len(readers[0].collected)
    assert count == len(records) == protocol.claimed(tmp_path, count) > 0


@slow
def test_a_file_of_the_suite_that_cannot_be_imported_is_reported(tmp_path):
    with Processes(tmp_path) as processes:
        processes.collect(["--implementation", "x", "--keyedopt-defer", "--pyargs", "not_there"])
        with pytest.raises(ProcessError, match="exit status 4"):
            processes.start_worker("x", protocol.Channel().theirs, 60.0)


@slow
def test_a_worker_of_a_server_with_threads_is_a_new_process(at_start, tmp_path):
    at_start("import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()")
    result = runner.run("reference", Options(clauses=(CLAUSE,), workers=1))
    assert {case.outcome for case in result.cases} == {"pass"}


@slow
@pytest.mark.parametrize(
    "source",
    [
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "import torch; torch._C._cuda_isInBadFork = lambda: True",
    ],
)
def test_where_a_copy_would_not_do_the_process_is_a_new_one(source, at_start, words):
    at_start(source)
    assert words(SEEN, "a", "b c") == ("False ['a', 'b c'] True", "exit status 0")


@slow
def test_processes_do_not_share_what_they_do(tmp_path):
    module(
        tmp_path, "one", "import torch, sys; torch.seen = getattr(torch, 'seen', 0) + 1; sys.exit(torch.seen)"
    )
    with Processes(tmp_path, [str(tmp_path)]) as processes:
        assert [processes.start("one", []).code for _ in range(3)] == [1, 1, 1]
        assert [one.code for one in [processes.start("one", []) for _ in range(3)]] == [1, 1, 1]


@slow
def test_each_ending_is_that_of_its_process(tmp_path):
    module(tmp_path, "one", "import os, sys; os.kill(os.getpid(), int(sys.argv[1]))")
    module(tmp_path, "two", "import sys; print(sys.argv[1]); sys.exit(int(sys.argv[1]))")
    with Processes(tmp_path, [str(tmp_path)]) as processes:
        killed = [processes.start("one", [str(int(number))]) for number in (signal.SIGKILL, signal.SIGTERM)]
        left = [processes.start("two", [str(number)]) for number in (0, 3, 255)]
        assert [process.ending() for process in reversed(left)] == [
            f"exit status {code}" for code in (255, 3, 0)
        ]
        assert [process.ending() for process in killed] == ["killed by SIGKILL", "killed by SIGTERM"]
        assert all(process.ended for process in [*killed, *left])


def test_torch_is_not_needed_to_start_a_process(at_start, words):
    at_start("import sys; sys.modules['torch'] = None")
    assert words("import torch")[0].startswith("ModuleNotFoundError: import of torch halted")


@slow
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import os\nos.kill(os.getppid(), 9)\nimport time; time.sleep(60)", r"\(killed by SIGKILL\)"),
        ("import os\nos.kill(os.getppid(), 9)\nos._exit(0)", r"\(killed by SIGKILL\)"),
    ],
)
def test_who_kills_what_starts_processes_is_found_out_and_ended(source, said, tmp_path, monkeypatch):
    module(tmp_path, "killer", source)
    monkeypatch.setenv("MARKER", mark("killer")["MARKER"])
    with pytest.raises(RunError, match=rf"the process that imports torch and starts the others ended {said}"):
        runner.smoke("killer", path=[str(tmp_path)])
    assert left_behind("killer") == []


@slow
def test_a_run_without_what_starts_processes_ends_and_is_no_pass(tmp_path, monkeypatch):
    source = "import os, sys\nfrom keyedopt.reference import *\n"
    module(tmp_path, "killer", f"{source}if 'smoke' not in sys.argv[0]: os.kill(os.getppid(), 9)")
    monkeypatch.setenv("MARKER", mark("late killer")["MARKER"])
    with pytest.raises(RunError, match=r"the suite could not be run on killer: the process that .*SIGKILL"):
        runner.run("killer", Options(clauses=(CLAUSE,), workers=2), path=[str(tmp_path)])
    assert left_behind("late killer") == []


def test_an_import_of_torch_that_ends_the_interpreter_says_so(at_start, tmp_path):
    at_start("import os, sys\nif 'fork_server' in str(sys.orig_argv): print('no', flush=True); os._exit(9)")
    with Processes(tmp_path) as processes, pytest.raises(ProcessError, match=r"\(exit status 9\): no$"):
        processes.start("this", [])


@slow
def test_processes_end_with_the_one_that_asked_for_them(tmp_path, monkeypatch):
    module(tmp_path, "sleeper", "import time; print('asleep', flush=True); time.sleep(1000)")
    code = (
        "import os, sys, time, pathlib\n"
        "from keyedopt.conformance.run.processes import Processes\n"
        "processes = Processes(pathlib.Path(sys.argv[1]), [sys.argv[1]])\n"
        "both = [processes.start('sleeper', []) for _ in range(2)]\n"
        "log = pathlib.Path(sys.argv[1], 'sleeper.log')\n"
        "while log.read_text().count('asleep\\n') < 2: time.sleep(0.01)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, **mark("sleeper")}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert left_behind("sleeper") == []
