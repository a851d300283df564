"""The cases of the interpreter tests on the compiled PTX, and faults planted in kernels or in their PTX."""

import importlib
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
import torch
from triton_dense import DENSE_STEPS, check_dense
from triton_faults import Fault
from triton_oracle import STEPS, check_output, check_update, lookup_of, tables_of
from triton_packed import case_packed, case_packed_module

from keyedopt import ptx
from keyedopt.fused.backends.interface import Lookup, Step

#: Multiprocessors of the device that does not exist: several programs sort at a time.
MULTIPROCESSORS = 3


@contextmanager
def executed(architecture: int = 90, seed: int = 0, **options: Any) -> Iterator[ptx.Session]:
    """Run the launches of the Triton backend in the executor, with a schedule of its own for each."""
    from keyedopt.fused.backends.triton import backend, sort_passes

    sort_passes._WORK.clear()
    schedules = (ptx.Schedule.of(number) for number in count(seed))
    torch.use_deterministic_algorithms(True, warn_only=True)  # which fills memory that is not written
    with (
        patch.object(backend, "interpreted", lambda: True),
        patch.object(sort_passes, "_multiprocessors", lambda device: MULTIPROCESSORS),
        ptx.executing(architecture, lambda number: next(schedules), **options) as session,
    ):
        yield session


def run_case(case: Callable[[Any], None], backend: Any, **options: Any) -> tuple[str, ptx.Session]:
    """Run a case; return what went wrong, and the session."""
    with executed(strict=False, **options) as session:
        try:
            case(backend)
            wrong = ""
        except (Exception, pytest.fail.Exception):  # the latter by pytest.raises
            wrong = traceback.format_exc()
    return "\n".join([*session.findings, wrong]).strip(), session


def run_rounds(
    cases: Iterable[tuple[str, Callable[[Any], None]]],
    backend: Any,
    architectures: tuple[int, ...],
    rounds: int,
    seed: int = 0,
) -> tuple[dict[str, str], Counter[str]]:
    """Run cases, in each round with other schedules; return what went wrong, and launches by kernel."""
    wrong: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for name, case in cases:
        for _ in range(rounds):
            for architecture in architectures:
                found, session = run_case(case, backend, architecture=architecture, seed=seed)
                seed += len(session.reports)
                seen.update(one.kernel for one in session.reports)
                wrong.setdefault(name, "")
                wrong[name] = wrong[name] or found
    return wrong, seen


# --- planted faults -------------------------------------------------------------------------------


#: The modules with functions that Triton compiles.
KERNELS = [
    "arithmetic",
    "chunks",
    "collect",
    "dense",
    "error_flag",
    "forward",
    "radix",
    "reduce",
    "rules",
    "sort",
    "unpack",
    "update",
]


def _kernels() -> Iterator[tuple[str, Any]]:
    """Yield the functions that Triton compiles, with their modules."""
    for name in KERNELS:
        module = importlib.import_module(f"keyedopt.fused.backends.triton.{name}")
        for one in vars(module).values():
            if hasattr(one, "_unsafe_update_src") and one.__module__ == module.__name__:
                yield module.__name__.rpartition(".")[2], one


@contextmanager
def planted(fault: Fault) -> Iterator[Callable[[str, str], str] | None]:
    """Change a kernel, or return how its PTX is to be changed."""
    if fault.ptx:
        used = []

        def change(name: str, text: str) -> str:
            if name != fault.where:
                return text
            found = list(re.finditer(fault.old, text, re.MULTILINE))
            if not found:
                return text
            one = found[fault.which % len(found)]
            used.append(name)
            return text[: one.start()] + one.expand(fault.new) + text[one.end() :]

        yield change
        assert used, f"no {fault.where} has {fault.old!r} in its PTX"
        return
    module, _, function = fault.where.partition(".")
    every = list(_kernels())
    (target,) = (one for name, one in every if name == module and one.__name__ == function)
    before = target.src
    assert before.count(fault.old) > fault.which, f"{fault.where} does not contain {fault.old!r}"
    parts = before.split(fault.old)
    at = fault.which + 1
    changed = fault.old.join(parts[:at]) + fault.new + fault.old.join(parts[at:])
    try:
        _replace(every, target, changed)
        yield None
    finally:
        _replace(every, target, before)


def _replace(every: list[tuple[str, Any]], target: Any, source: str) -> None:
    for _, one in every:
        one.hash = None
        one.device_caches.clear()
    target._unsafe_update_src(source)


def outcome(fault: Fault, cases: dict[str, Callable[[Any], None]], backend: Any, seeds: int = 6) -> str:
    """Return how a fault shows: the kind of the first finding, "wrong result", or "" if it does not show."""
    with planted(fault) as change:
        for seed in range(seeds):
            for name in fault.cases:
                wrong, session = run_case(cases[name], backend, seed=17 * seed, change=change)
                kinds = Counter(found.kind for one in session.reports for found in one.findings)
                if kinds:
                    return kinds.most_common(1)[0][0]
                if wrong:
                    return "wrong result: " + wrong.splitlines()[-1][:100]
    return ""


# --- cases that only the executor needs -----------------------------------------------------------


def case_invalid(backend: Any) -> None:
    """Row numbers that are wrong read and write nothing, and are reported."""
    options = STEPS["rowwise"]
    tables = tables_of([(40, 16), (7, 5)], options, torch.float32)
    lookups = [lookup_of(number, one.weight, [3, 0, 20, 4], number) for number, one in enumerate(tables)]
    lookups[1].values[[1, 26]] = torch.tensor([-1, 7])
    before = [one.weight.clone() for one in tables]
    for call in (
        lambda: backend.look_up(tables, lookups),
        lambda: backend.update(tables, lookups, Step(lr=0.1, **options)),
    ):
        with pytest.raises(ValueError, match="row numbers"):
            call()
    assert all(torch.equal(one.weight, old) for one, old in zip(tables, before, strict=True))


def case_offsets(backend: Any) -> None:
    """Offsets without pooling are checked, and invalid ones are reported."""
    tables = tables_of([(40, 16)], STEPS["sgd"], torch.float32)
    lookup = lookup_of(0, tables[0].weight, [3, 0, 20, 4], 1)
    backend.check_offsets(tables, [lookup])
    lookup.offsets[2] = 1
    with pytest.raises(ValueError, match="offsets"):
        backend.check_offsets(tables, [lookup])


def case_every_row(backend: Any) -> None:
    """The last row of a table ends where its memory ends."""
    tables = tables_of([(9, 33), (5, 5)], STEPS["sgd"], torch.float32)
    check_output(backend, tables, [Lookup(k, torch.arange(len(one.weight))) for k, one in enumerate(tables)])


def case_many_tables(backend: Any) -> None:
    """Any number of tables is looked up and updated in the same few launches."""
    options = STEPS["rowwise"]
    for many in (70, 1030):
        tables = tables_of([(2, 4)] * many, options, torch.float32)
        lookups = [lookup_of(k, tables[k].weight, [2, 0, 1], k) for k in range(many)]
        check_output(backend, tables, lookups)
        check_update(backend, tables, lookups, Step(lr=0.1, **options), options)


def case_dense(backend: Any) -> None:
    """Programs of the dense kernel write only their elements, also of parameters without alignment."""
    for name in ("adam_decoupled", "adam_unaligned", "adam_half_aligned", "sgd_momentum", "adagrad"):
        check_dense(DENSE_STEPS[name], (0, 1, 3, 1025, 0, 2500, 7, 0))
    check_dense(DENSE_STEPS["adam"], [place % 3 for place in range(1030)])


OWN = {
    "many_tables": case_many_tables,
    "invalid": case_invalid,
    "offsets": case_offsets,
    "every_row": case_every_row,
    "packed": case_packed,
    "packed_module": case_packed_module,
    "dense": case_dense,
}
