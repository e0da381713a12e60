"""The search engine: takes arrays, and returns one config index per node, with a certificate.

It works only on ``CostTables`` and does not depend on ops, meshes or models.
"""

from pase.search.check import brute_force, cost_of, verify
from pase.search.elimination.plan import dependent_sets, generate_seq
from pase.search.planned import PlanCache
from pase.search.solve import Known, find_best_strategy, price_memory, solve
from pase.search.types import Effort, MemoryProfile, Solution

__all__ = [
    "Effort",
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
