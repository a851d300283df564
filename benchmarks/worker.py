"""The measuring process of `keyedopt.benchmarks.build_process`: it holds one job and runs it on request.

``python -m keyedopt.benchmarks.worker THREADS TREE`` reads commands from stdin, one JSON list a line, and
answers each with a line of JSON on stdout:

- ``["start", implementation, workload, task, device, file, imports]`` makes the job, warms it up, and writes
  its results to `file` if that is not empty. The answer is ``""``, or why the job cannot be made.
- ``["time", seconds]`` runs the job for that long, at least once. The answer lists the seconds of each run.

A job is refused if a module of the measured packages was not imported from TREE, or if none was.
"""

import gc
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from keyedopt.benchmarks import tasks, timing
from keyedopt.benchmarks.commit_builds import measured_packages
from keyedopt.benchmarks.compare import start
from keyedopt.benchmarks.peers import OWN_WAY
from keyedopt.benchmarks.tasks import TASKS
from keyedopt.benchmarks.timing import Clock, Job, ProcessorClock, once
from keyedopt.benchmarks.workloads import WORKLOADS
from keyedopt.conformance.results.untrusted import error_text, one_line
from keyedopt.conformance.targets.find import find

#: Seconds after which a job is warm.
WARM = 0.1


def clock_of(device: str) -> Clock:
    """Return `ProcessorClock`, which does not count waiting, for the CPU, else `timing.clock_of`."""
    return ProcessorClock() if torch.device(device).type == "cpu" else timing.clock_of(device)


class Worker:
    """Executes the commands of the module docstring; a method for each."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.clock: Clock | None = None

    def start(
        self, target: str, work_name: str, task_name: str, device: str, file: str, imports: Sequence[str]
    ) -> str:
        """Make a job; return the reason if that is impossible."""
        self.job = None
        gc.collect()
        gc.freeze()  # later collections look at the garbage of jobs only, not at all modules
        try:
            work, task = WORKLOADS[work_name], TASKS[task_name]
            about = find(target, imports)
            self.clock = clock_of(device)
            maker, surface = OWN_WAY.get(about.name, tasks.make), about.surface()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = start(lambda: maker(surface, task, work, device), self.clock, WARM, device, about)
        except Exception as error:
            return one_line(error_text(error), 300)
        if file:
            torch.save((made.before, made.after), file)
        self.job = made.job
        return ""

    def time(self, seconds: float) -> list[float]:
        """Run the job for some seconds; return the seconds of each run."""
        assert self.job
        assert self.clock
        times: list[float] = []
        while not times or sum(times) < seconds:
            times.append(once(self.clock, self.job))
        return times


def wrong_origin(tree: Path) -> str:
    """Return what is wrong with the origin of the imported modules, or an empty text."""
    found = False
    for package, place in measured_packages(tree).items():
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file and (name == package or name.startswith(f"{package}.")):
                source = Path(file).resolve()
                if source != place and place not in source.parents:
                    return f"{name} was not imported from the build: {source}"
                found = True
    return (
        "" if found else "nothing of the build was imported: the implementation is not part of the repository"
    )


def main() -> None:
    """Execute the commands from stdin."""
    torch.set_num_threads(int(sys.argv[1]))
    tree = Path(sys.argv[2])
    answers = sys.stdout
    sys.stdout = sys.stderr  # an implementation may print
    worker = Worker()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer: Any = getattr(worker, command)(*arguments)
        if command == "start":
            answer = answer or wrong_origin(tree)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
