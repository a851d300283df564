"""The summary of ``keyedopt check``: counts by area and level, failing clauses, the verdict."""

import dataclasses
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from keyedopt.conformance import spec
from keyedopt.conformance.results.model import Case, Result
from keyedopt.conformance.results.untrusted import one_line
from keyedopt.conformance.results.verdict import (
    FAILING,
    GREEN,
    UNSUPPORTED,
    Count,
    Verdict,
    cases_of,
    failing,
    followed,
    gating,
    judge,
    level_of,
    other_reasons,
    restrictions,
    shown_outcomes,
    worst_of,
)
from keyedopt.conformance.targets.find import registered
from keyedopt.conformance.targets.meaning import CLAIM

#: The colours of lines on a terminal.
STYLES = {"fail": "red", "error": "red", "unexpected-pass": "yellow", "known": "yellow"}
#: Columns of the lines about a failing clause, those behind the outcome, the fewest of a cut text.
WIDTH, ROOM, LEAST = 110, 104, 30


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True)


def ran(result: Result) -> str:
    """Return the number of cases that ran, and the seconds. Other cases are not claimed, or could not run."""
    count = sum(case.outcome != "unsupported" for case in result.cases)
    return f"{_several(count, 'case')} in {result.seconds:.1f} s"


def show_all(judged: Mapping[str, tuple[Result, Verdict] | str], code: int) -> None:
    """Print one table of the verdicts on several targets, and the exit code.

    Args:
        judged: of each target the result and the verdict, or a text that says why there is none.
        code: the exit code, which is the largest of the targets.
    """
    table = Table(box=None, pad_edge=False)
    for column in ("target", "verdict", "gate", *spec.LEVELS[:2]):
        table.add_column(column)
    for target, found in judged.items():
        if isinstance(found, str):
            table.add_row(one_line(target), "no verdict: see above", "red", style="red")
            continue
        _, verdict = found
        rows = verdict.counts.values()
        ratios = [_ratio([row[level] for row in rows if level in row]) for level in spec.LEVELS[:2]]
        style = "green" if verdict.green else "red"
        table.add_row(one_line(target), one_line(verdict.headline), verdict.gate, *ratios, style=style)
    console = _console()
    console.print()
    console.print(table)
    lost = [target for target, found in judged.items() if isinstance(found, str)]
    red = [target for target, found in judged.items() if not isinstance(found, str) and not found[1].green]
    said = [f"no verdict on {', '.join(lost)}"] if lost else []
    said += [f"red: {', '.join(red)}"] if red else []
    console.print(one_line(f"exit {code}: {'; '.join(said) or 'all are green'}"))


def replay_command(
    clause: str, written: str | None = None, target: str = "", imports: Iterable[str] = ()
) -> str:
    """Return the command that repeats the failing case of a clause.

    Args:
        clause: its id.
        written: the file of the result; None is that of the last check.
        target: as it was given; a registered one needs no option.
        imports: the modules that the check imported first.
    """
    options = [] if not target or target in registered() else ["--target", target]
    options += [part for name in imports for part in ("--import", name)]
    return shlex.join(["keyedopt", "replay", *([written] if written else []), clause, "--run", *options])


def show(
    result: Result,
    verdict: Verdict,
    verbose: bool = False,
    again: Callable[[str], str] = replay_command,
) -> None:
    """Print what a run found, without the verdict; known failures are counted unless `verbose`.

    Args:
        result: of the run.
        verdict: on it.
        verbose: show known failures too.
        again: returns the command that repeats the failing case of a clause.
    """
    console = _console()
    about = result.implementation
    table = Table(box=None, pad_edge=False)
    table.add_column("area")
    for level in spec.LEVELS:
        table.add_column(level, justify="right")
    for area, row in verdict.counts.items():
        table.add_row(area, *(_ratio([row[level]] if level in row else []) for level in spec.LEVELS))
    rows = verdict.counts.values()
    table.add_section()
    table.add_row("all", *(_ratio([row[level] for row in rows if level in row]) for level in spec.LEVELS))
    console.print(table)
    if verdict.unsupported:
        console.print(f"areas that are not claimed: {', '.join(verdict.unsupported)}")
    outcomes = shown_outcomes(result)
    for word in UNSUPPORTED:
        if lost := [clause for clause in verdict.unchecked if outcomes[clause] == word]:
            console.print(f"{word}: {_few(lost)}")
    others = about.get("not_optimizers")
    if others:
        names = one_line(_few(others))
        console.print(
            f"not subclasses of torch.optim.Optimizer: {names}; this single cause makes many clauses about "
            "parameter groups, state and hooks fail",
            style="yellow",
        )
    if limits := restrictions(result):
        console.print(f"restricted, as its description says: {'; '.join(limits)}")
    for name, why in about.get("other_meanings", {}).items():
        console.print(one_line(f"not judged: {name} {why}. {CLAIM}"), style="yellow")
    known = [clause for clause in failing(verdict) if verdict.clauses[clause] == "known"]
    for clause in failing(verdict):
        if verbose or clause not in known:
            for line in failure_lines(result, clause, again(clause)):
                console.print(line, style=STYLES.get(verdict.clauses[clause]))
    if known and not verbose:
        console.print(f"{len(known)} known, unchanged (-v shows them)", style="yellow")
    for reason in other_reasons(verdict):
        console.print(one_line(f"red   {reason}"), style="red")
    repeated = [case.case for case in result.cases if case.runs > 1]
    if repeated:
        console.print(one_line(f"run once more, alone, after they reached the time limit: {_few(repeated)}"))
    for line in _annotations(result, verdict, again):
        print(line)


def show_gate(result: Result, verdict: Verdict, code: int | None) -> None:
    """Print the last lines: the verdict, the gate, the exit code, and why.

    Args:
        result: of the run.
        verdict: on it.
        code: the exit code; None if other targets decide about it, too.
    """
    console, about = _console(), result.implementation
    where = f"torch {result.environment['torch']}, {result.environment['device']}"
    if result.environment.get("backend"):
        where += f", backend {result.environment['backend']}"
    console.print(
        one_line(f"{about['name']} {about['version']} ({where}): {verdict.headline}; {verdict.checked}"),
        style="bold",
    )
    exits = "" if code is None else f" (exit {code})"
    why = ["its files could not be written"] if code == 2 and result.complete else []
    gate = "; ".join([f"gate: {verdict.gate}{exits}", *why, *_why(result, verdict), ran(result)])
    console.print(gate, style="green" if verdict.green and code != 2 else "red")


def _annotations(result: Result, verdict: Verdict, again: Callable[[str], str], most: int = 10) -> list[str]:
    """Return lines that GitHub Actions shows at the top of a run: as many of a kind as it shows of a step.

    What makes the gate red is an error; what fails below the level of the gate is a warning.
    """
    if os.environ.get("GITHUB_ACTIONS") != "true":
        return []
    red = gating(verdict)
    below = [each for each in failing(verdict) if verdict.clauses[each] in FAILING and each not in red]
    said = [("error", "the gate is red", reason) for reason in other_reasons(verdict)]
    for kind, clauses in (("error", red), ("warning", below)):
        for clause in clauses[:most]:
            text = "\n".join(map(str.strip, failure_lines(result, clause, again(clause))[1:]))
            said.append((kind, f"{clause} ({level_of(clause)})", text))
    return [f"::{kind} title=keyedopt {title}::{_escaped(text)}" for kind, title, text in said]


def _escaped(text: str) -> str:
    """Return a text as commands of GitHub Actions take it, with its line ends."""
    return "%0A".join(one_line(line) for line in text.replace("%", "%25").splitlines())


def _why(result: Result, verdict: Verdict) -> list[str]:
    """Return why the gate is what it is, in a few words."""
    if verdict.green:
        bad = [clause for clause in failing(verdict) if level_of(clause) != "recorded"]
        return ["all that fails is known or below the level of the gate"] if bad else []
    outcomes = [(level_of(clause), verdict.clauses[clause]) for clause in gating(verdict)]
    failed = Counter(level for level, outcome in outcomes if outcome in FAILING)
    passing = sum(outcome == "unexpected-pass" for _, outcome in outcomes)
    others = len(other_reasons(verdict)) - bool(verdict.incomplete)
    why = [verdict.incomplete] if verdict.incomplete else []
    if failed:
        listed = " that the list does not name" if result.expectations else ""
        why.append(
            f"{' and '.join(_several(count, level) for level, count in failed.items())} failed{listed}"
        )
    if passing:
        why.append(f"{_several(passing, 'known failure')} passed")
    if others:
        why.append(f"{_several(others, 'other reason')} above")
    options = {**result.options, "level": "must"}
    if not failed["must"] and judge(dataclasses.replace(result, options=options)).green:
        why.append("no must failed: with --level must the gate is green")
    return why


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def next_steps(verdict: Verdict, again: Callable[[str], str]) -> list[str]:
    """Return the commands that explain the first failing clause and repeat its case on the target.

    Args:
        verdict: of the check.
        again: returns the command that repeats the failing case of a clause.
    """
    new = [clause for clause in failing(verdict) if verdict.clauses[clause] in FAILING]
    bad = [*verdict.behind_causes, *new]
    return [f"why:   keyedopt explain {bad[0]}", f"again: {again(bad[0])}"] if bad else []


def _few(names: Sequence[str], many: int = 6) -> str:
    """Join names with commas; of a long list show only the first ones."""
    if len(names) <= many:
        return ", ".join(names)
    return f"{', '.join(names[: many - 1])} and {len(names) - many + 1} more"


def _ratio(counts: list[Count]) -> str:
    return f"{sum(c.passed for c in counts)}/{sum(c.total for c in counts)}" if counts else ""


def failure_lines(result: Result, clause: str, again: str = "") -> list[str]:
    """Return three lines about the most serious case of a clause: its promise, the situation, what was seen.

    The result file and `keyedopt replay` have the texts whole.

    Args:
        result: of the run.
        clause: its id.
        again: the command that repeats the case, for the end of the second line, where TARGET stands for a
            target that leaves no room.
    """
    worst = worst_of(result, clause)
    bad = [case for case in cases_of(result, clause) if case.outcome not in (*GREEN, "unsupported")]
    promise = spec.clauses()[clause].statement if clause in spec.clauses() else ""
    situation = situation_of(worst) or worst.case
    if before := followed(result, clause):
        situation = f"follows {', '.join(before)}: {situation}"
    if worst.outcome == "unexpected-pass":
        seen = "is listed as a known failure, but passes"
    elif worst.known:
        seen = f"known ({worst.known['link']}): {worst.known['reason']}"
    elif " differ, most by " in worst.seen:  # all the numbers are in the result file
        seen = _difference(re.sub(r"(?: of| to|,) \[.*", "", worst.expected), worst.seen.partition("; ")[0])
    else:
        seen = _compared(worst.expected, worst.seen)
    end = f" | {again}" if again else ""
    if len(end) > ROOM // 2:
        end = re.sub(r" --target \S+", " --target TARGET", end)
    if len(bad) > 1:
        end = f", and {_several(len(bad) - 1, 'more case')}{end}"
    first = f"{worst.outcome:5} {_cut(f'{clause} [{level_of(clause)}] {promise}', ROOM)}"
    second = _cut(f"{_cut(situation, max(LEAST, ROOM - len(end)))}{end}", ROOM)
    return [first, f"{'':6}{second}", f"{'':6}{_cut(seen, ROOM)}"]


def situation_of(case: Case) -> str:
    """Return what a case ran with: the algorithm with its options, other short inputs, the dtype.

    >>> made = {"kind": "sparse", "options": {"lr": 0.1}}
    >>> situation_of(Case("test", (), "fail", dtype="float32", inputs={"algorithm": "SGD", "made": made}))
    'SGD(lr=0.1), sparse, float32'
    """
    given = dict(case.inputs)
    made = given.pop("made", None)
    trajectory: dict[str, Any] = made if isinstance(made, dict) else {}
    options = trajectory.get("options")
    found = [str(given.pop("algorithm", ""))]
    if isinstance(options, dict) and options:
        found[0] += f"({', '.join(f'{name}={_literal(value)}' for name, value in options.items())})"
    if trajectory.get("kind") == "sparse":
        found.append("sparse")
    situation = str(given.pop("situation", ""))
    for name, value in given.items():
        if isinstance(value, dict) and name == "options":
            found += [f"{key}={_literal(one)}" for key, one in value.items() if len(_literal(one)) <= LEAST]
        elif len(_literal(value)) <= LEAST:
            found.append(f"{name} {_literal(value)}")
    return ", ".join(filter(None, [*found, case.dtype, situation and f"in the situation {situation}"]))


def _literal(value: Any) -> str:
    """Return the text of an input, which is JSON data, or Python for what JSON lacks, such as nan."""
    return str(value["python"] if isinstance(value, dict) and value.keys() == {"python"} else value)


def _difference(expected: str, seen: str) -> str:
    """Return what was expected, how many elements differ, the greatest difference and where.

    If there is no room, the two values are left out, and then a part of what was expected.
    """
    if len(one_line(f"{expected}: {seen}")) > ROOM:
        seen = seen.rpartition("]: ")[0] + "]" if "]: " in seen else seen
    return f"{_cut(expected, max(LEAST, ROOM - len(one_line(seen)) - 2))}: {seen}"


def _compared(expected: str, seen: str) -> str:
    """Return both texts; what does not fit is cut, and a short one leaves its room to the other."""
    room = ROOM - len("expected ; seen ")
    expected = _cut(expected, max(room // 2, room - len(one_line(seen))))
    return f"expected {expected}; seen {seen}"


def _cut(text: str, width: int) -> str:
    """Return a text on one line of at most so many columns."""
    line = one_line(text)
    return line if len(line) <= width else f"{line[: width - 3]}..."
