"""Traces of a running program."""
