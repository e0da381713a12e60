"""Benches of communication schedules: bucket plans of every policy, and training under them."""
