"""Triton's interpreter, quicker where tests have chosen it; and the fused implementation, as a target."""

import gc
import os
from typing import Any

from keyedopt.conformance import targets

#: The same, in a process that has imported this.
IMPLEMENTATION = targets.fused


def quicken() -> None:
    """Let the interpreter patch Triton's language once a launch, not for each function that a kernel calls.

    What it patches are modules that the function sees, and what it puts there is always the same; the end of
    the launch undoes it. What has been imported by now is no garbage, and need not be looked at again.
    """
    from triton import language
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()

    def patch_new(function: Any) -> Any:
        seen = function.__globals__.values()
        names = {one.__name__ for one in (language, language.core) if any(one is value for value in seen)}
        if names and names <= patched:
            return interpreter._LangPatchScope()
        patched.update(names)
        return patch(function)

    def launch_alone(this: Any, *args: Any, **named: Any) -> Any:
        try:
            return launch(this, *args, **named)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, launch_alone
    gc.freeze()


if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()
