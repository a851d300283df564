"""FaultTolerantOptimizer with torchft's own lighthouse and managers, a replica killed in the middle."""

import importlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from queue import Empty, Queue

import pytest
import torch

REPLICA = Path(__file__).parents[1] / "targets" / "torchft_replica.py"
LIMIT = 180.0  # seconds, for all of it; it takes a tenth of that on a machine that is not shared


@pytest.fixture(scope="module")
def lighthouse():
    """Start torchft's lighthouse on loopback; skip where torchft is not installed, unless it has to be."""
    try:
        native = importlib.import_module("torchft._torchft")
        importlib.import_module("torchft.manager")
    except ImportError as error:
        if os.environ.get("KEYEDOPT_REQUIRE_TORCHFT") == "1":
            raise
        pytest.skip(f"torchft cannot be imported ({error}): pip install 'keyedopt[torchft]'")
    server = native.LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000, heartbeat_timeout_ms=1_000
    )
    # The server's own name for itself may be one that only its machine's network can resolve.
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


class Replica:
    """A replica in a process of its own, and what it says."""

    def __init__(self, lighthouse, name, deadline, wrapper="reference"):
        self.lighthouse, self.name, self.deadline = lighthouse, name, deadline
        self.said = []
        self._lines = Queue()
        self.process = subprocess.Popen(
            [sys.executable, str(REPLICA), lighthouse, name, wrapper],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.log = []
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            if line.startswith("{"):  # torchft logs on the same stream
                self._lines.put(json.loads(line))

    def tell(self, command):
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()

    def hear(self, word):
        """Wait until it says a word, and return what it says then."""
        while True:
            try:
                said = self._lines.get(timeout=max(0.0, self.deadline - time.monotonic()))
            except Empty:
                pytest.fail(f"no {word!r} in time; log:\n{''.join(self.log[-30:])}")
            self.said.append(said)
            if word in said:
                return said

    def appear(self):
        """Wait until it is ready, and the lighthouse has heard of it: before, others would do without it."""
        self.hear("ready")
        while True:
            with urllib.request.urlopen(f"{self.lighthouse}/status", timeout=10) as status:
                if f"{self.name}:" in status.read().decode():
                    return
            assert time.monotonic() < self.deadline, f"the lighthouse does not hear of {self.name}"
            time.sleep(0.05)

    @property
    def attempts(self):
        return [said for said in self.said if "committed" in said]


@pytest.fixture(scope="module")
def story(lighthouse):
    """Two replicas train; one is killed in the middle of a step; the other goes on; a new one joins."""
    deadline = time.monotonic() + LIMIT
    replicas = {}
    try:
        replicas = {name: Replica(lighthouse, name, deadline) for name in ("replica_0", "replica_1")}
        one, other = replicas.values()
        for replica in (one, other):
            replica.appear()
        for replica in (one, other):
            replica.tell("run 3")
        for replica in (one, other):
            replica.hear("ran")
        other.tell("die")
        one.tell("run 6")
        one.hear("ran")
        assert other.process.wait(timeout=10) < 0, "it was killed"
        replicas["joined"] = late = Replica(lighthouse, "replica_2", deadline)
        late.appear()
        for replica in (late, one):
            replica.tell("run 10")
        for replica in (late, one):
            replica.hear("ran")
        for replica in (late, one):
            replica.tell("stop")
            replica.end = replica.hear("contents")
        yield replicas
    finally:
        for replica in replicas.values():
            replica.process.kill()
            replica.process.wait()


def test_both_commit_the_same_steps_until_one_dies(story):
    one, other = (story[name].attempts[:3] for name in ("replica_0", "replica_1"))
    assert [said["committed"] for said in one] == [True] * 3
    assert [said["participants"] for said in one] == [2] * 3
    assert [said["after"] for said in one] == [said["after"] for said in other]


def test_the_step_in_which_a_replica_dies_has_not_happened(story):
    failed = [said for said in story["replica_0"].attempts if not said["committed"]]
    assert failed, "the death of a replica is an error of the all-reduce"
    for said in failed:
        assert said["step"] == 3
        assert said["after"] == said["before"], "parameters, moments and schedule stand still"
        assert said["kept"], "the gradients are kept"


def test_the_other_goes_on_alone(story):
    alone = [said for said in story["replica_0"].attempts if said["committed"] and 3 <= said["step"] < 6]
    assert [said["step"] for said in alone] == [3, 4, 5]
    assert [said["participants"] for said in alone] == [1] * 3


def test_a_replica_that_joins_is_healed_and_agrees_with_the_others(story):
    one, late = story["replica_0"], story["joined"]
    assert late.attempts[0]["healing"], "it began behind the other"
    assert late.end["step"] == one.end["step"] == 10
    assert late.end["contents"] == one.end["contents"]


def test_training_was_training_on_the_committed_gradients(story):
    """The same optimizer without a manager, on the gradients that were committed, comes out alike."""
    committed = [said for said in story["replica_0"].attempts if said["committed"]]
    assert [said["step"] for said in committed] == list(range(10))
    assert replay(committed) == story["replica_0"].end["contents"]


def replay(committed, package="reference"):
    """Train with the committed gradients, without a manager, and return the contents."""
    sys.path.insert(0, str(REPLICA.parent))
    try:
        replica = importlib.import_module("torchft_replica")
    finally:
        sys.path.remove(str(REPLICA.parent))
    param = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = replica.build(param, package)
    for said in committed:
        param.grad = torch.tensor(said["grad"])
        optimizer.step()
    return {"p": param.tolist(), "state": replica.plain(optimizer.state_dict()["state"])}


@pytest.mark.parametrize("wrapper", ["reference", "fused", "torchft"])
def test_three_groups_lose_and_double_no_step(lighthouse, wrapper):
    """One of three is killed in a step, one hangs, one is killed as it heals, and one returns and heals."""
    deadline = time.monotonic() + LIMIT
    first = {"torchft": 10, "reference": 20, "fused": 30}[wrapper]
    replicas = []

    def start():
        replicas.append(
            Replica(lighthouse, f"group{first + len(replicas)}_{len(replicas)}", deadline, wrapper)
        )
        replicas[-1].appear()
        return replicas[-1]

    def run(step, *chosen):
        for replica in chosen:
            replica.tell(f"run {step}")
        for replica in chosen:
            replica.hear("ran")

    try:
        one, two, three = start(), start(), start()
        run(3, one, two, three)
        three.tell("die")
        run(5, one, two)
        falls = start()
        falls.tell("fall")
        falls.tell("run 9")
        run(7, one, two)
        two.tell("hang")
        run(9, one)
        two.process.kill()
        back = start()
        run(12, one, back)
        for replica in (one, back):
            replica.tell("stop")
            replica.end = replica.hear("contents")
        committed = [said for said in one.attempts if said["committed"]]
        assert [said["step"] for said in committed] == list(range(12)), "no step is lost or doubled"
        assert {said["participants"] for said in committed[:3]} == {3}
        assert back.attempts[0]["healing"]
        assert back.end["contents"] == one.end["contents"], "survivors are bit-identical"
        replayed = replay(committed, "fused" if wrapper == "fused" else "reference")
        assert replayed == one.end["contents"], (
            "schedule, window and counters are those of the committed steps"
        )
        assert falls.process.wait(timeout=10) < 0, "it was killed while it healed"
    finally:
        for replica in replicas:
            replica.process.kill()
            replica.process.wait()
