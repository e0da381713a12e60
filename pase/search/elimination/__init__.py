"""Exact search by elimination of nodes."""
