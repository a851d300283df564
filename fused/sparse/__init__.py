"""Steps with sparse gradients, and windows that accumulate gradients."""
