"""Plans: what a strategy means, item by item, and the file that holds it."""
