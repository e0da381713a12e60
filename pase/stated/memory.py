"""Bytes on a rank under a stated strategy: what it stores, what it keeps for backward, what it gathers temporarily."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pase.machine import Mesh
from pase.stated.parts import Part, Parts
from pase.stated.program import Bytes, Program
from pase.stated.strategy import Strategy
from pase.stated.timeline import Pipeline, stage_layers

__all__ = ["RankMemory", "rank_memory"]

_ON_THE_WAY = 2
"""Offloaded blocks whose activations are on their way to or from the host, and still or already in the device's memory
(Transformer Engine's AsyncDoubleBufferGroupOffloadHandler)."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on a rank.

    gradients: and what stands in for those that a product has added to the sum (``Program.empty_gradient``).
    gathered: weights while they are gathered, and gradients while they are summed.
    logits: bytes at the loss.
    reserve: memory of the program's libraries and allocator.
    rank: the stage of the rank, "first" or "last".
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    logits: float
    reserve: float
    rank: str

    @property
    def arrays(self) -> float:
        """What the program's arrays take, without the reserve."""
        stored = self.parameters + self.gradients + self.optimizer
        return stored + self.activations + self.gathered + self.logits

    @property
    def total(self) -> float:
        return self.arrays + self.reserve


def rank_memory(
    parts: Parts, s: Strategy, program: Program, mesh: Mesh, pipe: Pipeline | None
) -> tuple[RankMemory, ...]:
    """Return the memory of the first and of the last stage."""
    layers = stage_layers(parts.blocks, s.pipeline, program.stage_ends, parts.layers_before)
    one = len(layers) == 1
    ranks = (_EndStage("first", layers[0], True, one), _EndStage("last", layers[-1], one, True))
    return tuple(_rank(parts, s, program, mesh, stage, pipe) for stage in ranks)


def _apart(part: Part, s: Strategy, mesh: Mesh) -> float:
    """Return a part's parameters on a device if ZeRO shards them within a replica, over the ranks that share them."""
    out = 0.0
    for axes, elements in part.elements.items():
        ways = [
            size
            for name, size in zip(mesh.names, mesh.sizes, strict=True)
            if name in axes and name != "model"
        ]
        out += elements / max(math.prod(ways) / s.data, 1.0)
    return out


class _EndStage(NamedTuple):
    """A stage, by the name of its rank: how many blocks it has, and whether it has the model's ends."""

    name: str
    blocks: int
    first: bool
    last: bool


def _rank(
    parts: Parts,
    s: Strategy,
    program: Program,
    mesh: Mesh,
    stage: _EndStage,
    pipe: Pipeline | None,
) -> RankMemory:
    """Return the memory of a rank with this stage."""
    name, blocks, first, last = stage
    p, b = program, program.bytes
    ends = [parts.first] * first + [parts.last] * last + [parts.tied] * (last and not first)
    block = parts.block
    elements = blocks * block.parameters + sum(e.parameters for e in ends)
    apart = blocks * _apart(block, s, mesh) + sum(_apart(e, s, mesh) for e in ends)
    # The schedule decides how many micro-batches are in flight. Only GPipe has more than one between loss and backward.
    flying = 1.0 if pipe is None else pipe.in_flight if name == "first" else pipe.in_flight_last
    at_loss = flying if s.schedule == "gpipe" else 1.0
    here = blocks - max(s.offload - _ON_THE_WAY, 0)
    held = here * block.kept * flying + sum(e.kept for e in ends) * (at_loss if last else flying)
    working = max(block.saved - block.kept, 0.0) if s.remat not in (None, "none") else 0.0
    each = _made_whole(block, b)
    made = blocks * each + sum(_made_whole(e, b) for e in ends)
    gathered, summing = _whole(p, s, made, blocks * each, each, _largest(ends, block))
    # The logits are freed before the last block is recomputed and its gradients are computed and summed.
    logits = at_loss * parts.logits * (4 * _copies(p, s) + 2) if last else 0.0
    behind = working + summing
    if behind > logits:
        held, gathered, logits = held + working, gathered + summing, 0.0
    return RankMemory(
        parameters=b.weight * (apart if s.zero == 3 else elements),
        gradients=b.gradient * (apart if s.zero >= 2 else elements) + p.empty_gradient * block.shapes,
        optimizer=b.state * (apart if s.zero >= 1 else elements),
        activations=held,
        gathered=gathered,
        logits=logits,
        reserve=p.reserve_bytes,
        rank=name,
    )


def _made_whole(part: Part, b: Bytes) -> float:
    """Return how many of a part's parameters are gathered or copied for their use.

    These are the parameters that several ranks share. Parameters that one rank has alone, such as those of experts on
    as many ranks as there are experts, are used as they are stored, unless they are cast for their use.
    """
    return sum(e for axes, e in part.elements.items() if axes or b.weight > b.used)


def _largest(ends: Sequence[Part], block: Part) -> float:
    return max(part.largest for part in (*ends, block))


def _copies(p: Program, s: Strategy) -> float:
    """Return the number of float32 copies of the logits at the loss."""
    return p.logits if s.tensor == 1 or p.logits_in_parts is None else p.logits_in_parts


def _whole(
    p: Program, s: Strategy, elements: float, in_blocks: float, block: float, largest: float
) -> tuple[float, float]:
    """Return (bytes of weights while they are gathered, bytes of gradients while they are computed and summed), without
    what is stored.

    If a program copies what it gathered out of a buffer, the buffer belongs to a stream and stays reserved.

    elements: the rank's parameters that are gathered. in_blocks: those in blocks. block: those in one block.
    largest: the most parameters in one array.
    """
    b = p.bytes
    ends, ahead = max(elements - in_blocks, 0.0), (1 if p.one_by_one else 2) * block
    near = ends + ahead
    if s.zero != 3:
        return (elements * b.used if b.weight > b.used else 0.0), 0.0
    if p.by_weight:  # the weight being read, the next one, and the previous one's gradient
        return largest * 2 * b.used, largest * b.summed
    buffer = near * b.used if p.copied[0] else 0.0
    if s.pipeline > 1 or not p.regathers:  # weights stay gathered; with stages, so do accumulated gradients
        stays = elements * b.used + buffer
        if s.pipeline > 1 and p.sums_unsplit:
            return stays + elements * b.summed, 0.0
        return stays, 2 * block * b.summed
    # Gradients of the ends are computed, but wait for those of the first part before they are summed.
    return near * b.used + buffer, ends * b.used + ahead * b.summed
