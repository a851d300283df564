"""The cases of the area in_backward."""
