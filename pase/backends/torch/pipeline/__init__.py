"""Runs a pipelined plan in PyTorch."""
