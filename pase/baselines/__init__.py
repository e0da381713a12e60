"""Baselines: strategies that people use in practice, on the same graph and priced by the same tables."""

from pase.baselines.fill_in import baselines, price
from pase.baselines.flow import Roles, Weight, roles
from pase.baselines.megatron import megatron
from pase.baselines.rules import names, rule
from pase.baselines.types import Baseline, Intent, Skipped

__all__ = [
    "Baseline",
    "Intent",
    "Roles",
    "Skipped",
    "Weight",
    "baselines",
    "megatron",
    "names",
    "price",
    "roles",
    "rule",
]
