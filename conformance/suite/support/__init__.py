"""Helpers that the cases of the suite share."""
