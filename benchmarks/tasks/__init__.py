"""Tasks: what an implementation does with a workload.

A task makes a `Job` from a workload and the public surface of an implementation. Peers with another API have
makers of their own in `keyedopt.benchmarks.peers`. Tasks use only public names of keyedopt, so that they can
measure old commits.
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
    """Return the job of a task through the public surface of an implementation.

    Raises:
        NotOffered: the implementation lacks a name.
    """
    return task.maker(surface, task, work, device)
