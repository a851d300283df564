"""Run the cases of the suite on one implementation inside pytest, and make a record of each."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import time
import unittest
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from keyedopt.conformance import spec
from keyedopt.conformance.results.untrusted import error_text, plain
from keyedopt.conformance.results.verdict import NOT_CLAIMED
from keyedopt.conformance.run.causes import Causes
from keyedopt.conformance.run.device_seen import DeviceSeen, packages_of
from keyedopt.conformance.run.fresh import fresh, keep_settings, null_device, steps_of
from keyedopt.conformance.run.inputs import Inputs, fix_draws, note_draws
from keyedopt.conformance.run.integrity import Integrity
from keyedopt.conformance.run.left_errors import error_left, works
from keyedopt.conformance.run.outcomes import HEAD, Escaped, error_of, found_in, original
from keyedopt.conformance.run.protocol import DEVICE_LOST, Head, Writer
from keyedopt.conformance.run.refusals import unclaimed, why_not_on
from keyedopt.conformance.run.variation import as_input, clauses_of, in_its_situation, is_plain, varied
from keyedopt.conformance.suite.support.assertions import Mismatch
from keyedopt.conformance.suite.support.described import CannotRun, MissingName
from keyedopt.conformance.suite.support.device import choose_device
from keyedopt.conformance.suite.support.ranks import begin_case, choose_ranks, inspect_ranks, limit_ranks
from keyedopt.conformance.suite.support.situations import among
from keyedopt.conformance.targets.devices import check_device
from keyedopt.conformance.targets.find import find
from keyedopt.conformance.targets.implementation import DTYPES, Implementation, Surface, TargetError

#: Parts of the names of cases that take seconds. They run first, so that all workers end at the same time.
LONGEST = ("test_accumulate_precision::test_precision[equal-10000000", "test_replica_groups")

#: The part of the time limit of a case that its ranks may take.
OF_RANKS = 2 / 3
#: What is expected of a target beside its cases.
UNTOUCHED = "the functions of torch and Python as they were before the import"

#: The names that a case needs. A name in the mark ``needs`` may contain an input: ``"{algorithm}.decay"``.
_NEEDS = pytest.StashKey[list[str]]()

fix_draws()  # before the suite is imported


def case_name(item: pytest.Item) -> str:
    """Return the name of a case: ``test_keyed_load::test_shapes[2]``."""
    return f"{item.path.stem}::{item.nodeid.partition('::')[2]}"


class Engine:
    """The plugin that ``--implementation`` registers.

    Raises:
        TargetError: the implementation cannot be imported, or does not support what is asked for.
    """

    def __init__(self, config: pytest.Config, implementation: Implementation | None) -> None:
        self._option = option = config.getoption
        self.areas = set(option("--keyedopt-area") or spec.areas())
        self.clauses = set(option("--keyedopt-clause") or ())
        choose_ranks(option("--keyedopt-nproc"))
        self.device = ""
        self.dtypes: Sequence[str] = option("--keyedopt-dtype") or DTYPES
        self.writer: Writer | None = None  # of a worker
        self._integrity: Integrity | None = None
        self._inputs = Inputs()
        self._replaced = ""  # the function that the target replaced
        self._lost = False  # whether nothing can run on the device in this process any more
        # kept before the target can replace them in the class
        self._inspect, self._run_case = self._untouched, self._record
        self._sought: set[str] | None = None  # run only these clauses, each until one of its cases fails
        if implementation is not None:
            self._choose(implementation)
            check_device(self.device)

    def _choose(self, implementation: Implementation) -> None:
        """Take the implementation, the device and the dtypes, without using the device: forks could not."""
        self.implementation, self.surface = implementation, implementation.surface()
        self._causes = Causes(self.surface)
        self._steps: Mapping[Any, Any] | None = None  # `step` of each class before the first case
        self._packages: Collection[str] | None = None  # those with functions of the implementation
        self.claimed = set(self.surface.claimed())
        device = self._option("--keyedopt-device")
        self.dtypes = self._option("--keyedopt-dtype") or implementation.dtypes_on(device)
        self.use_device(implementation.supported(device, self.dtypes))

    def use_device(self, device: str) -> None:
        """Run the cases on a device."""
        self.device = device
        choose_device(device)

    def prepare(self, session: pytest.Session) -> None:
        """Note the functions that decide about cases, before a target is imported."""
        self._integrity = Integrity()
        inspect_ranks(self._integrity.changed)

    def enter_worker(
        self, session: pytest.Session, target: str, folder: Path, channel: int, limit: float
    ) -> None:
        """Claim the channel, import the target, and keep those of the collected cases that it supports.

        Args:
            session: has the collected cases.
            target: as on the command line.
            folder: the scratch folder of the run.
            channel: the descriptor of the worker's end of a channel.
            limit: seconds that a case may take.

        Raises:
            UsageError: the target cannot be imported, although the smoke stage imported it.
        """
        writer = Writer(folder, channel=channel)  # before the target's code runs
        limit_ranks(limit * OF_RANKS)
        try:
            with keep_settings():
                self._choose(find(target, self._option("--keyedopt-import") or ()))
        except TargetError as error:
            raise pytest.UsageError(str(error)) from error
        if self._integrity is not None:
            self._replaced = self._integrity.changed()
        self.turn_to(self.implementation, writer, session, (), self.dtypes)
        heads = [item.stash[HEAD] for item in session.items]
        for head in heads:
            head["device"] = self.device
        assert self.writer is not None
        self.writer.collected({head["case"]: head for head in heads})

    def turn_to(
        self,
        implementation: Implementation,
        writer: Writer,
        session: pytest.Session,
        clauses: Collection[str],
        dtypes: Collection[str],
    ) -> None:
        """Switch to another implementation, and keep the collected cases of these clauses and dtypes.

        If clauses are given, each is run until one of its cases fails. None are all, with all their cases.
        """
        self.implementation, self.surface, self.writer = implementation, implementation.surface(), writer
        self.claimed = set(self.surface.claimed())
        self._causes = Causes(self.surface)
        self._steps, self._packages = None, None
        self._sought = set(clauses) or None
        heads = [(item, item.stash[HEAD]) for item in session.items]
        on_cpu = torch.device(self.device).type == "cpu"
        session.items[:] = [
            item
            for item, head in heads
            if head["dtype"] in (None, *dtypes)
            and (not clauses or set(clauses) & set(head["clauses"]))
            and not (on_cpu and _needs_accelerator(head))
            and not is_plain(item, implementation)
        ]

    def declare(self, session: pytest.Session, file: Path) -> None:
        """Write the inputs of each collected case, which replay compares with those of a result."""
        found = {}
        for item in session.items:
            function, given = getattr(item, "obj", None), _parameters(item)
            inner = getattr(getattr(function, "hypothesis", None), "inner_test", None)
            names = inspect.signature(inner).parameters if inner else ()
            found[item.stash[HEAD]["case"]] = {
                "inputs": {name: plain(value) for name, value in {**given, **as_input(item)}.items()},
                "drawn": [name for name in names if name not in ("impl", *given)],
            }
        file.write_text(json.dumps(found), encoding="utf-8")

    # --- fixtures -----------------------------------------------------------------------------------

    @pytest.fixture(name="impl")
    def _impl(self) -> Surface:
        return self.surface

    # --- collection ---------------------------------------------------------------------------------

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a case that takes ``dtype`` once for each; situations are chosen before some are dropped."""
        if "dtype" in metafunc.fixturenames and _is_case(metafunc.module):
            metafunc.parametrize("dtype", self._option("--keyedopt-dtype") or DTYPES)

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Keep the cases that were asked for."""
        kept: list[pytest.Item] = []
        dropped: list[pytest.Item] = []
        for item in varied(items, self._is_wanted):
            if not isinstance(item, pytest.Function) or not _is_case(item.module):
                kept.append(item)
                continue
            ids = clauses_of(item)
            parameters = _parameters(item)
            item.stash[HEAD] = {
                "case": case_name(item),
                "clauses": ids,
                "device": self.device,
                "dtype": parameters.get("dtype"),
            }
            needed = [name for mark in item.iter_markers("needs") for name in mark.args]
            item.stash[_NEEDS] = [name.format(**parameters) for name in needed]
            wanted = any(self._is_wanted(spec.clauses()[one]) for one in ids if one in spec.clauses())
            wanted = wanted and item.stash[HEAD]["dtype"] in (None, *self.dtypes)
            (kept if wanted else dropped).append(item)
        items[:] = kept
        names = [item.stash[HEAD]["case"] for item in kept if HEAD in item.stash]
        assert len(set(names)) == len(names), "two cases have the same name"
        items.sort(key=turn)
        if dropped:
            config.hook.pytest_deselected(items=dropped)

    def _is_wanted(self, clause: spec.Clause) -> bool:
        return clause.area in self.areas and (not self.clauses or clause.id in self.clauses)

    # --- running a case -----------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """In a worker, run the cases that no other worker has taken, and write their records.

        pytest's own protocol of hooks, fixtures and reports would take longer than most cases.
        """
        if self.writer is None or session.testsfailed:
            return None
        count, of_first = len(session.items), sum(turn(item) < 2 for item in session.items)
        with null_device() as discard_output:
            while (number := self.writer.claim(of_first, count)) < count:
                item = session.items[number]
                head = item.stash[HEAD]
                if self._sought is None or not self._sought.isdisjoint(head["clauses"]):
                    with self.writer.running(head):
                        discard_output()
                        self.writer.add(self._inspect(item, self._run_case(item)))
                    if self._lost:
                        os._exit(DEVICE_LOST)  # another worker runs the rest
        return True

    def _record(self, item: Any, error_of: Any = error_of, found_in: Any = found_in) -> Head:
        """Run a case without pytest, and return its record.

        What decides is bound as a default before the target could replace it in this module.
        """
        head, began = item.stash[HEAD], time.perf_counter()

        def run() -> None:
            self.pytest_runtest_setup(item)
            self._call(item, {"impl": self.surface, **_parameters(item)})

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = error_of(run)
        found = found_in(item, error)
        if error is not None and found["outcome"] == "fail":
            found["cause"] = self._causes.of(head["clauses"], _parameters(item), original(error))
            if self._sought is not None:
                self._sought -= set(head["clauses"])
        return {**head, "seconds": round(time.perf_counter() - began, 4), **found}

    def _untouched(self, item: Any, record: Head) -> Head:
        """Return the record, or an error if the target has replaced a function that decides about cases."""
        if self._integrity is not None:
            self._replaced = self._replaced or self._integrity.changed()
        replaced = self._replaced
        if not replaced:
            return record
        return {**record, "outcome": "error", "expected": UNTOUCHED, "seen": f"{replaced} was replaced"}

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip a case whose area, or a name that it needs, the implementation does not claim."""
        if HEAD in item.stash:
            on_cpu = torch.device(self.device).type == "cpu"
            if reason := why_not_on(torch.device(self.device), item):
                pytest.skip(reason)
            if on_cpu and _needs_accelerator(item.stash[HEAD]):
                pytest.skip("needs an accelerator")
            areas, needs = _areas(item.stash[HEAD]["clauses"]), item.stash[_NEEDS]
            missing = sorted(areas - self.claimed)
            missing += [name for name in needs if self.surface.lacks(name)]
            dtype = item.stash[HEAD]["dtype"] or "float32"  # the dtype of cases that take none
            if dtype not in self.implementation.dtypes_on(self.device):
                missing.append(dtype)
            across = not any(spec.areas()[area].names for area in areas)
            if across and not any(self.surface.claims(name.partition(".")[0]) for name in needs):
                missing += needs  # a case in which only classes of other libraries take part
            if missing:
                pytest.skip(f"{NOT_CLAIMED}: {', '.join(missing)}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Call a case without the runner."""
        if HEAD not in pyfuncitem.stash:
            return None
        self._call(pyfuncitem, pyfuncitem.funcargs)
        return True

    def _call(self, item: Any, values: Mapping[str, Any]) -> None:
        """Call a case in its situation."""
        in_its_situation(item, lambda name: self._call_in(name, item, values), self.implementation)

    def _call_in(
        self, situation: str, item: Any, values: Mapping[str, Any], error_of: Any = error_of
    ) -> None:
        """Call a case with fresh seeds, and keep the returned observation."""
        head, function = item.stash[HEAD], item.obj
        arguments = {name: values[name] for name in item._fixtureinfo.argnames}
        self._note_inputs(item, arguments)
        if situation:
            arguments["impl"] = among(arguments["impl"], situation)
        if hasattr(function, "hypothesis"):
            note_draws(function, functools.partial(self._note_inputs, item))
        if self._steps is None:
            self._steps = steps_of(self.surface)
        undo = functools.partial(fresh, self._steps)
        begin_case(f"{self._option('--implementation')} {head['case']}", undo)
        seen = self._device_seen(item)
        self.implementation.ran()

        def run() -> None:
            head["observed"] = plain(function(**arguments))
            if situation:
                arguments["impl"].check()

        try:
            with undo(), seen or contextlib.nullcontext():
                error = error_of(run)
            if error is not None:
                raise error
        except CannotRun as error:
            pytest.skip(str(error))
        except MissingName as error:
            if not self.surface.claims(str(error.name)):
                pytest.skip(f"{NOT_CLAIMED}: {error.name}")
            raise
        except (unittest.SkipTest, pytest.exit.Exception) as error:
            raise Escaped(error) from None
        except Exception as error:
            factories = [place.rpartition(":")[2] for place in self.implementation.names.values()]
            if missing := unclaimed(error, item.stash[_NEEDS], factories):
                pytest.skip(f"{NOT_CLAIMED}: {missing}")
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and self.writer is None:
                raise  # Ctrl-C without the runner
            raise Escaped(error) from None
        finally:
            if torch.device(self.device).type != "cpu":
                head["device"] = seen.device if seen is not None else None
            ran = self.implementation.ran()
            head["backend"] = ran or None
            if situation:
                head["built"] = "+".join(arguments["impl"].built)
            left = self._error_left(seen, undo)
        if why := self.implementation.another_ran(ran):
            pytest.skip(why)
        if seen is not None and seen.device not in (None, self.device):
            pytest.skip(f"the implementation ran on {seen.device} only, not on {self.device}")
        if left is not None:
            raise Mismatch("no error that comes after the case", error_text(left))

    def _error_left(
        self, seen: DeviceSeen | None, undo: Any, error_of: Any = error_of
    ) -> BaseException | None:
        """Return the error that a case left on the device, so that the next case does not get it."""
        if seen is None or seen.device is None:
            return None
        found: list[BaseException | None] = []
        with undo():
            raised = error_of(lambda: found.append(error_left(self.surface)))
        error = raised or found[0]
        self._lost = error is not None and not works()
        return error

    def _device_seen(self, item: pytest.Item) -> DeviceSeen | None:
        """Return an observer of where the implementation runs: not on the CPU, nor in ranks."""
        if torch.device(self.device).type == "cpu" or item.get_closest_marker("on_ranks"):
            return None
        if self._packages is None:
            places = {place.partition(":")[0] for place in self.surface.places().values()}
            bases = {str(base.__module__) for base in self._steps or ()}
            self._packages = packages_of(places | {name for name in bases if not name.startswith("torch.")})
        return DeviceSeen(self.device, self._packages)

    def _note_inputs(self, item: Any, arguments: Mapping[str, Any]) -> None:
        head = item.stash[HEAD]
        head["inputs"] = self._inputs.data_of({**arguments, **as_input(item)})
        if self.writer:
            self.writer.inputs(head["inputs"])


def _parameters(item: Any) -> Mapping[str, Any]:
    """Return the literal inputs of a case."""
    return item.callspec.params if hasattr(item, "callspec") else {}


def turn(item: pytest.Item) -> int:
    """Return when a case is begun: first those that fork ranks, before others start threads of autograd.

    The worker that takes these also takes those that compile: no other has to import torch's compilers.
    """
    if item.get_closest_marker("on_ranks"):
        return 0
    name = case_name(item) if HEAD in item.stash else ""
    if "compile" in name or "export" in name:
        return 1
    return 2 if any(part in name for part in LONGEST) else 3


def _is_case(module: Any) -> bool:
    return str(module.__name__).startswith("keyedopt.conformance.suite.")


def _needs_accelerator(head: Head) -> bool:
    return all(spec.clauses()[clause].accelerator for clause in head["clauses"])


def _areas(clauses: list[str]) -> set[str]:
    return {spec.clauses()[clause].area for clause in clauses if clause in spec.clauses()}
