"""The PyTorch frontend."""
