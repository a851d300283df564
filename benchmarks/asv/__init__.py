"""asv: the suites that it runs, its results over time, and the name of this machine."""
