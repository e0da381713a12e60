"""The form of each move: one collective over all of its axes, or some axes after the others, whichever is cheaper.

A plan lists a move over several axes as one collective. What a compiler makes of it is in the machine file
(``Machine.forms``): XLA for TPU turns a scattered sum over all chips of a square torus into an all-reduce of all of it.
In two stages it stays what it is. Each form is priced as what runs, and the cheapest is taken; the layouts at both ends
stay the same. On machines of which nothing is known, every move is one collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pase.local.types import LocalProgram, LocalReshardStep
from pase.machine import CostModel, Mesh, axis_levels

__all__ = ["form_of", "in_forms", "price_of"]


def in_forms(program: LocalProgram, model: CostModel) -> LocalProgram:
    """The program with its moves in their cheapest forms. Moves that messages carry stay as they are: a bucket plan
    says what they are."""
    if not model.machine.forms:
        return program
    carried = {(p.transfer, m.way) for m in program.messages for p in m.chunks}

    def formed(number: int, way: str, steps: Sequence[LocalReshardStep]) -> tuple[LocalReshardStep, ...]:
        if (number, way) in carried:
            return tuple(steps)
        return tuple(x for m in steps for x in form_of(m, program.mesh, model))

    transfers = tuple(
        replace(
            t,
            forward=formed(k, "there", t.forward),
            backward=None if t.backward is None else formed(k, "back", t.backward),
        )
        for k, t in enumerate(program.transfers)
    )
    return replace(program, transfers=transfers)


def form_of(step: LocalReshardStep, mesh: Mesh, model: CostModel) -> tuple[LocalReshardStep, ...]:
    """The move in its cheapest form; of equals, the one with the fewest collectives, and then the plan's order."""
    return min(_forms(step, mesh), key=lambda form: (price_of(form, mesh, model), len(form)))


def price_of(form: Sequence[LocalReshardStep], mesh: Mesh, model: CostModel) -> float:
    """What these collectives cost as the machine's compiler runs them, in the model's unit."""
    levels, total = axis_levels(mesh, model.machine), 0.0
    for m in form:
        if m.kind == "slice" or m.kind == "own":
            continue  # they send nothing
        axes = [mesh.names.index(a) for a in m.axes]
        ways = [math.prod(at) for at in zip(*(levels[a] for a in axes), strict=True)]
        bits = sum(1 << a for a in axes)
        kind = model.machine.as_compiled(m.kind, ways, mesh.devices, m.nbytes)
        total += float(model.collective(kind, mesh, bits, m.nbytes))
    return total


def _forms(step: LocalReshardStep, mesh: Mesh) -> Iterator[tuple[LocalReshardStep, ...]]:
    """The move at once, and in two stages: some of its axes, and then the others."""
    yield (step,)
    wide = [a for a in step.axes if mesh.sizes[mesh.names.index(a)] > 1]
    if step.kind not in ("reduce_scatter", "all_gather") or len(wide) < 2:
        return
    for some in range(1, len(wide)):
        for first in itertools.combinations(wide, some):
            yield tuple(_staged(step, first, tuple(a for a in wide if a not in first), mesh))


def _staged(
    step: LocalReshardStep, first: tuple[str, ...], then: tuple[str, ...], mesh: Mesh
) -> Iterator[LocalReshardStep]:
    """Two stages. The larger buffer of one of them is smaller by the ways of the scattered sum before it, or of the
    gather behind it."""
    done = [mesh.names.index(a) for a in first]
    other = done if step.kind == "reduce_scatter" else [mesh.names.index(a) for a in then]
    less = step.nbytes // math.prod(mesh.sizes[a] for a in other)
    sizes = (step.nbytes, less) if step.kind == "reduce_scatter" else (less, step.nbytes)
    between = tuple(
        t if a in done or mesh.sizes[a] == 1 else s
        for a, (s, t) in enumerate(zip(step.before, step.after, strict=True))
    )
    yield LocalReshardStep(kind=step.kind, axes=first, before=step.before, after=between, nbytes=sizes[0])
    yield LocalReshardStep(kind=step.kind, axes=then, before=between, after=step.after, nbytes=sizes[1])
