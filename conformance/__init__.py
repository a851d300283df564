"""Conformance: the clauses, the suite that checks them, and the runner that gives a verdict."""
