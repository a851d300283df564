"""Results made by hand or at random, for tests of the verdict."""

import dataclasses
import random

from making import result

from keyedopt.conformance import spec
from keyedopt.conformance.results.model import Case

AREAS = tuple(spec.areas())


def usual(clause):
    """Return the outcome of a clause that holds."""
    return "observed" if clause.level == "recorded" else "pass"


def whole(name="acme", areas=("wrapper",), outcomes=None, options=None, **changes):
    """Make a result in which every clause of the claimed areas holds, except for the outcomes given.

    Args:
        name: the name of the implementation.
        areas: the claimed areas; clauses of others are unsupported.
        outcomes: outcomes by clause, or by level; None means that the clause was not run.
        options: options of the run.
        changes: other members of the result.
    """
    outcomes = outcomes or {}
    cases = []
    for clause in spec.clauses().values():
        held = usual(clause) if clause.area in areas else "unsupported"
        by_level = outcomes.get(clause.level, held) if clause.area in areas else held
        outcome = outcomes.get(clause.id, by_level)
        if outcome is not None:
            cases.append(Case(f"test_{clause.area}::test_it[{clause.id}]", (clause.id,), outcome))
    made = result(options={"level": "should", **(options or {})}, **changes)
    about = {**made.implementation, "name": name, "areas": list(areas)}
    return dataclasses.replace(made, implementation=about, cases=tuple(cases))


def musts(area):
    """Return the ids of the musts of an area."""
    return [clause.id for clause in spec.areas()[area].clauses if clause.level == "must"]


#: In a third of the results all that fails, and is not known, has one cause.
CAUSE = {"class": "Adam", "error": "OSError: no kernel"}


def drawn(seed):
    """Make a result at random: claims, options, outcomes, missing and unknown clauses, interruption."""
    dice = random.Random(seed)
    share = dice.choice([0.0, 0.1, 0.5, 0.5, 1.0])
    areas = [area for area in AREAS if dice.random() < share]
    lost = {area: dice.choice([0.0, 0.0, 0.1, 0.9, 1.0]) for area in areas}
    bad = dice.choice([0.0, 0.0, 0.01, 0.2])
    cases = []
    for clause in spec.clauses().values():
        for number in range(dice.choice([1, 1, 2])):
            outcome = usual(clause)
            if clause.area not in areas or dice.random() < lost[clause.area]:
                outcome = "unsupported"
            elif dice.random() < bad:
                outcome = dice.choice(["fail", "error", "known", "unexpected-pass"])
            if dice.random() >= bad / 20:  # otherwise the case is missing
                name = f"test_{clause.area}::test_it[{clause.id}-{number}]"
                cause = CAUSE if seed % 3 == 0 and outcome in ("fail", "error") else {}
                cases.append(Case(name, (clause.id,), outcome, cause=cause))
    if dice.random() < 0.1:
        cases.append(Case("test_gone::test_it", ("GONE-001",), "fail"))
    options = {"level": dice.choice(["must", "should"])}
    if dice.random() < 0.3:
        options["areas"] = dice.sample(AREAS, 3)
    if dice.random() < 0.2:
        options["clauses"] = dice.sample(list(spec.clauses()), 20)
    if dice.random() < 0.2:
        options["dtypes"] = ["float32"]
    if dice.random() < 0.3:
        options["require_areas"] = dice.sample(AREAS, 2)
    if dice.random() < 0.2:
        options["suite"] = spec.SUITE_VERSION
    problems = ["stale: KEYED-001 names the case x, which does not exist"] if dice.random() < 0.1 else []
    made = result(options=options, complete=dice.random() < 0.8, expectations={"problems": problems})
    about = {**made.implementation, "name": f"drawn{seed}", "areas": areas}
    return dataclasses.replace(made, implementation=about, cases=tuple(cases))
