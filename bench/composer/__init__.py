"""Programs composed from patterns that people write, and compared with the unsharded step."""
