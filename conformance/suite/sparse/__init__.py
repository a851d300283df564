"""The cases of the area sparse."""
