"""Kill a rank at random moments of steps and checkpoints, and check that nothing is lost, torn or doubled.

Run ``python -m keyedopt.tools.kills``. Two ranks train a clipped and scheduled optimizer of DTensors, and
write a checkpoint after each step. One is killed at a random moment of the rounds after its first; then all
ranks start again from the newest complete checkpoint. Each compares weights and state, bit by bit, with those
of the same step of training that nobody killed.
"""

import argparse
import hashlib
import importlib
import itertools
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from keyedopt.conformance.suite.sharded.test_sharded_checkpoints import (
    everything,
    savable,
    train_steps,
    trained,
)
from keyedopt.conformance.suite.support.assertions import Mismatch, expect_equal
from keyedopt.conformance.suite.support.ranks import on_ranks
from keyedopt.conformance.suite.support.sharded import rank

RANKS = 2


def complete(folder: Path) -> list[int]:
    """Return the steps with a complete checkpoint: its metadata is written last."""
    return sorted(int(path.parent.name) for path in folder.glob("*/.metadata"))


def digests(optimizer: Any) -> dict[str, str]:
    """Return a hash of the bytes of each weight and state by name."""
    found = everything(optimizer).items()
    return {key: hashlib.sha256(value.contiguous().numpy().tobytes()).hexdigest() for key, value in found}


def undisturbed(impl: Any, steps: int) -> list[dict[str, str]]:
    """Return the digests after each step, from 0, of training that nobody kills."""
    optimizer = trained(impl, "row", 0)
    found = [digests(optimizer)]
    for step in range(steps):
        train_steps(optimizer, [step])
        found.append(digests(optimizer))
    return found


def resume(impl: Any, folder: Path, step: int, wanted: dict[str, str]) -> Any:
    """Return an optimizer with a checkpoint, or a new one for step 0, after comparing its contents."""
    warnings.simplefilter("ignore")
    optimizer = trained(impl, "row", 0)
    if step:
        saved = savable(optimizer)
        state_dict_loader.load(saved, checkpoint_id=folder / str(step))
        optimizer.load_state_dict(saved["optimizer"])
    expect_equal(digests(optimizer), wanted, f"contents after step {step}")
    return optimizer


def train_until_killed(
    impl: Any, folder: Path, step: int, wanted: dict[str, str], victim: int, rounds: float
) -> None:
    """Train and save after each step until a rank is killed.

    Args:
        impl: the implementation.
        folder: of the checkpoints.
        step: the checkpoint to begin with.
        wanted: its digests.
        victim: the rank that is killed.
        rounds: when, after the first step and its checkpoint, in multiples of the time that these took.
    """
    optimizer = resume(impl, folder, step, wanted)
    for number in itertools.count(step):
        start = time.monotonic()
        train_steps(optimizer, [number])
        state_dict_saver.save(savable(optimizer), checkpoint_id=folder / str(number + 1))
        if number == step and rank() == victim:
            seconds = rounds * (time.monotonic() - start)
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def resumed(*arguments: Any) -> None:
    """Compare the contents of a checkpoint."""
    resume(*arguments)


def ending(impl: Any, *arguments: Any) -> str:
    """Train until a rank is killed, and return how the ranks ended."""
    try:
        on_ranks(train_until_killed, impl, *arguments, ranks=RANKS, limit=60)
    except Mismatch as error:
        return error.seen
    return "nobody was killed"


def run(impl: Any, kills: int, seed: int) -> int:
    """Kill ranks, compare the contents of all ranks after each kill, and return the last step.

    Raises:
        AssertionError: a rank was not killed, a step was lost, or contents differ.
    """
    draw, last = random.Random(seed), 0
    wanted = on_ranks(undisturbed, impl, 10 * kills, ranks=RANKS, limit=600)[0]
    with tempfile.TemporaryDirectory(prefix="keyedopt-") as name:
        folder = Path(name)
        for number in range(kills):
            victim, rounds = draw.randrange(RANKS), draw.uniform(0.0, 3.0)
            end = ending(impl, folder, last, wanted[last], victim, rounds)
            assert f"rank {victim} of {RANKS} ended: killed by signal 9" in end, f"kill {number}: {end}"
            step = max(complete(folder))
            assert step > last, f"kill {number}: step {step} after step {last}"
            for path in folder.glob("*"):
                if int(path.name) < step:
                    shutil.rmtree(path)
            last = step
        on_ranks(resumed, impl, folder, last, wanted[last], ranks=RANKS, limit=60)
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
