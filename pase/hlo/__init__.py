"""Programs that XLA compiled, as it serializes them: what they send, how often, and how long by its own estimates."""
