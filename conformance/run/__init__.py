"""Running the suite: processes, pytest, and what goes between them."""
