"""Pipelines of stages: schedules as lists of actions, their simulation, proven bounds, and the best cuts of a model."""
