"""Pages and schemas that are generated, and how they look and read."""
