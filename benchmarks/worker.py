"""A process that holds one job at a time and runs it when it is told to: one of the sides of a comparison.

``python -m keyedopt.benchmarks.worker THREADS TREE`` reads a command a line from stdin, as JSON, and
answers with a line on stdout: ``["start", implementation, workload, task, device, file]`` makes the job,
warms it up, writes what it has changed to a file if one is named, and answers ``""``, or why it cannot;
``["time", seconds]`` runs it until that time is over, at least once, and answers with the seconds of each
run. TREE is where `keyedopt` must have come from: a package that is installed elsewhere must not be measured
in its stead.
"""

import gc
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from keyedopt.benchmarks import tasks
from keyedopt.benchmarks.compare import start
from keyedopt.benchmarks.peers import OWN_WAY
from keyedopt.benchmarks.sides import MEASURED
from keyedopt.benchmarks.tasks import TASKS
from keyedopt.benchmarks.timing import Clock, CudaClock, Job, ProcessorClock, once
from keyedopt.benchmarks.workloads import WORKLOADS
from keyedopt.conformance.results.untrusted import error_text, one_line
from keyedopt.conformance.targets.implementation import find

#: Seconds of the clock after which a job is warm.
WARM = 0.1


def clock_of(device: str) -> Clock:
    """Return the clock of sides on a device: what only waits, processor time does not see."""
    return CudaClock() if torch.device(device).type == "cuda" else ProcessorClock()


class Worker:
    """What a worker does, command by command."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.clock: Clock | None = None

    def start(self, target: str, work_name: str, task_name: str, device: str, file: str) -> str:
        """Make a job; return why not, if it cannot be made."""
        self.job = None
        gc.collect()
        gc.freeze()  # so that collections, from here on, are of what jobs leave, not of all modules
        try:
            work, task = WORKLOADS[work_name], TASKS[task_name]
            self.clock = clock_of(device)
            about = find(target)
            maker, surface = OWN_WAY.get(about.name, tasks.make), about.surface()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = start(lambda: maker(surface, task, work, device), self.clock, WARM)
        except Exception as error:
            return one_line(error_text(error), 300)
        if file:
            torch.save({"before": made.before, "after": made.after}, file)
        self.job = made.job
        return ""

    def time(self, seconds: float) -> list[float]:
        """Run the job for some time; return the seconds of each run."""
        assert self.job
        assert self.clock
        times: list[float] = []
        while not times or sum(times) < seconds:
            times.append(once(self.clock, self.job))
        return times


def strangers(tree: Path) -> Iterator[str]:
    """Yield the modules of what is measured that were not imported from a tree."""
    for part in MEASURED:
        folder = (tree / "keyedopt" / part).resolve()
        for name, module in list(sys.modules.items()):
            if name == f"keyedopt.{part}" or name.startswith(f"keyedopt.{part}."):
                file = getattr(module, "__file__", None)
                if file and folder not in Path(file).resolve().parents:
                    yield name


def main() -> None:
    """Do what the lines on stdin say."""
    torch.set_num_threads(int(sys.argv[1]))
    tree = Path(sys.argv[2])
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever an implementation prints
    worker = Worker()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        answer: Any = getattr(worker, command)(*arguments)
        strange = next(strangers(tree), "") if command == "start" else ""
        if strange:
            answer = f"{strange} is not that of the build"
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
