"""Hosts with a slow network between them, on one Linux machine: what is predicted is measured there."""
