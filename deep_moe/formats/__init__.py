"""Number formats, and weights in the layouts that kernels read."""
