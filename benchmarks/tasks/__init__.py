"""What is done with a workload, and how any implementation of the surface does it.

A task makes a `Job` of an implementation and a workload. Peers whose way of doing it is not the surface's
have makers of their own in `keyedopt.benchmarks.peers`. Nothing here needs more of keyedopt than the public
names of an implementation, so that old ones can be measured, too.
"""

from typing import Any

from keyedopt.benchmarks.tasks import dense, sparse, state, tables
from keyedopt.benchmarks.tasks.base import NotOffered, Task
from keyedopt.benchmarks.timing import Job
from keyedopt.benchmarks.workloads import Workload

__all__ = ["TASKS", "NotOffered", "Task", "make"]

#: The tasks by name.
TASKS = {task.name: task for task in (*tables.TASKS, *sparse.TASKS, *dense.TASKS, *state.TASKS)}


def make(surface: Any, task: Task, work: Workload, device: str) -> Job:
    """Make a job of an implementation's public names.

    Raises:
        NotOffered: it does not have them.
    """
    return task.maker(surface, task, work, device)
