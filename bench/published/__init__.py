"""Published measurements, predicted: each run in its own configuration, and next to what pase would choose."""
