"""Chooses the form of each reshard step: one collective over all of its axes, or two, over some axes each.

A plan lists a reshard step over several axes as one collective. The machine file says what a compiler makes of it
(``Machine.forms``): XLA for TPU turns a reduce-scatter over all chips of a square torus into an all-reduce of the whole
tensor. In two stages it remains a reduce-scatter. Each form is priced as the collectives that run, and the cheapest
form is taken; the layouts at both ends stay the same. If the machine file has no such entries, every reshard step is
one collective.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pase.local.types import LocalProgram, LocalReshardStep
from pase.machine import CostModel, Mesh, axis_levels
from pase.tables.axis_layout import AxisLayout

__all__ = ["form_of", "in_forms", "price_of"]


def in_forms(program: LocalProgram, model: CostModel) -> LocalProgram:
    """The program with its reshard steps in their cheapest forms. Those that messages carry stay unchanged, because the
    bucket plan determines their form."""
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
    """The reshard step in its cheapest form. Ties are broken by the number of collectives, then by the plan's order."""
    return min(_forms(step, mesh), key=lambda form: (price_of(form, mesh, model), len(form)))


def price_of(form: Sequence[LocalReshardStep], mesh: Mesh, model: CostModel) -> float:
    """The cost of these collectives as the machine's compiler runs them, in the unit of the cost model."""
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
    """All forms of the step: as one collective, and in two stages, over some of its axes and then over the others."""
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
    """The step in two stages. The smaller stage's buffer is divided by the ways of the reduce-scatter before it, or of
    the all-gather after it."""
    done = [mesh.names.index(a) for a in first]
    other = done if step.kind == "reduce_scatter" else [mesh.names.index(a) for a in then]
    less = step.nbytes // math.prod(mesh.sizes[a] for a in other)
    sizes = (step.nbytes, less) if step.kind == "reduce_scatter" else (less, step.nbytes)
    between = AxisLayout(
        t if a in done or mesh.sizes[a] == 1 else s
        for a, (s, t) in enumerate(zip(step.before, step.after, strict=True))
    )
    yield LocalReshardStep(kind=step.kind, axes=first, before=step.before, after=between, nbytes=sizes[0])
    yield LocalReshardStep(kind=step.kind, axes=then, before=between, after=step.after, nbytes=sizes[1])
