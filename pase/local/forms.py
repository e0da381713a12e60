"""The form of each move: one collective over all of its axes, or one axis after another, whichever is cheaper.

A plan lists a move over several axes as one collective. What a compiler makes of it is in the machine file
(``Machine.forms``): XLA for TPU turns a scattered sum over both dims of a torus into an all-reduce of all of it. One
axis at a time, it stays what it is. Each form is priced as what runs, and the cheapest is taken; the layouts at both
ends stay the same. On machines of which nothing is known, every move is one collective.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pase.local.types import LocalMove, LocalProgram
from pase.machine import CostModel, Mesh, axis_levels

__all__ = ["form_of", "in_forms", "price_of"]


def in_forms(program: LocalProgram, model: CostModel) -> LocalProgram:
    """The program with its moves in their cheapest forms. Moves that messages carry stay as they are: a bucket plan
    says what they are."""
    if not model.machine.forms:
        return program
    carried = {(p.transfer, m.way) for m in program.messages for p in m.pieces}

    def formed(number: int, way: str, moves: Sequence[LocalMove]) -> tuple[LocalMove, ...]:
        if (number, way) in carried:
            return tuple(moves)
        return tuple(x for m in moves for x in form_of(m, program.mesh, model))

    transfers = tuple(
        replace(
            t,
            forward=formed(k, "there", t.forward),
            backward=None if t.backward is None else formed(k, "back", t.backward),
        )
        for k, t in enumerate(program.transfers)
    )
    return replace(program, transfers=transfers)


def form_of(move: LocalMove, mesh: Mesh, model: CostModel) -> tuple[LocalMove, ...]:
    """The move in its cheapest form; of equals, the one with the fewest collectives, and then the plan's order."""
    return min(_forms(move, mesh), key=lambda form: (price_of(form, mesh, model), len(form)))


def price_of(form: Sequence[LocalMove], mesh: Mesh, model: CostModel) -> float:
    """What these collectives cost as the machine's compiler runs them, in the model's unit."""
    levels, total = axis_levels(mesh, model.machine), 0.0
    for m in form:
        if m.kind == "slice" or m.kind == "own":
            continue  # they send nothing
        axes = [mesh.names.index(a) for a in m.axes]
        crossed = sum(any(levels[a][level] > 1 for a in axes) for level in range(len(levels[0])))
        bits = sum(1 << a for a in axes)
        kind = model.machine.as_compiled(m.kind, crossed, mesh.ways(bits), m.nbytes)
        total += float(model.collective(kind, mesh, bits, m.nbytes))
    return total


def _forms(move: LocalMove, mesh: Mesh) -> Iterator[tuple[LocalMove, ...]]:
    """The move at once, and one axis after another in every order."""
    yield (move,)
    wide = [a for a in move.axes if mesh.sizes[mesh.names.index(a)] > 1]
    if move.kind not in ("reduce_scatter", "all_gather") or len(wide) < 2:
        return
    for order in itertools.permutations(wide):
        yield tuple(_staged(move, order, mesh))


def _staged(move: LocalMove, order: Sequence[str], mesh: Mesh) -> Iterator[LocalMove]:
    """One axis after another. The larger buffer of each stage is smaller by the ways of the scattered sums before it,
    or of the gathers behind it."""
    now, left = move.before, move.nbytes
    if move.kind == "all_gather":
        for name in order[1:]:
            left //= mesh.sizes[mesh.names.index(name)]
    for k, name in enumerate(order):
        done = {mesh.names.index(a) for a in order[: k + 1]}
        after = tuple(move.after[a] if a in done or mesh.sizes[a] == 1 else s for a, s in enumerate(now))
        yield LocalMove(kind=move.kind, axes=(name,), before=now, after=after, nbytes=left)
        if move.kind == "reduce_scatter":
            left //= mesh.sizes[mesh.names.index(name)]
        elif k + 1 < len(order):
            left *= mesh.sizes[mesh.names.index(order[k + 1])]
        now = after
