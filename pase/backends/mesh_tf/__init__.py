"""Mesh-TensorFlow programs: how they are made, checked and run."""
