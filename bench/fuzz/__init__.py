"""Random programs and damaged files: an answer or one clear error, never a crash or a wrong answer."""
