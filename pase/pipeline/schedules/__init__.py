"""One file a family of schedules; each registers what it defines (``pase.pipeline.registry``)."""
