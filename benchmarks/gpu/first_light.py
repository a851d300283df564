"""Run in stages what needs a GPU: ``python -m keyedopt.benchmarks.gpu.first_light FOLDER [STAGE]``.

`first_light.sh` calls it. Each stage has its own process, limit and result file, see `stage`; its outcome is
in ``first_light.json``. Without STAGE, a name or a number, a second call goes on with the stages that have
no outcome there: stages that ended are not repeated, a stage that was killed is.

Exit code: 0; 1 if a stage failed or was cut short; 2 if no stage was run, or stages are left for a second
call.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from keyedopt.benchmarks.gpu import summary
from keyedopt.benchmarks.gpu.stage import STAGES, Stage, end_with_parent
from keyedopt.conformance.results.model import write_atomically

#: The outcomes of the stages. With the result files of the stages, eight files are in the folder.
OUTCOMES = "first_light.json"
#: A stage is not begun with fewer seconds than this, unless its limit is shorter.
LEAST = 10.0
#: Seconds that are left at the end of the budget, to end the last stage and to show the summary.
RESERVE = 10.0
#: Seconds between two looks at a running stage.
AGAIN = 0.2


class Run:
    """Runs stages one after another.

    Args:
        folder: of the results.
        options: of each stage, such as ``--device``.
        budget: the limit of all stages together, in seconds.
        stages: all stages.
        now, sleep: the clock; tests pass a fake one.
    """

    def __init__(
        self,
        folder: Path,
        options: Sequence[str] = (),
        budget: float = 590.0,
        stages: Sequence[Stage] = STAGES,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.folder, self.options, self.stages = folder, options, stages
        self.now, self.sleep = now, sleep
        self.end = now() + budget - RESERVE
        self.outcomes: dict[str, dict[str, Any]] = {}
        file = folder / OUTCOMES
        if file.exists():
            self.outcomes = json.loads(file.read_text(encoding="utf-8"))["stages"]
        # other files stay on the machine, from which only a few files can be copied
        self.work = Path(
            os.environ.get("KEYEDOPT_FIRST_LIGHT_WORK") or tempfile.mkdtemp(prefix="first-light-")
        )

    def pending(self, first: str | None) -> list[Stage]:
        """Return the stages to run: all from the given one on, or those without an outcome.

        Raises:
            ValueError: there is no such stage.
        """
        if first is None:
            return [
                one
                for one in self.stages
                if self.outcomes.get(one.name, {}).get("outcome") in (None, "running")
            ]
        places = [place for place, one in enumerate(self.stages) if first in (one.name, str(one.number))]
        if not places:
            known = ", ".join(f"{one.number} or {one.name}" for one in self.stages)
            raise ValueError(f"no stage {first!r}: give {known}")
        return list(self.stages[places[0] :])

    def run(self, first: str | None = None) -> int:
        """Run the stages; return the exit code of the module docstring."""
        pending, begun = self.pending(first), 0
        for stage in pending:
            limit = min(stage.seconds, self.end - self.now())
            if limit < min(LEAST, stage.seconds):
                print(f"{stage.name}: no time is left; a second call goes on here", flush=True)
                break
            begun += 1
            self._stage(stage, limit)
        outcomes = [self.outcomes.get(one.name, {}).get("outcome") for one in self.stages]
        print("\n".join(summary.lines(self.folder)), flush=True)
        if begun < len(pending) or not pending:
            return 2
        return int(any(one != "done" for one in outcomes))

    def _note(self, stage: Stage, **about: Any) -> None:
        self.outcomes[stage.name] = about
        plain = {"kind": "keyedopt-first-light-outcomes", "stages": self.outcomes}
        write_atomically(self.folder / OUTCOMES, json.dumps(plain, indent=1) + "\n")

    def _stage(self, stage: Stage, limit: float) -> None:
        print(f"\n== {stage.number} {stage.name}, {limit:.0f} s at most", flush=True)
        self._note(stage, outcome="running", limit=limit)
        begin = self.now()
        work = self.work / stage.name
        work.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "keyedopt.benchmarks.gpu.stage",
            stage.name if stage in STAGES else stage.module,
        ]
        command += [
            str(self.folder / stage.file),
            "--seconds",
            f"{limit:.1f}",
            "--work",
            str(work),
            *self.options,
        ]
        output = work / "output.txt"
        with output.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=end_with_parent,
            )
        try:
            while process.poll() is None and self.now() - begin < limit:
                self.sleep(AGAIN)
        finally:
            ended = process.poll() is not None
            end_session(process.pid)
            code = process.wait()
        outcome = ("done" if code == 0 else "failed") if ended else "cut short"
        said = output.read_text(encoding="utf-8", errors="replace").strip()[-1500:]
        seconds = round(self.now() - begin, 1)
        self._note(stage, outcome=outcome, seconds=seconds, limit=limit, code=code, output=said)
        print(
            f"{stage.name}: {outcome}, {seconds} s" + (f"\n{said}" if outcome == "failed" else ""), flush=True
        )


def end_session(session: int) -> None:
    """Kill all processes of a session, also those in other process groups."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()
            if int(fields[3]) == session:  # after state, parent and group
                os.kill(int(path.parent.name), signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line of the module docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("stage", nargs="?", help="the stage to begin with, by name or number")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE")
    parser.add_argument("--budget", type=float, default=590.0, help="seconds of all stages together")
    parser.add_argument("--small", action="store_true", help="the smallest problems, for a rehearsal")
    given = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # ends the running stage, whose file stays
    options = ["--device", given.device, *(["--small"] if given.small else [])]
    options += [word for module in given.imports for word in ("--import", module)]
    given.folder.mkdir(parents=True, exist_ok=True)
    run = Run(given.folder.resolve(), options, given.budget)
    try:
        return run.run(given.stage)
    except ValueError as error:
        sys.stderr.write(f"first_light: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
