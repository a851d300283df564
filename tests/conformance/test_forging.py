"""The table of attacks: an implementation that fails a clause tries to write its own verdict.

One tries it with a clause that has only one case, and one with a clause about the numbers of loaded state.
"""

import contextlib
import json
import runpy
import sys
from pathlib import Path

import pytest
from making import TARGETS, module

from keyedopt.conformance.results.verdict import failing, judge
from keyedopt.conformance.run import runner
from keyedopt.conformance.run.integrity import Integrity
from keyedopt.conformance.run.protocol import Channel, Reader, sender
from keyedopt.conformance.run.runner import Options

#: Slow tests: so many of these every day.
slow = pytest.mark.complete(loop=__name__, sample=1, spread=True)

REPLACED = "was replaced"
#: The attack -> the outcome of the case that fails without it, and a part of what is seen.
ATTACKS = {
    "arguments": ("fail", ""),
    "torch_equal": ("error", f"torch.equal {REPLACED}"),
    "torch_allclose": ("error", f"torch.allclose {REPLACED}"),
    "torch_isnan": ("error", f"torch.isnan {REPLACED}"),
    "tensor_eq": ("error", f"Tensor.__eq__ {REPLACED}"),
    "operator": ("error", f"gives a wrong answer {REPLACED}"),
    "builtin": ("error", f"builtins.all {REPLACED}"),
    "subclass": ("pass", ""),
    "mode": ("error", f"by a mode that was not left, {REPLACED}"),
    "suite_functions": ("pass", ""),
    "suite_error": ("fail", ""),
    "pytest_function": ("fail", ""),
    "engine_record": ("fail", ""),
    "engine_late": ("fail", ""),
    "null_context": ("error", f"nullcontext.__exit__ {REPLACED}"),
    "generator_context": ("error", f"_GeneratorContextManager.__exit__ {REPLACED}"),
    "kept_context": ("error", f"_GeneratorContextManager.__exit__ {REPLACED}"),
    "warnings_context": ("error", f"catch_warnings.__exit__ {REPLACED}"),
    "deciding_function": ("fail", ""),
    "cleaning_function": ("fail", ""),
    "json_function": ("fail", ""),
    "json_encoder": ("fail", ""),
    "collected_cases": ("pass", ""),
    "exit_with_success": ("error", "crash: exit status 0"),
    "frames": ("error", "tampered"),
    "engine_object": ("pass", ""),
    "channel": ("pass", ""),
}
#: What the page about trust says of an outcome.
WORDS = {
    "fail": "has no effect: the case fails",
    "error": "the case is an error that names the cause",
    "pass": "**not detected**: the case passes",
}
TRUST = Path(__file__).parents[2] / "conformance" / "TRUST.md"


def table(outcomes):
    """Return the rows of the page about trust: what each attack does, and the outcome of the case."""
    functions = runpy.run_path(f"{TARGETS}/forging.py")
    said = {name: functions[name].__doc__.splitlines()[0].rstrip(".") for name in outcomes}
    lines = [f"| {said[name]} | {WORDS[outcome]} |" for name, outcome in outcomes.items()]
    return "\n".join(["| attack | outcome |", "|---|---|", *lines])


def test_the_page_about_trust_has_the_attacks_that_are_tried():
    expected = table({name: outcome for name, (outcome, _) in ATTACKS.items()})
    assert expected in TRUST.read_text(encoding="utf-8"), f"the table of attacks is now:\n{expected}"


@pytest.mark.complete(sample=3)
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_on_the_verdict_has_the_outcome_of_the_table(name, failed, acme, tmp_path, record_property):
    clause, source = failing(judge(failed))[0], f"from acme import *\nimport acme, forging\nname = {name!r}\n"
    if name == "subclass":
        clause = "KEYED-073"
    if name == "channel":
        clause, source = "KEYED-007", f"{source}acme.KeyedOptimizer.load_state_dict = lambda *_: None\n"
    kind = "KeyedOptimizer" if name == "channel" else "KeyedOptimizerWrapper"
    module(tmp_path, "forger", f"{source}forging.attack(name, [acme.{kind}])\n")
    options = Options(clauses=(clause,), workers=1)
    found = runner.run("forger", options, path=[str(tmp_path), TARGETS, str(acme["wrong"])])
    outcomes = {case.outcome for case in found.cases} - {"unsupported"}
    outcome = next((each for each in ("error", "fail") if each in outcomes), "pass")
    record_property(name, outcome)
    expected, seen = ATTACKS[name]
    assert outcome == expected, found.cases
    assert judge(found).green == (outcome == "pass")
    assert any(case.outcome == outcome and seen in case.seen for case in found.cases), found.cases


@slow
def test_writing_to_every_descriptor_ends_the_run(failed, acme, tmp_path):
    module(tmp_path, "forger", "from acme import *\nimport forging\nforging.descriptors()\n")
    with pytest.raises(runner.RunError, match="tampered: a message came that the worker did not write"):
        runner.run("forger", Options(workers=1), path=[str(tmp_path), TARGETS, str(acme["wrong"])])


@slow
def test_an_attack_in_a_rank_fails_the_case(tmp_path):
    module(
        tmp_path,
        "forger",
        "from torch.distributed.optim import _apply_optimizer_in_backward as fails\n"
        "import forging, torch\n"
        "def apply_optimizer_in_backward(*given):\n"
        "    if torch.distributed.is_initialized(): forging.torch_equal()\n"
        "    fails(*given)\n",
    )
    options = Options(areas=("sharded",), clauses=("SHARD-020",), workers=1)
    found = runner.run("forger", options, path=[str(tmp_path), TARGETS])
    assert {case.outcome for case in found.cases} == {"fail"}
    assert any(f"torch.equal {REPLACED}" in case.seen for case in found.cases)


def test_nothing_is_replaced_by_the_tests_themselves():
    assert Integrity().changed() == ""


@pytest.fixture
def channel():
    made = Channel()
    send = sender(made.theirs.detach())
    yield made, send, Reader(made.messages, stack=None)
    made.close()


def _end(name):
    return {"end": {"case": name, "outcome": "pass"}}


def _start(name):
    return {"start": {"case": name, "clauses": ["KEYED-001"]}}


def test_a_record_counts_after_its_start_and_end(channel):
    _, send, reader = channel
    for message in (_start("a"), _end("a"), _start("b")):
        send(message)
    assert [record["case"] for record in reader.new()] == ["a"]
    assert reader.running() == 2
    send(_end("b"))
    assert [record["case"] for record in reader.new(last=True)] == ["b"]


@pytest.mark.parametrize(
    "messages",
    [
        [_end("a")],
        [_start("a"), _end("b")],
        [_start("a"), _end("a"), _end("a")],
        [_start("a"), _start("b")],
        [_start("a"), _end("a"), _start("a")],
        [_start("a"), {"collected": {}}],
        [{"inputs": {}}],
    ],
)
def test_messages_out_of_order_count_for_nothing(channel, messages):
    _, send, reader = channel
    for message in messages:
        send(message)
    assert reader.new(last=True) == []
    assert reader.forged


@pytest.mark.parametrize(
    "line", [b"words", b"[]", b'{"end": 1}', b'{"start": {}}', b'{"end": {}, "start": {}}']
)
def test_what_a_worker_does_not_write_is_refused(line):
    made = Channel()
    start = json.dumps(_start("a")).encode()
    made.theirs.sendall(start + b"\n" + line + b"\n")
    reader = Reader(made.messages, stack=None)
    assert reader.new(last=True) == []
    assert reader.forged
    assert reader._head["case"] == "a", "the running case is an error"
    made.theirs.close()
    made.close()


class Outcomes(dict):
    """Outcomes that tests recorded, of a run of pytest."""

    def pytest_runtest_logreport(self, report):
        self.update(report.user_properties if report.when == "call" else ())


if __name__ == "__main__":
    outcomes = Outcomes()
    attacks = ["-q", "-n", "0", "--complete", "-k", "attack_on_the_verdict", "-o", "addopts=-p no:logging"]
    with contextlib.redirect_stdout(sys.stderr):
        code = pytest.main([__file__, *attacks], [outcomes])
    print(table(outcomes))
    sys.exit(code)
