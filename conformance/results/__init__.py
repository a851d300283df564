"""The result of a run: its model, schema and verdict, the formats it is written in, untrusted text."""

#: The three definitions: the command line, the page and the documentation show these sentences.
LEVELS = (
    "A must is said by a document. A should follows from a document, or production use relies on it. A "
    "recorded clause has no right answer: the suite records what the implementation does, without a verdict."
)
RULE = (
    "An implementation is conformant if no must clause failed and every must clause of each claimed area was "
    "checked. It is partly checked if no must clause failed and each claimed area has a must clause that was "
    "checked. Otherwise it is not conformant, or could not be judged: its classes take no step."
)
GATE = (
    "The gate is green if only known failures failed at its level, no case of any level crashed or hung, the "
    "list of known failures is true, and a must of each claimed area, and every must of each required area, "
    "was checked. Otherwise it is red, and the exit code is 1."
)
DEFINITIONS = {"level": LEVELS, "verdict": RULE, "gate": GATE}
