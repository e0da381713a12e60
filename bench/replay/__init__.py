"""Benches of how accurate and how fast replays and what-ifs of traces are."""
