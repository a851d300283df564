"""The cases of the area algorithms."""
