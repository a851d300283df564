"""Run many scripts of `replay` in forks of one process that has imported the implementation.

Runs as ``python -m keyedopt.conformance.run.replay_all``: reads ``{"modules": […], "scripts": [path, …],
"limit": seconds}`` from stdin, and prints ``[path, exit status, output]`` for each script, as a line of JSON.
"""

import contextlib
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from keyedopt.conformance.run.forked_script import run_forked
from keyedopt.conformance.suite.support.clock import RAISE

#: Seconds that a script may take at least, with the second one of a script that starts itself again.
LIMIT = 120


def run(scripts: Mapping[str, str], modules: Sequence[str], limit: float) -> Iterator[tuple[str, bool, str]]:
    """Run scripts by name; yield the name, whether the case failed, and the output.

    Args:
        scripts: their texts.
        modules: what is imported before the first script.
        limit: seconds that a script may take, if more than `LIMIT`.
    """
    with tempfile.TemporaryDirectory(prefix="keyedopt-") as folder:
        names = {str(Path(folder, f"{number}.py")): name for number, name in enumerate(scripts)}
        for path, name in names.items():
            Path(path).write_text(scripts[name], encoding="utf-8")
        request = {"modules": list(modules), "scripts": list(names), "limit": max(math.ceil(limit), LIMIT)}
        places = [*filter(None, [os.environ.get("PYTHONPATH")]), os.getcwd()]
        with subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(request))
            process.stdin.close()
            for line in process.stdout:
                path, code, output = json.loads(line)
                yield names[path], code != 0, output


def main() -> None:
    """Fork a process for each script, one after the other."""
    request, answer = json.load(sys.stdin), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    importlib.import_module("torch._dynamo")  # the first optimizer of a process imports it, for a second
    for module in request["modules"]:
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    for script in request["scripts"]:
        code, said = run_forked(script, request["limit"])
        if code == -signal.SIGALRM:
            said += f"it did not end within {request['limit']} s{RAISE}"
        line = [script, code, said.strip()[:4000]]
        answer.write(json.dumps(line) + "\n")
        answer.flush()


if __name__ == "__main__":
    main()
