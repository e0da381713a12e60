"""The problem to solve: its options, variants and prices."""
