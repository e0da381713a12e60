"""Cost tables: built from the graph, a mesh and a cost model, and minimised by the search."""

from pase.tables.types import CostTables, EdgeTable

__all__ = ["CostTables", "EdgeTable"]
