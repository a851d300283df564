"""Makers of the golden data, in mpmath and plain loops."""
