"""Runs the local program of a plan in PyTorch, on one rank."""
