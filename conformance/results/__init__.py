"""The result of a run: its model, schema and verdict, the formats it is written in, untrusted text."""

#: The rule of the verdict; the command line, the page and the documentation show this sentence.
RULE = (
    "An implementation is conformant if no must clause failed and every must clause of each claimed area was "
    "checked. It is partly checked if no must clause failed and each claimed area has a must clause that was "
    "checked. Otherwise it is not conformant, or could not be judged: its classes take no step."
)
