"""Triton's interpreter, quicker where tests have chosen it; and the fused implementation, as a target."""

import gc
import os
from typing import Any

from keyedopt.conformance.targets import builtin

#: The same, in a process that has imported this.
IMPLEMENTATION = builtin.fused


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


def remember() -> None:
    """Let the interpreter make each type of a block once, and find out once what follows from a type.

    It does so for each operation: thousands of times in a launch, for a few types that nothing changes.
    """
    from triton.language import core
    from triton.runtime import interpreter

    made: dict[Any, Any] = {}
    new, make, make_tensor = core.block_type.__new__, core.block_type.__init__, core.tensor.__init__
    kind_of = interpreter._get_np_dtype

    def new_type(cls: Any, element_ty: Any, shape: Any) -> Any:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        key = element_ty.name, getattr(element_ty, "address_space", None), sizes
        if key not in made:
            one = new(cls)
            make(one, element_ty, shape)
            made[key] = one
        return made[key]

    def make_known_tensor(this: Any, handle: Any, type: Any) -> None:
        known = vars(type).get("_of_tensors")
        if known is None:
            make_tensor(this, handle, type)
            type._of_tensors = this.shape, this.numel, this.dtype
        else:
            this.handle, this.type = handle, type
            this.shape, this.numel, this.dtype = known

    def known_kind_of(type: Any) -> Any:
        known = vars(type).get("_in_numpy")
        if known is None:
            known = type._in_numpy = kind_of(type)
        return known

    core.block_type.__new__, core.block_type.__init__ = new_type, lambda this, element_ty, shape: None
    core.tensor.__init__, interpreter._get_np_dtype = make_known_tensor, known_kind_of


if os.environ.get("TRITON_INTERPRET") == "1":
    quicken()
    remember()
