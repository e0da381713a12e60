"""The replay of a measured graph."""
