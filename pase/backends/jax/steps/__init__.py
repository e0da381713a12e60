"""Train steps under a plan: with micro-batches, with hoisted all-gathers of parameters, and with delayed updates."""
