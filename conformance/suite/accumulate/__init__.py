"""The cases of the area accumulate."""
