"""Schedules, one file per family. Each file registers the schedules that it defines (``pase.pipeline.registry``)."""
