"""Measured graphs with changes, and the optimizer that looks for them."""
