"""Stage 5: tables beside FBGEMM and torch, kernel times, host times and launches of a step."""

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from keyedopt.benchmarks import compare, resources, tasks
from keyedopt.benchmarks.gpu import model
from keyedopt.benchmarks.gpu.stage import Context
from keyedopt.benchmarks.peers import OWN_WAY
from keyedopt.benchmarks.tasks import TASKS, Task
from keyedopt.benchmarks.timing import Budget, Job, clock_of
from keyedopt.benchmarks.workloads import WORKLOADS, Lookups, Workload
from keyedopt.conformance.results.untrusted import error_text, one_line
from keyedopt.conformance.targets.find import find
from keyedopt.conformance.targets.implementation import TargetError

#: The tasks of the workloads of the model, first in the form of torchrec's models: FBGEMM is a peer of all,
#: torch of Adagrad.
TABLES = ("train_joined-rowwise_adagrad", "train_joined-adagrad", "train-rowwise_adagrad")
#: What is measured if time is left: workloads with their tasks.
MORE = (
    (("small-step", "500-tiny-tables"), ("train-rowwise_adagrad",)),
    (("8x200k-zipf", "8x200k-uniform"), ("train-sgd", "train-adam", "backward-adam")),
    (("all-the-same-row", "all-distinct"), ("backward-rowwise_adagrad",)),
    (("tower-24m",), ("clip-adam",)),
    (("10k-parameters",), ("state",)),
    (("sparse-zipf", "sparse-uniform"), ("sparse-adam",)),
)
PEERS = ("fbgemm", "torch")
#: Of one comparison.
BUDGET = Budget(seconds=0.5, warmup=0.1, least=4)
#: Numbers of tables of which the host time of a step is measured.
COUNTS = (8, 26, 500)
#: Bags of each table in the comparison of sorts, and the most keys that `radix` sorts in each.
BATCHES = (1024, 4096, 8192)
SORTS = {"radix": 1 << 28, "torch": 0}
#: Steps that are timed together, and how often.
STEPS, ROUNDS = 10, 9
#: Steps that are profiled, and the lines of the profile that are kept.
PROFILED, LINES = 100, 45


def pairs() -> list[tuple[Workload, Task]]:
    """Return the workloads and tasks in the order in which they are measured."""
    found: list[tuple[Workload, Task]] = [(work, TASKS[t]) for t in TABLES for work in model.workloads()]
    for works, names in MORE:
        found += compare.chosen(works, names)
    return found


def run(context: Context) -> None:
    """Save comparisons, the times of kernels, and host times, after each."""
    found: dict[str, Any] = {"reports": [], "kernels": {}, "host": []}
    listed, left_out = implementations()
    found["left_out"] = left_out
    clock = clock_of(context.device)
    chosen = [(WORKLOADS["small-step"], TASKS["train-adagrad"])] if context.small else pairs()
    budget = Budget(0.05, warmup=0.0, least=2, most=4) if context.small else BUDGET
    host(context, found)
    sorts(context, found)
    for number, pair in enumerate(chosen):
        if context.left() < 2:
            found["left_out"].append(
                "no time left for " + ", ".join(f"{w.name} {t.name}" for w, t in chosen[number:])
            )
            break
        report = compare.compare(listed, [pair], context.device, budget, clock)
        found["reports"].append(report.to_dict())
        context.save(found)
        work, task = pair
        if isinstance(work, Lookups) and task.name in TABLES[:1]:
            found["kernels"][work.name] = kernels_of(listed, work, task, context.device)
            context.save(found)
    context.save(found)


def implementations() -> tuple[list[tuple[Any, Any]], list[str]]:
    """Return `fused` and those of its peers that can be imported, and why others cannot."""
    ours, left_out = find("fused"), []
    listed = [(ours, ours.surface())]
    for name in PEERS:
        try:
            peer = find(name)
            listed.append((peer, peer.surface()))
        except TargetError as error:
            left_out.append(f"{name}: {error}")
    return listed, left_out


def jobs(listed: list[tuple[Any, Any]], work: Workload, task: Task, device: str) -> Iterator[tuple[str, Any]]:
    """Yield the job of each implementation that offers the task, or the reason why it does not."""
    for about, surface in listed:
        try:
            made = OWN_WAY.get(about.name, tasks.make)(surface, task, work, device)
            for _ in range(3):
                made.prepare()
                made.run()
            yield about.name, made
        except Exception as error:  # a peer that fails costs only its own line
            yield about.name, one_line(error_text(error), 200)


def kernels_of(listed: list[tuple[Any, Any]], work: Workload, task: Task, device: str) -> dict[str, Any]:
    """Return the seconds of each kernel of a step of the implementations, by name."""
    found: dict[str, Any] = {}
    for name, job in jobs(listed, work, task, device):
        found[name] = job
        if isinstance(job, Job):
            job.prepare()
            found[name] = resources.kernel_times(job.run, device)
    return found


def host(context: Context, found: dict[str, Any]) -> None:
    """Save host times and launches of a step for several numbers of tables."""
    listed, _ = implementations()
    for count in COUNTS[:1] if context.small else COUNTS:
        name = f"{count} tables"
        work = replace(WORKLOADS["small-step"], name=name, tables=count)  # type: ignore[arg-type]
        for who, job in jobs(listed[:2], work, TASKS[TABLES[0]], context.device):
            row: dict[str, Any] = {"tables": count, "implementation": who}
            if isinstance(job, Job):
                row["seconds"] = host_seconds(job, context.device)
                job.prepare()
                row["launches"] = resources.launches(job.run, context.device)
                if who == "fused":
                    row["profile"] = profile_of(job)
            else:
                row["why"] = job
            found["host"].append(row)
            context.save(found)


def sorts(context: Context, found: dict[str, Any]) -> None:
    """Save the seconds of the kernels of a step in which `radix` sorts, and of one in which torch does."""
    if torch.device(context.device).type != "cuda":
        return
    found["sorts"] = []
    for batch in BATCHES:
        work = replace(model.LARGE, name=f"{batch} bags", batch=batch)
        for who in SORTS:
            with sorting_by(who):
                of_step = kernels_of(implementations()[0][:1], work, TASKS[TABLES[0]], context.device)
            keys = batch * work.tables * work.lengths[0]
            found["sorts"].append({"keys": keys, "sort": who, "kernels": of_step["fused"]})
            context.save(found)


def sorting_by(who: str) -> AbstractContextManager[Any]:
    """Return a context in which the Triton backend sorts by one of `SORTS`."""
    return patch("keyedopt.fused.backends.triton.lookup_batch.MOST_KEYS", SORTS[who])


def profile_of(job: Job) -> list[str]:
    """Return the functions that take most of the host time of some steps, as lines of `pstats`."""
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):  # the profiler sees only this thread
        for _ in range(PROFILED):
            job.prepare()
            profile.runcall(job.run)
    text = io.StringIO()
    pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(LINES)
    return text.getvalue().splitlines()


def host_seconds(job: Job, device: str, now: Callable[[], float] = time.perf_counter) -> float:
    """Return the time of a step until its calls return, without waiting for the device.

    A few steps fit into the queue of the device, so the host never waits for it.
    """
    times = []
    for _ in range(ROUNDS):
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        begin = now()
        for _ in range(STEPS):
            job.prepare()
            job.run()
        times.append((now() - begin) / STEPS)
    return statistics.median(times)
