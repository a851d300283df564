"""The cases of the area wrapper."""
