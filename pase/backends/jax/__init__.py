"""The JAX backend: a plan's functions, its train step, and the check of its gradients."""
