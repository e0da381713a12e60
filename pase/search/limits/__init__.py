"""Search by elimination under limits on sums of bytes."""
