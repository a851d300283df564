"""``python -m keyedopt``: the command line, as the command ``keyedopt`` starts it."""

from keyedopt.cli.start import main

main()
