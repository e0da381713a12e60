"""A plan in JAX: its functions, its train step, and the check of its gradients."""
