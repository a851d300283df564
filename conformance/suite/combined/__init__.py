"""The cases of the area combined."""
