"""A replica that trains with torchft's own manager; `test_torchft_loopback` starts several of them.

It is told what to do by lines on its standard input, and tells what it did in lines of JSON:

    run STEP    train until STEP steps are committed, and report each attempt
    die         begin a step, and be killed in the middle of it, between quorum and all-reduce
    hang        begin a step, and stop in the middle of it, until it is killed
    fall        be killed in the load with which it heals
    stop        report everything, and end
"""

import functools
import importlib
import json
import os
import signal
import sys
from datetime import timedelta

import torch
from torch.distributed import TCPStore
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo

LIMIT = timedelta(seconds=10)


def build(param, package="reference"):
    """Every wrapper of the keyed family; counters, windows and schedule show any step too many or too few."""
    impl = importlib.import_module(f"keyedopt.{package}")
    adam = functools.partial(impl.AccumulateAdam, lr=0.1, use_accumulate=True, accumulate_step=2)
    keyed = impl.CombinedOptimizer([("a", impl.KeyedOptimizerWrapper({"p": param}, adam))])
    clipped = impl.GradientClippingOptimizer(impl.OptimizerWrapper(keyed), impl.GradientClipping.NORM, 1.0)
    stage = impl.WarmupStage(impl.WarmupPolicy.LINEAR, max_iters=20, value=0.1)
    optimizer = impl.WarmupOptimizer(clipped, [stage], lr=0.3)
    optimizer.init_state()  # so that a replica that joins late can load in place
    return optimizer


def plain(tree):
    return {
        key: plain(value) if isinstance(value, dict) else torch.as_tensor(value).tolist()
        for key, value in tree.items()
    }


def say(**what):
    print(json.dumps(what), flush=True)


class Replica:
    def __init__(self, lighthouse, name, wrapper="reference"):
        self.falls = False
        self.param = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
        package = "reference" if wrapper == "torchft" else wrapper
        self.inner = build(self.param, package)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=LIMIT),
            min_replica_size=1,
            state_dict=lambda: {"p": self.param.detach().clone(), "optim": self.inner.state_dict()},
            load_state_dict=self.load,
            store_addr="127.0.0.1",
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=lighthouse,
            hostname="127.0.0.1",
            replica_id=name,
            init_sync=False,  # all begin alike
            timeout=LIMIT,
            quorum_timeout=LIMIT,
            connect_timeout=LIMIT,
        )
        self.store = store
        ours = importlib.import_module(f"keyedopt.{package}").FaultTolerantOptimizer
        outer = OptimizerWrapper if wrapper == "torchft" else ours
        self.optimizer = outer(self.manager, self.inner)
        self.seed = int(name[-1])

    def load(self, saved):
        if self.falls:
            os.kill(os.getpid(), signal.SIGKILL)
        self.param.data.copy_(saved["p"])
        self.optimizer.load_state_dict(saved["optim"])

    def contents(self):
        return {"p": self.param.tolist(), "state": plain(self.optimizer.state_dict()["state"])}

    def begin(self):
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(100 * self.seed + self.manager.current_step())
        (self.param * torch.randn(3, generator=generator)).sum().backward()

    def attempt(self):
        self.begin()
        before, step = self.contents(), self.manager.current_step()
        self.manager.allreduce(self.param.grad).wait()
        participants = self.manager.num_participants()
        healing = self.manager.current_step() != step  # what it had is replaced while the manager is asked
        step = self.manager.current_step()
        grad = self.param.grad.clone()
        self.optimizer.step()
        say(
            step=step,
            committed=self.manager.current_step() == step + 1,
            participants=participants,
            healing=healing,
            grad=grad.tolist(),
            kept=torch.equal(grad, self.param.grad),
            before=before,
            after=self.contents(),
        )

    def serve(self):
        say(ready=True)
        for line in sys.stdin:
            command, *rest = line.split()
            if command == "run":
                while self.manager.current_step() < int(rest[0]):
                    self.attempt()
                say(ran=self.manager.current_step())
            elif command == "die":
                self.begin()
                self.manager.wait_quorum()
                os.kill(os.getpid(), signal.SIGKILL)
            elif command == "hang":
                self.begin()
                self.manager.wait_quorum()
                os.kill(os.getpid(), signal.SIGSTOP)
            elif command == "fall":
                self.falls = True
            else:
                break
        say(step=self.manager.current_step(), contents=self.contents())
        os._exit(0)  # the manager's threads would wait for the others


if __name__ == "__main__":
    Replica(*sys.argv[1:]).serve()
