"""A process that holds one job at a time and runs it when it is told to: one side of a comparison of commits.

``python -m keyedopt.benchmarks.worker THREADS FOLDER`` reads a command a line from stdin, as JSON, and
answers with a line on stdout: ``["start", implementation, workload, task, device, file]`` makes the job,
warms it up, writes what it has changed to a file, and answers ``""``, or why it cannot; ``["time"]`` runs
it and answers with the seconds; ``["stop"]`` ends. FOLDER is where the implementations must have come from:
a package that is installed elsewhere must not be measured in their stead.
"""

import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from keyedopt.benchmarks import rounds, tasks
from keyedopt.benchmarks.compare import start
from keyedopt.benchmarks.peers import OWN_WAY
from keyedopt.benchmarks.tasks import TASKS
from keyedopt.benchmarks.timing import Clock, Job
from keyedopt.benchmarks.workloads import WORKLOADS
from keyedopt.conformance.implementation import find
from keyedopt.conformance.text import error_text, one_line


class Worker:
    """What a worker does, command by command."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.clock: Clock | None = None

    def start(self, target: str, work_name: str, task_name: str, device: str, file: str) -> str:
        """Make a job; return why not, if it cannot be made."""
        self.job = None
        gc.collect()
        work, task = WORKLOADS[work_name], TASKS[task_name]
        self.clock = rounds.clock_of(device)
        try:
            about = find(target)
            maker, surface = OWN_WAY.get(about.name, tasks.make), about.surface()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = start(lambda: maker(surface, task, work, device), self.clock, rounds.BUDGET.warmup)
        except Exception as error:
            return one_line(error_text(error), 300)
        torch.save({"before": made.before, "after": made.after}, file)
        self.job = made.job
        return ""

    def time(self) -> float:
        """Run the job once; return the seconds."""
        assert self.job
        assert self.clock
        self.job.prepare()
        return self.clock.time(self.job.run)


def main() -> None:
    """Do what the lines on stdin say."""
    torch.set_num_threads(int(sys.argv[1]))
    folder = Path(sys.argv[2]).resolve()
    answers = sys.stdout
    sys.stdout = sys.stderr  # whatever an implementation prints
    worker = Worker()
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "stop":
            break
        answer: Any = getattr(worker, command)(*arguments)
        strange = [
            name
            for name, module in sys.modules.items()
            if name.startswith(("keyedopt.fused", "keyedopt.reference"))
            and folder not in Path(str(getattr(module, "__file__", None) or folder / "x")).resolve().parents
        ]
        if strange:
            answer = f"{strange[0]} is not that of the commit"
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
