"""One file per CLI command."""
