"""Send signals to commands at random moments: each ends with 0, 1 or 2 and a line, and leaves nothing behind.

``python -m keyedopt.tools.signals [COUNT] [SEED]`` starts ``check``, ``bench``, ``report`` and ``diff`` in
turn, 1,000 times in all by default, and sends SIGINT, SIGTERM or SIGHUP after a random time. It prints a line
for each command that ends otherwise, and exits with 1 if there is one.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from keyedopt.tools import sample

#: The commands, and the seconds within which the signal is sent.
COMMANDS = {
    "check reference --area wrapper --output out.json": 12.0,
    "bench run --workload small-step --seconds 0.1 --output bench.json": 8.0,
    "report a.json b.json --output site": 6.0,
    "diff a.json b.json": 4.0,
}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: The mark of the processes of a command, in their environment.
MARK = "KEYEDOPT_SIGNALS"


def _heeds(pid: int) -> bool:
    """Whether a process has set its handlers; before that Python is starting."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return True
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", text, re.MULTILINE)
    return caught is None or bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)


def _left(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def attempt(command: str, number: signal.Signals, delay: float, folder: Path) -> str:
    """Run a command, send it a signal, and return what went wrong, or an empty string."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    with subprocess.Popen(
        [sys.executable, "-m", "keyedopt.cli.start", *command.split()],
        cwd=folder,
        env={**os.environ, MARK: mark, "TMPDIR": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        while not _heeds(process.pid):
            time.sleep(0.001)
        time.sleep(delay)
        process.send_signal(number)
        try:
            said = process.communicate(timeout=60)[1]
        except subprocess.TimeoutExpired:
            process.kill()
            return "it went on for 60 s"
    if process.returncode not in (0, 1, 2):
        return f"exit status {process.returncode}: {said[-300:]}"
    if process.returncode == 2 and not said.splitlines()[-1:][0].startswith("keyedopt: "):
        return f"no line that says why: {said[-300:]}"
    end = time.monotonic() + 2
    while _left(mark) and time.monotonic() < end:
        time.sleep(0.02)
    if left := _left(mark):
        return f"processes are left: {left}"
    for path in folder.glob("*.json"):
        json.loads(path.read_text(encoding="utf-8"))
    scratch = [*folder.glob("keyedopt-*"), *folder.glob("site/.keyedopt-*"), *folder.glob(".*.json.*")]
    return f"files are left: {scratch}" if scratch else ""


def run(count: int, seed: int) -> list[str]:
    """Send so many signals; return a line for each command that ended wrongly."""
    dice, wrong = random.Random(seed), []
    with tempfile.TemporaryDirectory(prefix="keyedopt-signals-") as name:
        folder = Path(name)
        for number, file in enumerate(("a.json", "b.json")):
            (folder / file).write_text(json.dumps(sample.check(number, 20, 20)), encoding="utf-8")
        for turn in range(count):
            command, longest = list(COMMANDS.items())[turn % len(COMMANDS)]
            sent, delay = dice.choice(SIGNALS), dice.uniform(0, longest)
            if problem := attempt(command, sent, delay, folder):
                wrong.append(f"{command}: {sent.name} after {delay:.2f} s: {problem}")
    return wrong


def main() -> int:
    """Send the signals; see the module's docstring."""
    # A shell's background job ignores SIGINT, nohup makes it ignore SIGHUP, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    numbers = [int(word) for word in sys.argv[1:]]
    count, seed = [*numbers, *(1_000, 0)[len(numbers) :]][:2]
    wrong = run(count, seed)
    print("\n".join([*wrong, f"{count} signals, {len(wrong)} wrong"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
