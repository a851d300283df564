"""Replica groups on this machine: processes that train with torchft's own managers, and their lighthouse."""

import functools
import importlib
import itertools
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from keyedopt.conformance.suite.support.assertions import Late, Mismatch
from keyedopt.conformance.suite.support.described import CannotRun
from keyedopt.conformance.suite.support.rank_processes import LATE, RankProcess, wait_for
from keyedopt.conformance.suite.support.ranks import limit_of_ranks

#: The parts of the time limit of ranks (20 s by default) that a group may be silent before others go on
#: without it, be it in an all-reduce or between steps, and that a request may take.
PATIENCE_OF_GROUPS, LONGEST_REQUEST = 0.1, 1.25
#: Where all groups begin.
FIRST_WEIGHTS = [1.0, -2.0, 3.0]


def need_torchft() -> None:
    """Import torchft in the process that forks the groups, or make the case unsupported."""
    try:
        for name in ("torchft.manager", "torch._dynamo"):  # the first step of an optimizer needs the second
            importlib.import_module(name)
    except ImportError as error:
        raise CannotRun(f"torchft cannot be imported: {error}") from None


class Groups:
    """A lighthouse and replica groups of one process each, which end with the block.

    Args:
        impl: has `FaultTolerantOptimizer`.
        build: returns the wrapped optimizer of a parameter.
    """

    def __init__(self, impl: Any, build: Callable[[Any], Any]) -> None:
        self._impl, self._build, self._running = impl, build, list[RankProcess]()
        self._names = itertools.count()

    def __enter__(self) -> "Groups":
        self._address = self.answers([self._fork(_serve_lighthouse)])[0]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            process.kill()
            process.end()

    def start(self, number: int = 1) -> list[RankProcess]:
        """Start groups; the lighthouse knows them before this returns, or others would go on without them."""

        def serve(process: RankProcess) -> None:
            torch.set_num_threads(1)
            group = _Group(self._impl, self._build, self._address, process.number)
            for command, _ in process.requests():
                process.answer(_tried(functools.partial(group.obey, *command)))

        started = [self._fork(serve) for _ in range(number)]
        self.ask(("appear",), *started)
        return started

    def ask(self, command: tuple[Any, ...], *groups: RankProcess) -> list[Any]:
        """Have groups obey a command at the same time, and return what they say."""
        for group in groups:
            self.send(command, group)
        return self.answers(groups)

    def send(self, command: tuple[Any, ...], group: RankProcess) -> None:
        """Have a group obey a command, and do not wait for it."""
        group.request(command, ())

    def lives(self, group: RankProcess) -> bool:
        """Whether a group that is to end has not ended yet.

        Raises:
            Mismatch: it has obeyed a command that it should not survive.
        """
        wait_for([group], 0.0)
        if group.running:
            return True
        outcome = group.outcome()
        if outcome != ("ended", "killed by signal 9"):
            raise Mismatch("a group that is killed while it heals", f"group {group.number}: {outcome}")
        return False

    def answers(self, groups: Sequence[RankProcess]) -> list[Any]:
        """Wait for what groups say to the commands that they were sent.

        Raises:
            Mismatch: a group failed, or said nothing in time (`Late`).
        """
        wait_for(groups, LONGEST_REQUEST * limit_of_ranks())
        outcomes: list[Any] = [
            (LATE if group.late else "hung in", group.where()) if group.running else group.outcome()
            for group in groups
        ]
        for group, (kind, value) in zip(groups, outcomes, strict=True):
            if kind != "result":
                raised = Late if kind == LATE else Mismatch
                raise raised("each replica group to go on", f"group {group.number} {kind} {value}")
        return [value for _, value in outcomes]

    def _fork(self, serve: Callable[[RankProcess], None]) -> RankProcess:
        self._running.append(RankProcess(next(self._names), serve))
        return self._running[-1]


def _serve_lighthouse(process: RankProcess) -> None:
    native: Any = importlib.import_module("torchft._torchft")
    server = native.LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=10_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=int(1000 * PATIENCE_OF_GROUPS * limit_of_ranks()),
    )
    # The server's own name for itself may be one that only its machine's network can resolve.
    process.answer(("result", f"http://127.0.0.1:{server.address().rpartition(':')[2]}"))
    signal.pause()


def _tried(call: Callable[[], Any]) -> Any:
    try:
        return "result", call()
    except BaseException as error:
        return "raised", f"{type(error).__name__}: {error}"


class _Group:
    """A replica group of one process: a parameter, its optimizer, and torchft's manager."""

    def __init__(self, impl: Any, build: Callable[[Any], Any], lighthouse: str, number: int) -> None:
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._falls, self._number, self._lighthouse = False, number, lighthouse
        self._param: Any = torch.nn.Parameter(torch.tensor(FIRST_WEIGHTS))
        self._inner = build(self._param)
        distributed: Any = torch.distributed
        self._store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        limit = timedelta(seconds=LONGEST_REQUEST * limit_of_ranks())
        self._manager = Manager(
            pg=ProcessGroupGloo(timeout=timedelta(seconds=PATIENCE_OF_GROUPS * limit_of_ranks())),
            min_replica_size=1,
            state_dict=lambda: {"p": self._param.detach().clone(), "optim": self._inner.state_dict()},
            load_state_dict=self._load,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse,
            hostname="127.0.0.1",
            replica_id=f"group_{number}",
            init_sync=False,  # all begin alike
            timeout=limit,
            quorum_timeout=limit,
            connect_timeout=limit,
        )
        self._optimizer = impl.FaultTolerantOptimizer(self._manager, self._inner)

    def obey(self, command: str, *arguments: Any) -> Any:
        """Carry out a command: the name of a method below, without its underscore."""
        return getattr(self, f"_{command}")(*arguments)

    def _load(self, saved: dict[str, Any]) -> None:
        if self._falls:
            os.kill(os.getpid(), signal.SIGKILL)
        self._param.data.copy_(saved["p"])
        self._optimizer.load_state_dict(saved["optim"])

    def _appear(self) -> None:
        """Wait until the lighthouse has heard of this group."""
        while True:
            with urllib.request.urlopen(f"{self._lighthouse}/status", timeout=10) as status:
                if f"group_{self._number}:" in status.read().decode():
                    return
            time.sleep(0.02)

    def _run(self, until: int) -> list[dict[str, Any]]:
        """Train until this many steps are committed, and return what each attempt did."""
        attempts = []
        while self._manager.current_step() < until:
            attempts.append(self._attempt())
        return attempts

    def _meet(self, groups: int) -> list[dict[str, Any]]:
        """Train until a step is committed in which so many groups take part."""
        attempts = [self._attempt()]
        while not attempts[-1]["committed"] or attempts[-1]["participants"] < groups:
            attempts.append(self._attempt())
        return attempts

    def _attempt(self) -> dict[str, Any]:
        self._begin()
        before, first = self._contents(), self._manager.current_step()
        self._manager.allreduce(self._param.grad).wait()
        participants, step = self._manager.num_participants(), self._manager.current_step()
        grad = self._param.grad.clone()
        self._optimizer.step()
        return {
            "step": step,
            "committed": self._manager.current_step() == step + 1,
            "participants": participants,
            "healed": step != first,  # what it had is replaced while the manager is asked
            "grad": grad,
            "kept": torch.equal(grad, self._param.grad),
            "unchanged": before == self._contents(),
        }

    def _begin(self) -> None:
        """Begin a step with a gradient of this group."""
        self._optimizer.zero_grad()
        draw = torch.Generator().manual_seed(100 * self._number + self._manager.current_step())
        self._param.grad = torch.randn(len(FIRST_WEIGHTS), generator=draw)

    def _die(self) -> None:
        """Be killed in the middle of a step, between quorum and all-reduce."""
        self._begin()
        self._manager.wait_quorum()
        os.kill(os.getpid(), signal.SIGKILL)

    def _hang(self) -> None:
        """Stop in the middle of a step, until somebody kills this process."""
        self._begin()
        self._manager.wait_quorum()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _fall(self) -> None:
        """Be killed in the load with which this group heals."""
        self._falls = True
        self._attempt()

    def _contents(self) -> dict[str, Any]:
        return contents_of(self._param, self._optimizer)


def expect_together(attempts: Sequence[dict[str, Any]], groups: int) -> None:
    """Expect so many living groups in each committed step.

    Raises:
        Late: a group was silent for too long, so others went on without it.
    """
    seen = [attempt["participants"] for attempt in attempts if attempt["committed"]]
    if any(number < groups for number in seen):
        raise Late(f"{groups} groups in each step", seen)


def contents_of(param: torch.Tensor, optimizer: Any) -> dict[str, Any]:
    """Return the weights, state and learning rates as lists of numbers."""
    saved = optimizer.state_dict()
    rates = [group["lr"] for group in optimizer.param_groups]
    return {"p": param.tolist(), "state": _numbers_of(saved["state"]), "lr": rates}


def _numbers_of(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers_of(one) for key, one in value.items()}
    return torch.as_tensor(value).tolist()
