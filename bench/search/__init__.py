"""Benches of the search: results and times on models, meshes, memory limits and contest instances, and other solvers."""
