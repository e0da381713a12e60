"""The mesh, the device groups and the handwritten modules that the tests of the HLO reader share."""

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


ADD = """\
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}"""


def module(
    *lines: str, before: str = "", devices: int = 8, read: str = "f32[16]", made: str = "f32[16]"
) -> str:
    """The text of a module with these lines in its entry computation, and these computations before it."""
    body = "\n".join(f"  {line}" for line in lines)
    entry = f"ENTRY %main (p: {read}) -> {made} {{\n{body}\n}}"
    return f"HloModule golden, num_partitions={devices}\n\n{ADD}\n\n{before}\n\n{entry}\n"
