"""Reads and writes files of traces."""
