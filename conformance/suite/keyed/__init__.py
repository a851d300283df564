"""The cases of the area keyed."""
