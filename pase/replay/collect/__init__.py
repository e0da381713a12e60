"""Collects traces of a running program."""
