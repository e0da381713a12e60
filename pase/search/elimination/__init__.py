"""Exact elimination."""
