"""A plan in stages, run by JAX."""
