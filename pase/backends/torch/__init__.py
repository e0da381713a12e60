"""Runs a plan in PyTorch: ``plan.torch``."""
