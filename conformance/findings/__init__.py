"""Defects found in published libraries: one script each, of torch and that library alone."""
