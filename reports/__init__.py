"""Results in, understanding out: tables, plots and one self-contained page."""
