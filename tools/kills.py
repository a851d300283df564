"""Kill a rank at random moments of steps and checkpoints, and check that nothing is lost, torn or doubled.

Run ``python -m keyedopt.tools.kills``. Two ranks train a clipped and scheduled optimizer of DTensors, and
write a checkpoint after each step. One is killed after a random time; then all ranks start again from the
newest complete checkpoint. Weights and state are compared, bit by bit, with training that nobody killed.
"""

import argparse
import importlib
import os
import random
import shutil
import signal
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from keyedopt.conformance.suite.sharded.test_sharded_checkpoints import (
    everything,
    savable,
    train_steps,
    trained,
)
from keyedopt.conformance.suite.support.assertions import Mismatch
from keyedopt.conformance.suite.support.ranks import on_ranks
from keyedopt.conformance.suite.support.sharded import rank

RANKS = 2
STEPS = 1000


def complete(folder: Path) -> list[int]:
    """Return the steps with a complete checkpoint: its metadata is written last."""
    return sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))


def resume(impl: Any, folder: Path) -> tuple[int, Any]:
    """Return the newest step with a complete checkpoint, and the optimizer with its state."""
    optimizer, step = trained(impl, "row", 0), max(complete(folder), default=0)
    if step:
        saved = savable(optimizer)
        state_dict_loader.load(saved, checkpoint_id=folder / str(step))
        optimizer.load_state_dict(saved["optimizer"])
    return step, optimizer


def train_until_killed(impl: Any, folder: Path, victim: int, seconds: float) -> None:
    """Train and save after each step; one rank is killed after some seconds."""
    warnings.simplefilter("ignore")
    step, optimizer = resume(impl, folder)
    if rank() == victim:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while step < STEPS:
        train_steps(optimizer, [step])
        step += 1
        state_dict_saver.save(savable(optimizer), checkpoint_id=folder / str(step))


def ending(impl: Any, folder: Path, victim: int, seconds: float) -> str:
    """Train until a rank is killed, and return how the ranks ended."""
    try:
        on_ranks(train_until_killed, impl, folder, victim, seconds, ranks=RANKS, limit=60)
    except Mismatch as error:
        return error.seen
    return "nobody was killed"


def contents(impl: Any, folder: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the step and the contents of the newest complete checkpoint."""
    warnings.simplefilter("ignore")
    step, optimizer = resume(impl, folder)
    return step, everything(optimizer)


def undisturbed(impl: Any, steps: int) -> dict[str, torch.Tensor]:
    """Return the contents after some steps that nobody killed."""
    return everything(trained(impl, "row", steps))


def run(impl: Any, kills: int, seed: int) -> int:
    """Kill ranks, and compare after each kill; return the last step.

    Raises:
        AssertionError: a rank was not killed, or contents differ.
    """
    draw, last = random.Random(seed), 0
    with tempfile.TemporaryDirectory(prefix="keyedopt-") as name:
        folder = Path(name)
        for number in range(kills):
            seconds, victim = draw.uniform(0.0, 0.3), draw.randrange(RANKS)
            end = ending(impl, folder, victim, seconds)
            assert "killed by signal 9" in end, end
            found = on_ranks(contents, impl, folder, ranks=RANKS, limit=60)
            step, seen = found[0]
            assert step >= last, f"kill {number}: step {step} after step {last}"
            for other_step, other in found:
                assert other_step == step
                assert all(torch.equal(other[key], seen[key]) for key in seen)
            wanted = on_ranks(undisturbed, impl, step, ranks=RANKS, limit=60)[0]
            for key, value in wanted.items():
                assert torch.equal(seen[key], value), f"kill {number}: {key} at step {step}"
            for path in folder.glob("*"):
                if int(path.name) < step:
                    shutil.rmtree(path)
            last = step
    return last


def main() -> None:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--implementation", choices=["reference", "fused"], default="reference")
    given = parser.parse_args()
    importlib.import_module("torch._dynamo")  # what a step imports; the ranks share it
    impl = importlib.import_module(f"keyedopt.{given.implementation}")
    last = run(impl, given.kills, given.seed)
    print(f"{given.kills} kills with seed {given.seed}: nothing lost up to step {last}")


if __name__ == "__main__":
    main()
