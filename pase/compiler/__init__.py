"""From a model and its options to the cheapest plan. ``compilation`` holds the overall flow."""
