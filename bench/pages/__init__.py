"""Generated pages and schemas, and checks of how they look."""
