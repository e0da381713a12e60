"""The TensorFlow frontend."""
