"""What traces say of a run: clocks, iterations, tasks, times."""
