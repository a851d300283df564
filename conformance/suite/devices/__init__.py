"""The cases of the area devices."""
