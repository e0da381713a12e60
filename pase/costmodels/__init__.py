"""The costs of work and collectives. A file here that registers a cost model is found automatically."""

from pase.costmodels.registry import get, names, register
from pase.former import former_names

__all__ = ["get", "names", "register"]

former_names(__name__, {})
