"""PaSE's own search space and costs (Elango, IPDPS 2021) on our graphs, for comparison with the paper's tables.

A config is a tuple of split counts, one per iteration dim, whose product is at most p. Costs are the
paper's, with the constants of its prototype; see ``docs/evidence/pase-paper.md``.
"""

from pase.paper.costs import PROTOTYPE, SOUND, Rules
from pase.paper.layers import LayerFlow, Layers, layers_of
from pase.paper.space import PaperSpace, build, complete

__all__ = [
    "PROTOTYPE",
    "SOUND",
    "LayerFlow",
    "Layers",
    "PaperSpace",
    "Rules",
    "build",
    "complete",
    "layers_of",
]
