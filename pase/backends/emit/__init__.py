"""Plans written for other programs, one module for each. Modules that register a ``Backend`` are found
automatically."""
