"""pase: how to split every layer of a model over the devices, proven best under its cost model."""

__version__ = "0.1.0"
