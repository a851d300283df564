"""Steps on rows: sparse gradients, and windows that accumulate them."""
