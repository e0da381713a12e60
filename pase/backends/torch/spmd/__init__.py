"""The local program of a plan, run by PyTorch on one rank."""
