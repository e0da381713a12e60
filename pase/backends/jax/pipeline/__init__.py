"""Runs plans in stages (pipeline parallelism) in JAX."""
