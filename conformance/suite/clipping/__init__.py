"""The cases of the area clipping."""
