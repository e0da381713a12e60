"""Elimination within limits on sums of bytes."""
