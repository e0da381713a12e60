"""Random programs and damaged files: each must give an answer or a clear error, never a crash or a wrong answer."""
