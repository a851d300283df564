"""Real ranks: forks of this process that form a process group, with a time limit.

This process has imported torch and the implementation, so ranks start in milliseconds. Most of the time of a
case is DTensor's: it derives the sharding of each new operation in each process. So ranks can be kept for the
next case. Under torchrun each of its processes forks its own rank of the case, after all have come to the
case. No rank listens on a fixed port or writes a file; ranks end with this process, however it ends.
"""

import contextlib
import datetime
import functools
import hashlib
import importlib
import inspect
import os
import select
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import Late, Mismatch
from keyedopt.conformance.suite.support.clock import BACKSTOP
from keyedopt.conformance.suite.support.described import CannotRun, MissingName
from keyedopt.conformance.suite.support.device import choose_device, the_device
from keyedopt.conformance.suite.support.rank_processes import LATE, RankProcess, StoreFile, wait_for
from keyedopt.conformance.suite.support.scratch import scratch_folder
from keyedopt.conformance.suite.support.torchrun import (
    PATIENCE,
    meet,
    processes,
    store,
    this_process,
    under_torchrun,
)

#: What most ranks import: once in this process, not in each fork.
_SLOW_IMPORTS = ("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "fsspec")
_NUMBER_OF_RANKS = [2]
_LIMIT = [20.0]  # seconds that the ranks of a case may take
_CASE: list[Any] = ["", 0]  # the case that runs, and how often it has started ranks or made a folder
_REPLACED: list[Callable[[], str]] = []  # each names a function that the implementation has replaced
_AROUND: list[Callable[[], contextlib.AbstractContextManager[None]]] = [contextlib.nullcontext]
_KEPT: dict[int, "_KeptRanks"] = {}  # by their number


def the_ranks() -> int:
    """Return the number of ranks of each case."""
    return processes() if under_torchrun() else _NUMBER_OF_RANKS[0]


def choose_ranks(ranks: int) -> None:
    """Set the number of ranks of each case."""
    _NUMBER_OF_RANKS[0] = ranks


def limit_ranks(seconds: float) -> None:
    """Set the seconds that the ranks of a case may take."""
    _LIMIT[0] = seconds


def limit_of_ranks() -> float:
    """Return the seconds that the ranks of a case may take."""
    return _LIMIT[0]


def why_no_ranks(device: torch.device, more: int = 0) -> str:
    """Return why a case cannot run on ranks of a type of device, or an empty string.

    Each rank has a device of its own: NCCL refuses two ranks on one GPU.

    Args:
        device: the device under test.
        more: how many more ranks than asked for the case starts.
    """
    if device.type == "cpu":
        return ""
    if device.type not in torch.distributed.Backend.default_device_backend_map:
        return f"torch.distributed has no backend for {device.type}"
    ranks = int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else the_ranks() + more
    count = torch.get_device_module(device).device_count()
    return f"{ranks} ranks need {ranks} devices {device.type}; here are {count}" if ranks > count else ""


def begin_case(name: str, around: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Note the case that begins, so that all processes of torchrun have one name for what it starts.

    Args:
        name: the case.
        around: returns what undoes the settings that a case may change, in ranks that are kept.
    """
    _CASE[:] = [name, 0]
    _AROUND[:] = [around]


def inspect_ranks(replaced: Callable[[], str]) -> None:
    """Call a function at the end of each rank, which fails if the function returns a name."""
    _REPLACED.append(replaced)


def _next_name() -> str:
    _CASE[1] += 1
    return f"{_CASE[0]} {_CASE[1]}"


def on_ranks(
    body: Callable[..., Any], *arguments: Any, ranks: int | None = None, limit: float | None = None
) -> list[Any]:
    """Call a function on each rank, and return the results in the order of the ranks.

    Args:
        body: runs with an initialized default group.
        arguments: its arguments, the same on each rank.
        ranks: the number of ranks; without it `the_ranks`. Under torchrun it is the number of processes.
        limit: seconds until ranks that still run are killed; without it those of `limit_ranks`.

    Raises:
        Mismatch: names each rank that failed, and how: by an error, by a signal, or where it hung; `Late` if
            ranks reached the limit.
    """
    limit = _LIMIT[0] if limit is None else limit
    size = the_ranks() if ranks is None or under_torchrun() else ranks
    _import_what_ranks_need()
    run = _next_name()
    numbers: Sequence[int] = range(size)
    if under_torchrun():
        numbers = [this_process()]
        if absent := meet(run, max(PATIENCE, _LIMIT[0])):
            raise Mismatch(f"all {size} ranks to begin", absent)
    file = StoreFile()
    started: list[RankProcess] = []
    try:
        for number in numbers:
            join = functools.partial(_join, file.path, number, size, limit, run)
            started.append(RankProcess(number, functools.partial(_answer_once, join, body, arguments)))
        wait_for(started, limit, together=not under_torchrun())
    finally:
        outcomes = [rank.end() for rank in started]
        file.close()
    return _results(outcomes, size)


def on_each_rank(case: Callable[..., None]) -> Callable[..., None]:
    """Run a case on each rank, on ranks and a default group that are kept for the next case if none fails.

    A case that needs fresh ranks calls `on_ranks`. Under torchrun ranks are not kept.
    """

    @functools.wraps(case)
    def run(impl: Any, **inputs: Any) -> None:
        if under_torchrun():
            on_ranks(_run_case, impl, run, inputs)
        else:
            _import_what_ranks_need()
            _on_kept_ranks(impl, run, inputs)

    return run


def _run_case(impl: Any, case: Callable[..., None], inputs: dict[str, Any]) -> None:
    inspect.unwrap(case)(impl, **inputs)


def _on_kept_ranks(impl: Any, case: Callable[..., None], inputs: dict[str, Any]) -> None:
    """Run a case on kept ranks; if it fails there, on new ones, because an earlier case may be the cause."""
    kept = _KEPT.pop(the_ranks(), None)
    outcomes: list[Any] = []
    if kept is not None and kept.can_serve(impl):
        outcomes = _call_on(kept, case, inputs)
    elif kept is not None:
        kept.end()
    # a second hang would take as long again
    if not outcomes or not {outcome[0] for outcome in outcomes} <= {"result", "hung", "late"}:
        outcomes = _call_on(_KeptRanks(impl, the_ranks()), case, inputs)
    _results(outcomes, the_ranks())


def _call_on(ranks: "_KeptRanks", case: Callable[..., None], inputs: dict[str, Any]) -> list[Any]:
    """Call a case on ranks, keep them if it holds, end them otherwise, and return the outcomes."""
    outcomes: list[Any] = []
    try:
        outcomes = ranks.call(_run_case, (case, inputs))
    finally:
        if outcomes and all(outcome[0] == "result" for outcome in outcomes):
            _KEPT[the_ranks()] = ranks
        else:
            outcomes = ranks.end()
    return outcomes


def end_kept_ranks() -> None:
    """End the ranks that wait for another case; they end with this process otherwise."""
    while _KEPT:
        _KEPT.popitem()[1].end()


def _import_what_ranks_need() -> None:
    for name in _SLOW_IMPORTS:
        importlib.import_module(name)


@contextlib.contextmanager
def common_folder() -> Iterator[str]:
    """Return a folder for all ranks, also for those of torchrun on one machine; it is removed afterwards."""
    name = ""
    if under_torchrun():
        job = [os.environ[f"TORCHELASTIC_{part}"] for part in ("RUN_ID", "RESTART_COUNT")]
        text = " ".join([*job, os.environ["MASTER_PORT"], _next_name()])
        name = hashlib.sha256(text.encode()).hexdigest()[:16]
    with scratch_folder(name) as folder:
        (folder / "files").mkdir(exist_ok=True)
        yield str(folder / "files")


def _join(file: str, number: int, size: int, limit: float, run: str) -> None:
    """Make the default group of the ranks of a case, each on its own device."""
    distributed: Any = torch.distributed
    seconds = BACKSTOP * limit  # the limit ends a hanging rank first, and says where it was
    if under_torchrun():
        shared = distributed.PrefixStore(run, store(seconds))
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        shared = distributed.FileStore(file, size)
    kind = the_device().type
    if kind != "cpu":
        choose_device(torch.device(kind, int(os.environ.get("LOCAL_RANK", number))))
        torch.get_device_module(kind).set_device(the_device())
    backend = distributed.get_default_backend_for_device(kind)
    timeout = datetime.timedelta(seconds=seconds)
    os.environ["TORCH_DIST_INIT_BARRIER"] = "1"  # or a rank could end while another connects to it
    distributed.init_process_group(backend, store=shared, rank=number, world_size=size, timeout=timeout)
    del os.environ["TORCH_DIST_INIT_BARRIER"]


class _KeptRanks:
    """Ranks of an implementation, which call one function after the other."""

    def __init__(self, impl: Any, size: int) -> None:
        self._impl, self._file = impl, StoreFile()
        joins = [
            functools.partial(_join, self._file.path, number, size, _LIMIT[0], "") for number in range(size)
        ]
        self._ranks = [
            RankProcess(number, functools.partial(_answer_all, join, impl))
            for number, join in enumerate(joins)
        ]

    def can_serve(self, impl: Any) -> bool:
        """Whether these are ranks of the implementation, and all of them still wait for requests."""
        return impl is self._impl and not select.select([rank.process for rank in self._ranks], [], [], 0)[0]

    def call(self, body: Callable[..., Any], arguments: Sequence[Any]) -> list[Any]:
        """Return the outcomes of a function; none if a rank still runs."""
        for rank in self._ranks:
            rank.request(body, arguments)
        wait_for(self._ranks, _LIMIT[0], together=True)
        return [] if any(rank.running for rank in self._ranks) else [rank.outcome() for rank in self._ranks]

    def end(self) -> list[Any]:
        """End all ranks, and return their last outcomes."""
        outcomes = [rank.end() for rank in self._ranks]
        self._file.close()
        return outcomes


def _answer_once(
    join: Callable[[], None], body: Callable[..., Any], arguments: Sequence[Any], rank: RankProcess
) -> None:
    rank.answer(_outcome(join, body, arguments))


def _answer_all(join: Callable[[], None], impl: Any, rank: RankProcess) -> None:
    def call(body: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        with _AROUND[0]():
            found = body(impl, *arguments)
        torch.distributed.barrier()  # nothing that a rank has sent is left for the next function
        return found

    for request in rank.requests():
        started = torch.distributed.is_initialized()
        rank.answer(_outcome((lambda: None) if started else join, call, request))


def _outcome(join: Callable[[], None], body: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Call the function on this rank; under torchrun, return the outcomes of all ranks."""
    torch.set_num_threads(1)  # the threads of the parent are not in this process
    try:
        torch.ones(1, requires_grad=True).backward()
    except RuntimeError as error:  # the threads of autograd are missing, too
        return "unable", str(error)
    if _device_was_used_before_the_fork():
        return "unable", f"a fork cannot use {the_device().type} after its parent has"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            join()
            found: Any = ("result", body(*arguments))
        for name in filter(None, (replaced() for replaced in _REPLACED)):
            found = ("raised", f"an error: {name} was replaced")
    except Mismatch as error:
        found = ("mismatch", (error.expected, error.seen))
    except CannotRun as error:
        found = ("cannot run", str(error))
    except MissingName as error:
        found = ("missing", (str(error.name), str(error)))
    except BaseException as error:  # also an exit of the code under test
        lost = "by peer" in str(error)  # gloo's words; another rank is the cause
        found = ("raised", "a lost connection" if lost else f"{type(error).__name__}: {error}")
    if not under_torchrun():
        return found
    everywhere: list[Any] = [None] * the_ranks()
    try:
        torch.distributed.all_gather_object(everywhere, found)
    except (RuntimeError, ValueError):  # another rank has ended, or there is no group
        return found if found[0] != "result" else ("raised", "a lost connection")
    return "result", everywhere


def _device_was_used_before_the_fork() -> bool:
    module = None if the_device().type == "cpu" else torch.get_device_module(the_device())
    return bool(getattr(module, "_is_in_bad_fork", bool)())


def _results(outcomes: Sequence[Any], size: int) -> list[Any]:
    first = 0
    if under_torchrun() and outcomes[0][0] == "result":
        outcomes = outcomes[0][1]
    elif under_torchrun():
        first = this_process()  # the outcome of this process only
    bad = [(rank, *outcome) for rank, outcome in enumerate(outcomes, first) if outcome[0] != "result"]
    bad.sort(key=lambda one: one[2] == "a lost connection")
    if not bad:
        return [value for _, value in outcomes]
    for _, kind, text in bad:
        if kind == "unable":  # no fault of the implementation
            raise RuntimeError(f"ranks cannot be forked from this process: {text}")
        if kind == "cannot run":
            raise CannotRun(text)
        if kind == "missing":  # which may not be claimed
            raise MissingName(text[1], name=text[0])
    wrong = next((f"rank {rank}: {text[0]}" for rank, kind, text in bad if kind == "mismatch"), "")
    verbs = {"mismatch": "saw", "raised": "raised", "hung": "hung in", "ended": "ended:"}
    verbs["late"] = LATE
    texts = [
        f"rank {rank} of {size} {verbs[kind]} {text[1] if kind == 'mismatch' else text}"
        for rank, kind, text in bad
    ]
    raised = Late if any(kind == "late" for _, kind, _ in bad) else Mismatch
    raise raised(wrong or f"all {size} ranks to end", "; ".join(texts))
