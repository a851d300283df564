"""Run scripts in forks of a process that has imported what they need, which takes longer than a script."""

import os
import runpy
import signal
import sys
import tempfile
import traceback


def run_forked(path: str, limit: int = 0) -> tuple[int, str]:
    """Run a script in a forked process.

    Args:
        path: the script.
        limit: seconds after which a signal ends it; 0 is no limit.

    Returns:
        its exit status and output. The status is 2 if the script raised an exception or exited with a text,
        and negative if a signal ended it.
    """
    with tempfile.TemporaryFile() as output:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            signal.alarm(limit)
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            sys.argv = [path]
            os._exit(_exit_status(path))
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read().decode(errors="replace")


def _exit_status(path: str) -> int:
    """Run a script in this process, which must end then; return the exit status."""
    code: object = 0
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as ending:
        code = ending.code or 0
        if not isinstance(code, int):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 2
