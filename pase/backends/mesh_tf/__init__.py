"""Writes, checks and runs Mesh-TensorFlow programs."""
