"""Search in bounded memory, for problems that elimination cannot solve."""
