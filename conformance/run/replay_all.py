"""Run many scripts of `replay` in forks of one process that has imported the implementation.

Runs as ``python -m keyedopt.conformance.run.replay_all``: reads ``{"modules": […], "scripts": [path, …]}``
from stdin, and prints ``[path, exit status, output]`` for each script, as a line of JSON.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

#: Seconds that a script may take, with the second one of a script that starts itself again.
LIMIT = 120


def run(scripts: Mapping[str, str], modules: Sequence[str]) -> Iterator[tuple[str, bool, str]]:
    """Run scripts by name; yield the name, whether the case failed, and the output."""
    with tempfile.TemporaryDirectory(prefix="keyedopt-") as folder:
        names = {str(Path(folder, f"{number}.py")): name for number, name in enumerate(scripts)}
        for path, name in names.items():
            Path(path).write_text(scripts[name], encoding="utf-8")
        request = {"modules": list(modules), "scripts": list(names)}
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
        with tempfile.TemporaryFile() as output:
            child = os.fork()
            if child == 0:
                _become(script, output.fileno())
            _, status = os.waitpid(child, 0)
            output.seek(0)
            said = output.read().decode(errors="replace").strip()
        line = [script, os.waitstatus_to_exitcode(status), said[:4000]]
        answer.write(json.dumps(line) + "\n")
        answer.flush()


def _become(script: str, output: int) -> None:
    """Run a script in this forked process, and exit with its exit status."""
    signal.alarm(LIMIT)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.argv = [script]
    code: object = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ending:
        code = ending.code
    except BaseException as error:
        print(f"{type(error).__name__}: {error}")
        code = 1
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        if isinstance(code, str):
            os.write(output, code.encode())
    os._exit(code if isinstance(code, int) else 1 if code else 0)


if __name__ == "__main__":
    main()
