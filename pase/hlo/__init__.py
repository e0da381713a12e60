"""Reads programs compiled by XLA: their collectives, the trip counts of their loops, and XLA's own cycle estimates."""
