"""From a model and its options to the cheapest plan: resolve, options, problem, variants, fit, overlap."""
