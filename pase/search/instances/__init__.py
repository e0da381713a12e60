"""Instances of problems from files."""
