"""What a search finds and how long it takes: models, meshes, memory limits, contest instances, other solvers."""
