"""The ONNX frontend."""
