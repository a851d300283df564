"""Scripts that compute the golden data, with mpmath and plain loops."""
