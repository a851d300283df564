"""Run the suite: the runner, its worker processes, the pytest plugin, and replay."""
