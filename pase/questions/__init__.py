"""Questions about a plan: where its seconds come from, what alternatives cost, how robust the answer is."""
