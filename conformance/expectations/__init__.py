"""Known failures of published libraries, each with a reason and a reproducer; data only."""
