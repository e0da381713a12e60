"""Train steps under a plan: in micro-batches, with parameters gathered once, with updates in later steps."""
