"""Steps on dense parameters: norms, clipping and kernels."""
