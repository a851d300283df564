"""Steps with dense gradients: norms, clipping and kernels."""
