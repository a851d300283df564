"""The result of a run: its model, schema and verdict, the formats it is written in, untrusted text."""

#: The rule of the verdict; the command line, the page and the documentation show this sentence.
RULE = (
    "An implementation is conformant if no must clause failed and every must clause of each area that it "
    "claims was checked; it is partly checked if no must clause failed and some, but in no area all, could "
    "not be checked; otherwise it is not conformant."
)
