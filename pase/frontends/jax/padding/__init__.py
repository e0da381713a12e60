"""JAX programs in which some extents are padded."""
