"""Plans: a strategy with everything that follows from it, and the file that holds it."""
