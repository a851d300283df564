"""The lines about a failing clause: what is shown where there is little room."""

import dataclasses

from keyedopt.cli.summary import WIDTH, failure_lines, situation_of
from keyedopt.conformance.results import model as results
from keyedopt.conformance.results.verdict import failing, judge


def test_what_was_seen_has_the_room_that_what_was_expected_leaves(failed):
    clause = failing(judge(failed))[0]

    def line(expected, seen):
        cases = [dataclasses.replace(case, expected=expected, seen=seen) for case in failed.cases]
        return failure_lines(dataclasses.replace(failed, cases=tuple(cases)), clause)[2]

    long = "x" * 200
    assert [len(line(*both)) for both in (("a", long), (long, "b"), (long, long))] == [WIDTH] * 3
    assert line("short", long).startswith("      expected short; seen xxx")
    assert line(long, "short").endswith("...; seen short")
    assert "...; seen xxx" in line(long, long)


def test_a_failure_says_the_optimizer_its_options_the_dtype_and_how_to_repeat_it(failed):
    clause = failing(judge(failed))[0]
    made = {"options": {"lr": 0.5, "momentum": 0.9}, "kind": "sparse", "steps": [1] * 99}
    inputs = {"algorithm": "SGD", "made": made, "place": 1, "long": "x" * 40}
    several = "12 of 12 differ, most by 0.25 at [0]: 1.5, not 1.25; [1.5"

    def second(again, inputs=inputs):
        more = {"inputs": inputs, "dtype": "float32", "expected": "it within 1e-12 of [1.25", "seen": several}
        cases = [dataclasses.replace(failed.cases[0], clauses=(clause,), outcome="fail", **more)]
        lines = failure_lines(dataclasses.replace(failed, cases=tuple(cases)), clause, again)
        assert lines[2] == "      it within 1e-12: 12 of 12 differ, most by 0.25 at [0]: 1.5, not 1.25"
        assert len(lines[1]) <= WIDTH
        return lines[1].strip()

    said = "SGD(lr=0.5, momentum=0.9), sparse, place 1, float32"
    assert second("keyedopt replay X") == f"{said} | keyedopt replay X"
    assert second("") == said
    assert second(f"keyedopt replay X --target {'y' * 90}") == f"{said} | keyedopt replay X --target TARGET"
    assert second("keyedopt replay X", {"algorithm": "A" * 200}).endswith("AAA... | keyedopt replay X")


def test_a_long_failure_keeps_the_number_of_cases_the_difference_and_its_place(failed):
    clause = failing(judge(failed))[0]
    more = {"inputs": {f"input_{number}": "x" * 20 for number in range(9)}, "expected": f"{'y' * 90} of [1.0"}

    def lines(seen):
        more["seen"] = f"{seen}; [1.5, 2.5"
        case = dataclasses.replace(failed.cases[0], clauses=(clause,), outcome="fail", **more)
        cases = (case, *(dataclasses.replace(case, case=f"{case.case}{number}") for number in range(33)))
        result = dataclasses.replace(failed, cases=cases)
        found = failure_lines(result, clause, "keyedopt replay X --run --target acme")
        assert max(map(len, found)) <= WIDTH
        return found

    _, situation, seen = lines("12 of 12 differ, most by 2.49e+06 ULP at [1, 2]: -0.719074, not -0.588929")
    assert situation.endswith("..., and 33 more cases | keyedopt replay X --run --target acme")
    assert seen.endswith("yyy...: 12 of 12 differ, most by 2.49e+06 ULP at [1, 2]")
    assert lines(f"1 of 2 differ, most by {'9' * 300}")[2].endswith("999...")


def test_options_of_a_case_are_named_in_its_situation():
    given = {"algorithm": "SGD", "options": {"momentum": 0.9, "nesterov": True}, "value": {"python": "nan"}}
    case = results.Case("test", (), "fail", inputs=given)
    assert situation_of(case) == "SGD, momentum=0.9, nesterov=True, value nan"
