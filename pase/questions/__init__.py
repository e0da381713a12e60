"""Questions to a plan: where its seconds come from, what else would cost, how far the answer holds."""
