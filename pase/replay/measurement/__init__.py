"""Measures a run from its traces: clocks, iterations, tasks and times."""
