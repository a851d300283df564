"""``python -m keyedopt.conformance.mutants [AREA | NAME]...``: does the suite reject every mutant?

Prints a line a mutant, then the score, and the clauses that no mutant proves. With ``--all`` every case
of the suite is run on each mutant, so that every clause that rejects it is credited; without, only the
clauses that are said to notice. Exits with 1 if a mutant survives.
"""

import argparse
import dataclasses
import os
import sys
import tempfile
from pathlib import Path

from keyedopt.conformance import mutants, runner, spec
from keyedopt.conformance.verdict import FAILING, clause_outcomes


def reject(mutant: mutants.Mutant, options: runner.Options, everything: bool) -> tuple[set[str], str]:
    """Return the clauses that reject a mutant, and what is wrong with it, if anything."""
    with tempfile.TemporaryDirectory(prefix="keyedopt-") as folder:
        name = mutants.plant(mutant, Path(folder))
        before = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, before]))
        try:
            clauses = () if everything else mutant.rejected_by
            result = runner.run(name, dataclasses.replace(options, clauses=clauses))
        except runner.RunError as error:
            return set(), f"could not be run: {error}"
        finally:
            os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
    outcomes = clause_outcomes(result)
    rejecting = {clause for clause, outcome in outcomes.items() if outcome in FAILING}
    silent = [clause for clause in mutant.rejected_by if clause not in rejecting]
    return rejecting, f"not rejected by {', '.join(silent)}" if silent else ""


def main() -> int:
    """Run the mutants named on the command line, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="areas or names of mutants; default: all")
    parser.add_argument("--all", action="store_true", help="run the whole suite on each")
    arguments = parser.parse_args()
    known = mutants.mutants()
    chosen = [
        mutant
        for mutant in known.values()
        if not arguments.names or {mutant.area, mutant.name} & set(arguments.names)
    ]
    if not chosen:
        parser.error(f"there is no area or mutant {' '.join(arguments.names)!r}")
    proven: set[str] = set()
    survivors = 0
    for mutant in chosen:
        rejecting, problem = reject(mutant, runner.Options(limit=20, workers=1), arguments.all)
        proven |= rejecting
        survivors += bool(problem)
        print(f"{mutant.name:40} {problem or 'rejected'}", flush=True)
    print(f"rejected {len(chosen) - survivors} of {len(chosen)} mutants")
    areas = {mutant.area for mutant in chosen}
    unproven = [
        clause.id
        for clause in spec.clauses().values()
        if clause.area in areas and clause.level != "observe" and clause.id not in proven
    ]
    print(f"unproven clauses (no mutant is rejected by them): {', '.join(unproven) or 'none'}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
