"""The search over meshes, within a memory limit."""
