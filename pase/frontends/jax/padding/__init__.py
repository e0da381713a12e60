"""JAX programs with some extents padded."""
