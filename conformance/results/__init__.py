"""The result of a run: its model, schema and verdict, the formats it is written in, untrusted text."""

#: The three definitions: the command line, the page and the documentation show these sentences.
LEVELS = (
    "A must is said by a document. A should follows from a document, or production relies on it. A recorded "
    "clause has no right answer: the suite records what the implementation does."
)
RULE = (
    "An implementation is conformant if no must clause failed and every must clause of each claimed area was "
    "checked. It is partly checked if no must clause failed and each claimed area has a must clause that was "
    "checked. Otherwise it is not conformant, or could not be judged: its classes take no step."
)
GATE = (
    "The gate is green if only known failures failed at its level, nothing crashed or hung, the list of "
    "known failures is true, and the musts of each required area and one of each claimed area were checked. "
    "Otherwise it is red."
)
DEFINITIONS = {"level": LEVELS, "verdict": RULE, "gate": GATE}
