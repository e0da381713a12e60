"""Benches of the search: its results and times on models, meshes, memory limits and contest instances."""
