"""The local program of a tree of parameters: how they are gathered, how their gradients are reduced, and the messages.

It is for models that pase did not compile. A tensor of the scheduling problem is one collective of one parameter, or of
one layer of a stacked parameter. Several collectives of the same parameter in a row are its stages. If the stages do
not lead from the stored layout to the read layout, and back for the gradient, the parameter is resharded outside of the
messages.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.ir import Op, functions
from pase.local.bucket_messages import iterations_late, outside_messages, with_updates
from pase.local.lower import between
from pase.local.types import (
    Layout,
    LocalMessage,
    LocalOp,
    LocalOperand,
    LocalProgram,
    LocalReshardStep,
    LocalResult,
    LocalTransfer,
    MessageChunk,
    TransferDirection,
)
from pase.local.verify import verify_program
from pase.machine import Mesh
from pase.plan.constraints import Placement
from pase.schedule.plan import BucketPlan
from pase.schedule.types import ScheduleProblem, Transfer

if TYPE_CHECKING:
    from jax import Array

__all__ = ["ParameterProgram", "StoredParameter", "parameter_program"]

_NAME = re.compile(
    r"^(?P<path>.*?)(\[(?P<turn>\d+)\])?(?P<grad>\.grad)?"
    r"(\.(?P<kind>all_reduce|reduce_scatter|all_gather|all_to_all|permute)(\.\d+)?(?P<again>\.again\d+)?)?$"
)


@dataclass(frozen=True, kw_only=True)
class StoredParameter:
    """A parameter: its path in the tree, its unsharded shape, and the mesh axes that split each dim."""

    path: str
    shape: tuple[int, ...]
    placement: Placement


@dataclass(frozen=True, kw_only=True)
class ParameterProgram:
    """The local program of parameters.

    local: has one transfer for each parameter, or for each layer of a stacked parameter. numbers: for each parameter,
    the numbers of its transfers.
    """

    local: LocalProgram
    numbers: Sequence[tuple[int, ...]]

    @cached_property
    def carried(self) -> frozenset[int]:
        """The numbers of the transfers that are in messages."""
        return frozenset(p.transfer for m in self.local.messages for p in m.chunks)

    def parts(self, leaves: Sequence[Array]) -> dict[int, Array]:
        """Number of a transfer -> its array. leaves: the arrays of the parameters."""
        out: dict[int, Array] = {}
        for mine, x in zip(self.numbers, leaves, strict=True):
            out |= {mine[0]: x} if len(mine) == 1 else dict(zip(mine, x, strict=True))
        return out

    def joined(self, parts: Mapping[int, Array]) -> list[Array]:
        """The inverse of ``parts``."""
        import jax.numpy as jnp

        every = ([parts[k] for k in mine] for mine in self.numbers)
        return [one[0] if len(one) == 1 else jnp.stack(one) for one in every]


@dataclass(kw_only=True)
class _Chains:
    """The stages of a parameter, or of each of its layers.

    of: (layer, direction) -> the numbers of the tensors in the problem. The layer is None for the whole parameter.
    """

    of: dict[tuple[int | None, TransferDirection], list[int]] = field(default_factory=dict)
    broken: bool = False

    @property
    def iterations(self) -> list[int | None]:
        """The layers that have separate gradients."""
        return sorted(
            {iteration for iteration, way in self.of if way == "back"}, key=lambda t: -1 if t is None else t
        )


def parameter_program(
    problem: ScheduleProblem,
    plan: BucketPlan,
    stored: Sequence[StoredParameter],
    *,
    mesh: Mesh,
    data_axes: tuple[str, ...],
    across: bool = False,
    lenient: bool = False,
) -> ParameterProgram:
    """The program of these parameters under a bucket plan.

    data_axes: the mesh axes over which the batch is split. across: whether messages that the plan sends during the next
    forward are sent in the next step. lenient: whether the problem may leave out parameters. Raises PaseError if the
    problem names a tensor that is not a parameter, or leaves one out.
    """
    make = _ParameterTransfers(problem, stored, mesh, data_axes)
    if lost := [p.path for p in stored if not lenient and p.path not in make.chains]:
        raise PaseError(
            f"it does not name the parameters {', '.join(lost)}",
            where=f"problem '{problem.name}'",
            fix="add them to the problem, or set lenient=True",
        )
    for p in stored:
        make.add(p)
    messages: list[LocalMessage] = []
    for message, late in zip(plan.messages, iterations_late(problem, plan, across=across), strict=True):
        ways: dict[TransferDirection, list[MessageChunk]] = {"there": [], "back": []}
        for chunk in message.pieces:
            if chunk.tensor in make.places:
                way, number, stage = make.places[chunk.tensor]
                ways[way].append(
                    MessageChunk(transfer=number, stage=stage, begin=chunk.offset, nbytes=chunk.nbytes)
                )
        messages += outside_messages(problem, message, late, ways)
    program = LocalProgram(
        name=problem.name,
        mesh=mesh,
        ops=(*make.made, *make.read),
        transfers=tuple(make.transfers),
        messages=tuple(messages),
    )
    program = with_updates(program, plan)
    verify_program(program)
    return ParameterProgram(local=program, numbers=make.numbers)


class _ParameterTransfers:
    """Collects the transfers of a program. places: tensor of the problem -> (direction, transfer, stage)."""

    def __init__(
        self, problem: ScheduleProblem, stored: Sequence[StoredParameter], mesh: Mesh, data: tuple[str, ...]
    ) -> None:
        self.problem, self.mesh, self.data = problem, mesh, [mesh.names.index(a) for a in data]
        self.made: list[LocalOp] = []
        self.read: list[LocalOp] = []
        self.transfers: list[LocalTransfer] = []
        self.numbers: list[tuple[int, ...]] = []
        self.places: dict[int, tuple[TransferDirection, int, int]] = {}
        self.chains = self._chains([p.path for p in stored])

    def _chains(self, paths: Sequence[str]) -> dict[str, _Chains]:
        found: dict[str, _Chains] = {}
        for i, t in enumerate(self.problem.tensors):
            m = _NAME.match(t.name)
            assert m is not None  # the pattern matches any text
            exact = t.name in paths
            path = t.name if exact else m["path"]
            if path not in paths:
                raise PaseError(
                    f"tensor '{t.name}' is not a parameter",
                    where=f"problem '{self.problem.name}'",
                    fix=f"name one of the parameters {', '.join(paths)}",
                )
            mine = found.setdefault(path, _Chains())
            # The parameter that was gathered for forward is kept, so a second gather is skipped.
            again = not exact and m["again"] is not None
            if not again and self._axes(t):
                iteration = None if exact or m["turn"] is None else int(m["turn"])
                way: TransferDirection = "there" if t.kind == "all_gather" else "back"
                mine.of.setdefault((iteration, way), []).append(i)
        return found

    def _axes(self, t: Transfer) -> tuple[int, ...]:
        """The data axes of a tensor's collective. Reductions over other axes are left to XLA."""
        return tuple(a for a in self.data if not t.axes.names or self.mesh.names[a] in t.axes.names)

    def add(self, p: StoredParameter) -> None:
        """Add a parameter: layer by layer or as a whole according to its stages, or outside of the messages."""
        chains = self.chains.get(p.path, _Chains())
        layered = chains.iterations == [*range(p.shape[0] if p.shape else 0)] and not any(p.placement[:1])
        iterations = chains.iterations if layered or chains.iterations == [None] else []
        shape, place = (p.shape[1:], p.placement[1:]) if layered else (p.shape, p.placement)
        steps = [self._reshard_steps(chains, iteration, place) for iteration in iterations]
        if not steps or None in steps:
            stored, read = self._ends(p.placement)
            self._one(
                p.path, p.shape, p.placement, between(stored, read, self.mesh), self._summed(p.placement)
            )
            self.numbers.append((len(self.transfers) - 1,))
            return
        first = len(self.transfers)
        for iteration, (there, back) in zip(iterations, steps, strict=True):  # type: ignore[misc]
            for way in ("there", "back"):
                for stage, i in enumerate(chains.of.get((iteration, way), ())):
                    self.places[i] = (way, len(self.transfers), stage)
            self._one(p.path if iteration is None else f"{p.path}[{iteration}]", shape, place, there, back)
        self.numbers.append(tuple(range(first, len(self.transfers))))

    def _ends(self, place: Placement) -> tuple[Layout, Layout]:
        """(the stored layout, the read layout). The read layout has no data axes: over them, the function is manual."""
        read = tuple(tuple(a for a in axes if self.mesh.names.index(a) not in self.data) for axes in place)
        return self._layout(place), self._layout(read)

    def _layout(self, place: Placement) -> Layout:
        out: list[tuple[int, int] | None] = [None] * len(self.mesh.names)
        for dim, axes in enumerate(place):
            blocks = 1
            for a in map(self.mesh.names.index, axes):
                blocks *= self.mesh.sizes[a]
                out[a] = dim, blocks
        return tuple(out)

    def _partial(self, layout: Layout) -> Layout:
        """The same layout, but with partial sums over the data axes."""
        return tuple("partial" if a in self.data else s for a, s in enumerate(layout))

    def _summed(self, place: Placement) -> tuple[LocalReshardStep, ...]:
        """The reshard steps of a gradient, from the function's result to the stored layout."""
        stored, read = self._ends(place)
        return between(self._partial(read), stored, self.mesh)

    def _reshard_steps(
        self, chains: _Chains, iteration: int | None, place: Placement
    ) -> tuple[tuple[LocalReshardStep, ...], tuple[LocalReshardStep, ...]] | None:
        """The reshard steps of a parameter's stages: (of the parameter, of its gradient).

        Returns None if they do not lead from one end to the other. Steps that change only other axes are added after
        the parameter's stages and before the gradient's stages: if a data axis is the more major one of a dim, the
        result of a gather over it is not contiguous.
        """
        stored, read = self._ends(place)
        gathered = tuple(None if a in self.data else s for a, s in enumerate(stored))
        there = self._staged(chains.of.get((iteration, "there"), ()), stored, gathered, stored)
        back = self._staged(chains.of.get((iteration, "back"), ()), self._partial(stored), stored, stored)
        if there is None or back is None:
            return None
        behind = between(gathered, read, self.mesh)
        forward = between(self._partial(read), self._partial(stored), self.mesh)
        return (*there, *behind), (*forward, *back)

    def _staged(
        self, tensors: Sequence[int], now: Layout, goal: Layout, stored: Layout
    ) -> list[LocalReshardStep] | None:
        """The reshard steps of these tensors, one after another. Returns None if they do not end in the goal.

        now: the layout before the first step.
        """
        out: list[LocalReshardStep] = []
        for n, t in enumerate(map(self.problem.tensors.__getitem__, tensors)):
            axes = self._axes(t)
            after = tuple(
                s if a not in axes else None if t.kind == "all_gather" else stored[a]
                for a, s in enumerate(now)
            )
            beyond = t.kind != "all_reduce" and {*t.axes.names} - {self.mesh.names[a] for a in axes}
            fits = {
                "all_gather": all(now[a] is not None for a in axes),
                "reduce_scatter": all(now[a] == "partial" and stored[a] is not None for a in axes),
                "all_reduce": all(now[a] == "partial" and stored[a] is None for a in axes),
            }
            follows = n == 0 or tensors[n - 1] in t.follows
            if beyond or not fits.get(t.kind) or not follows or len(t.follows) > 1:
                return None
            names = tuple(self.mesh.names[a] for a in sorted(axes))
            out.append(LocalReshardStep(kind=t.kind, axes=names, before=now, after=after, nbytes=t.nbytes))  # type: ignore[arg-type]
            now = after
        return out if now == goal else None

    def _one(
        self,
        tensor: str,
        shape: tuple[int, ...],
        place: Placement,
        there: Sequence[LocalReshardStep],
        back: Sequence[LocalReshardStep],
    ) -> None:
        """Add a transfer from the parameter to the function, and of its gradient back."""
        stored, read = self._ends(place)
        made = LocalResult(tensor=tensor, shape=shape, layout=stored, gradient=stored)
        taken = LocalOperand(
            tensor=tensor,
            shape=shape,
            layout=read,
            gradient=self._partial(read),
            transfer=len(self.transfers),
        )
        leaf = Op(
            name="parameter", kind="parameter", function=functions.BY_KIND["parameter"], reads=(), writes=()
        )
        use = Op(name="function", kind="output", function=functions.BY_KIND["output"], reads=(), writes=())
        self.made.append(LocalOp(node=tensor, op=leaf, operands=(), results=(made,), combine="sum"))
        self.read.append(LocalOp(node="function", op=use, operands=(taken,), results=(), combine="sum"))
        self.transfers.append(
            LocalTransfer(
                tensor=tensor,
                src=tensor,
                dst="function",
                combine="sum",
                forward=tuple(there),
                backward=tuple(back),
                phase="forward",
                runs=(1.0, 1.0),
            )
        )
