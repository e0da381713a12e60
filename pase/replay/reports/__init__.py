"""Findings about a run, and reports of them."""
