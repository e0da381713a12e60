"""The repeated blocks of an exported PyTorch model, which may be recomputed, and its trace on a micro-batch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

from pase.errors import PaseError
from pase.frontends.blocks import BLOCKS, BlockWays
from pase.frontends.common.repeats import crossing, equal_runs
from pase.frontends.registry import NotInParts
from pase.frontends.torch.control import LOOPS, trip_count
from pase.frontends.torch.types import FxNode
from pase.ir.blocks import Block
from pase.ir.types import PRODUCTS
from pase.once import once
from pase.pytree import Tree

if TYPE_CHECKING:
    from torch import Tensor

    from pase.frontends.torch.frontend import TracedTorch

__all__ = ["batch_inputs", "batch_size", "blocks_of", "micro", "on_batch"]


def blocks_of(traced: TracedTorch, *, marked: bool = False) -> tuple[Block, ...]:
    """The bodies of loops over layers, and equal runs of nodes, cut where the fewest bytes cross.

    Runs are left out if the model itself marks a part of one for recompute. marked: include them all the same.
    """
    nodes = list(traced.scope.nodes)
    # A run of nodes without a product is no block.
    heavy = {op.eqn.path for n in traced.graph.nodes for op in n.ops if op.kind in PRODUCTS}
    whole = {int(path.partition(".")[0]) for path in heavy if path}
    bodies = [
        Block(prefix=f"{i}.", start=0, stop=len(traced.scope.inner[f"{i}"].nodes))
        for i, n in enumerate(nodes)
        if _trip_count(n) > 1 and i in whole
    ]
    runs = equal_runs(
        [_token(i, n) for i, n in enumerate(nodes)],
        lambda a, b: any(i in whole for i in range(a, b)),
        lambda: _alive(nodes),
    )
    found = tuple(Block(prefix="", start=a, stop=b) for a, b in runs)
    own = any(b.start < m.stop and m.start < b.stop for b in found for m in traced.marked)
    if (own and not marked) or any(_trip_count(n) for b in found for n in nodes[b.start : b.stop]):
        found = ()
    return (*bodies, *found)


def _trip_count(n: FxNode) -> int:
    """The trip count of a loop; 0 for a node that is no loop."""
    return trip_count(n) if n.op == "call_function" and str(n.target) in LOOPS else 0


def _token(i: int, n: FxNode) -> object:
    if n.op != "call_function":
        return i
    return str(n.target), tuple((str(t.dtype), tuple(t.shape)) for t in _made(n))


def _made(n: FxNode) -> list[Tensor]:
    made: Any = n.meta.get("val")
    return [t for t in (made if isinstance(made, (tuple, list)) else [made]) if hasattr(t, "dtype")]


def _alive(nodes: list[FxNode]) -> np.ndarray:
    number = {n: i for i, n in enumerate(nodes)}
    last = {m: i for i, n in enumerate(nodes) for m in n.all_input_nodes}
    made = {n: i for n, i in number.items() if n.op == "call_function"}
    return crossing(made, last, lambda n: sum(t.nbytes for t in _made(n)), len(nodes))


def batch_size(traced: TracedTorch) -> int:
    """The most common size of the inputs' first dims. PaseError if all inputs are scalars."""
    shapes = [t.shape for t in _leaves(traced) if len(t.shape)]
    if not shapes:
        raise PaseError(
            "the model has no batch, because all of its inputs are scalars", where=traced.graph.name
        )
    return int(Counter(s[0] for s in shapes).most_common(1)[0][0])


def _leaves(traced: TracedTorch) -> list[Tensor]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [t for t in tree_leaves(traced.batch) if isinstance(t, torch.Tensor)]


def batch_inputs(traced: TracedTorch) -> frozenset[str]:
    """Paths of the inputs that have the batch dim."""
    try:
        size = batch_size(traced)
    except PaseError:
        return frozenset()  # there is no batch; whatever divides the batch reports it
    batch = set(traced.program.inputs.values())
    inputs = (t for t in traced.graph.tensors.values() if t.role == "input" and t.path in batch)
    return frozenset(t.path for t in inputs if t.shape[:1] == (size,))


def micro(traced: TracedTorch, micro_batches: int) -> TracedTorch:
    """The model traced on one micro-batch, which is 1/micro_batches of the batch.

    Inputs whose first dim is the batch are cut along it. Raises PaseError if the batch cannot be divided evenly, and
    NotInParts if the model cannot be traced on a micro-batch.
    """
    if micro_batches == 1:
        return traced
    size = batch_size(traced)
    if size % micro_batches:
        raise PaseError(
            f"a batch of {size} cannot be divided into {micro_batches} micro-batches of equal size",
            where=traced.graph.name,
            fix="use a number of micro-batches that divides the batch",
        )
    return on_batch(traced, size // micro_batches)


@once
def on_batch(traced: TracedTorch, examples: int) -> TracedTorch:
    """The model traced on a batch of so many examples: the first ones, which are repeated if there are too few. Raises
    NotInParts if the model cannot be traced on such a batch."""
    import torch
    from torch.utils._pytree import tree_map

    from pase.frontends.torch.frontend import trace

    traced.program.settings.check(traced.module)
    size = batch_size(traced)

    def part(t: Tree) -> Tree:
        if not (isinstance(t, torch.Tensor) and t.dim() and t.shape[0] == size):
            return t
        return t[:examples] if examples <= size else torch.cat([t] * -(-examples // size))[:examples]

    try:
        return trace(
            traced.module,
            *tree_map(part, traced.batch),
            name=traced.graph.name,
            unknown=traced.unknown,
            loss=traced.loss,
        )
    except PaseError as e:
        part_of = (
            f", one of {size // examples} micro-batches" if examples < size and size % examples == 0 else ""
        )
        raise NotInParts(
            f"the model cannot be traced on a batch of {examples}{part_of} ({e})",
            where=traced.graph.name,
            fix="make sure that the model's code does not contain the batch size",
        ) from e


BLOCKS.add(
    "torch",
    BlockWays(
        blocks_of=blocks_of,
        micro=micro,
        on_batch=on_batch,
        batch_size=batch_size,
        batch_inputs=batch_inputs,
        state_of_whole=True,
        hoists=False,
        gathers_again=True,
    ),
)
