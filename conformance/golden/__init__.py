"""Golden data: computed with mpmath from published formulas, stored with the scripts that make it."""
