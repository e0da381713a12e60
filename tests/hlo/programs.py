"""The mesh and device groups that the tests of the HLO reader share."""

from __future__ import annotations

from pase.machine.types import Mesh

MESH = Mesh(names=("x", "y"), sizes=(4, 2))
X, Y = 1, 2
# Groups of a 4 × 2 mesh numbered row-major.
ALONG_X = {(0, 2, 4, 6), (1, 3, 5, 7)}
ALONG_Y = {(0, 1), (2, 3), (4, 5), (6, 7)}


def one(found):
    assert len(found) == 1, found
    return found[0]
