"""What the compiler asks of a frontend besides the graph: repeated blocks, micro-batches and padded programs.

A frontend answers in ``frontends/<name>/blocks.py`` and ``frontends/<name>/padding``, which are found automatically.
Models of a frontend without them are run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pase.errors import PaseError
from pase.frontends.registry import NotInParts, Traced
from pase.ir import Graph
from pase.ir.batch_sums import BatchSums
from pase.ir.blocks import Block
from pase.registry import Registry

__all__ = ["BLOCKS", "PADDINGS", "BlockWays", "PaddingWays", "as_padded", "block_ways", "extents_to_pad"]


class BlocksOf(Protocol):
    """The repeated blocks of a model. marked: also those that the model itself marks for recomputation."""

    def __call__(self, traced: Any, /, *, marked: bool = False) -> tuple[Block, ...]: ...


@dataclass(frozen=True, kw_only=True)
class BlockWays:
    """How a frontend finds blocks in what it traced, and traces it on a part of the batch.

    blocks_of: the model's repeated blocks.
    micro: the model on one of so many micro-batches.
    on_batch: the model on a batch of so many examples.
    batch_size: the number of examples in the batch.
    batch_inputs: the paths of the inputs that have the batch's dim.
    check_micro: raises NotInParts if the program itself shows that so many micro-batches would give other numbers.
    check_sums: raises NotInParts if a step cannot give a micro-batch the sums over the batch that it reads. It takes
        the model on a micro-batch, its simplified graph, the sums, and the number of micro-batches.
    one_loop: whether the program has one loop of so many iterations whose iterations one program can run as stages.
    state_of_whole: a step in micro-batches leaves the state that a step of the whole batch does; otherwise each
        micro-batch passes its own on.
    sums_of_loops: a step can give a micro-batch the whole batch's value of a sum that a loop returns.
    hoists: a backend can run collectives of parameters once per step (``Hoisted``).
    gathers_again: a backend can gather parameters again for backward, instead of keeping them.
    """

    blocks_of: BlocksOf
    micro: Callable[[Any, int], Traced]
    on_batch: Callable[[Any, int], Traced]
    batch_size: Callable[[Any], int]
    batch_inputs: Callable[[Any], frozenset[str]]
    check_micro: Callable[[Any, int], None] = lambda traced, micro_batches: None
    check_sums: Callable[[Any, Graph, BatchSums, int], None] = lambda part, graph, sums, micro_batches: None
    one_loop: Callable[[Any, int], bool] = lambda traced, blocks: False
    state_of_whole: bool
    sums_of_loops: bool = False
    hoists: bool
    gathers_again: bool = False


@dataclass(frozen=True, kw_only=True)
class PaddingWays:
    """How a frontend pads dims.

    padded: the program with every dim of these extents padded (extent -> padded extent).
    extents: the extents of parameters and inputs that so many devices do not divide -> what to pad them to.
    """

    padded: Callable[[Any, Mapping[int, int]], Traced]
    extents: Callable[[Any, int], dict[int, int]]


BLOCKS: Registry[BlockWays] = Registry("frontend with blocks", package="pase.frontends", each="blocks")
PADDINGS: Registry[PaddingWays] = Registry("frontend with padding", package="pase.frontends", each="padding")


def block_ways(traced: Traced) -> BlockWays:
    """Return those of the frontend that read the model. Raises NotInParts for a frontend that has none."""
    if (found := BLOCKS.get(traced.frontend)) is None:
        raise NotInParts(
            f"'{traced.graph.name}' was read by the {traced.frontend} frontend, but micro-batches, recomputation and "
            f"stages need a JAX function or a PyTorch module"
        )
    return found


def as_padded(traced: Traced, sizes: Mapping[int, int]) -> Traced:
    """Returns the model with all dims of some extents padded. sizes: extent -> padded extent; if empty, the model
    itself.

    Raises PaseError if its frontend cannot pad it.
    """
    return _padding(traced).padded(traced, sizes) if sizes else traced


def extents_to_pad(traced: Traced, devices: int, micro_batches: int = 1) -> Mapping[int, int]:
    """The extents of a model's parameters and inputs that the devices do not divide -> what to pad them to first. A
    batch that is cut into micro-batches is not padded.

    Raises PaseError if its frontend cannot pad it.
    """
    found = _padding(traced).extents(traced, devices)
    if micro_batches > 1:
        found.pop(block_ways(traced).batch_size(traced), None)
    return found


def _padding(traced: Traced) -> PaddingWays:
    if (found := PADDINGS.get(traced.frontend)) is None:
        raise PaseError(
            f"'{traced.graph.name}' was read by the {traced.frontend} frontend, but only JAX programs can be padded",
            where="uneven='padded'",
            fix="leave the option out",
        )
    return found
