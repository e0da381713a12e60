"""The search engine: arrays in, one config index per node out, with a certificate.

It sees only ``CostTables``; it knows nothing of ops, meshes or models.
"""

from pase.search.check import brute_force, cost_of, verify
from pase.search.elimination.plan import dependent_sets, generate_seq
from pase.search.planned import PlanCache
from pase.search.solve import Known, find_best_strategy, price_memory, solve
from pase.search.types import MemoryProfile, Solution

__all__ = [
    "Known",
    "MemoryProfile",
    "PlanCache",
    "Solution",
    "brute_force",
    "cost_of",
    "dependent_sets",
    "find_best_strategy",
    "generate_seq",
    "price_memory",
    "solve",
    "verify",
]
