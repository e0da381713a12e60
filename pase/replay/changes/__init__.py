"""Changes measured graphs, and searches for changes that make a run faster."""
