"""Exports a PyTorch module as a graph of ATen ops."""
