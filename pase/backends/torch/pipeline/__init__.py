"""A plan in stages, run by PyTorch."""
