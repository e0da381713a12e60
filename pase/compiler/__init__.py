"""From a model and its options to the cheapest plan; ``compilation`` is the way through."""
