"""A plan run by PyTorch: ``plan.torch``."""
