"""Local programs: what one device does in a step of a plan, and what it sends; the same for every backend."""
