"""Machine files: those of the package, and the errors for broken ones."""
