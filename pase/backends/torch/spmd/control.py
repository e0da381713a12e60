"""Loops and branches of an exported graph on one rank. The body of a loop is walked once per iteration. Of the
branches, only the taken one is walked.

The border of a body fixes the layouts of what it reads from outside, carries and stacks. A stack that is read slice by
slice is resharded once, before the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.call import NodeOps
from pase.backends.torch.spmd.constants import Constants
from pase.backends.torch.spmd.pairs import OpPair
from pase.backends.torch.spmd.values import NotOnParts, RankValue
from pase.frontends.common.values import Value
from pase.frontends.torch.control import LOOPS, loop_operands, trip_count
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import TorchScope
from pase.ir import Place
from pase.local.reshard import part
from pase.local.types import LocalOperand
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    from torch import Tensor
    from torch.autograd import Function as TorchFunction

    from pase.backends.torch.spmd.interpreter import Body, RankWalk

__all__ = ["ControlNode"]


@dataclass(frozen=True, kw_only=True)
class ControlNode:
    """A loop, or branches, at a path of the graph, with the state of the walk before it.

    scope: the scope that holds its bodies.
    """

    walk: RankWalk
    scope: TorchScope
    node: FxNode
    path: str
    body: Body

    def run(self) -> None:
        """Run it and put its results into the body."""
        name = str(self.node.target)
        if name not in (*LOOPS, "cond"):
            raise NotOnParts(
                "pase only estimates its cost and cannot run it",
                fix="write it in other ops, for example a loop in Python",
            )
        made = set(filter(None, map(_tensor, self._made)))
        for pair in self._at(Place(self.path)):  # operands that are views
            if not made & {r.tensor for r in pair.local.results}:
                self._nest(pair, self.body)
        if name in LOOPS:
            self._loop()
        else:
            self._branch()

    @property
    def _made(self) -> Sequence[Value | None]:
        """The values that the node computes."""
        found = self.walk.index.values[self.node]
        return found if isinstance(found, list) else [found]

    # Loops.

    def _loop(self) -> None:
        _, init, xs, others = loop_operands(self.node)
        inside, at = self.scope.inner[self.path], Place(self.path)
        own, n = iter(inside.names), len(init)
        carried, slices, consts = ([next(own) for _ in given] for given in (init, xs, others))
        for k, outer in enumerate(others):
            self._handed_on(at.its("const", k), outer)
        for k, outer in enumerate(init):
            self._handed_on(at.its("carry", k), outer)
        for k, outer in enumerate(xs):
            self._handed_on(at.its("xs", k), outer)
        stacks = [self._stack(at.its("x", k), outer) for k, outer in enumerate(xs)]
        state = {m: self._known(o) for m, o in zip(carried, init, strict=True) if not self._decided(m)}
        stacked: list[list[Tensor]] = [[] for _ in inside.results[n:]]
        for iteration in range(trip_count(self.node)):
            given: dict[FxNode, Callable[[], Tensor]] = {
                **{m: partial(self._known, o) for m, o in zip(consts, others, strict=True)},
                **{m: partial(self._slice, o, iteration) for m, o in zip(slices, xs, strict=True)},
            }
            body = self._within(given, state, iteration)
            body.values |= {v.tensor: v for v in (_slice_of(v, iteration) for v in stacks if v is not None)}
            self.walk.steps(inside, f"{self.path}.", body)
            for k, m in enumerate(inside.results):
                views = [p for p in self._at(at.its("y", k)) if p.op.name != "stack"]
                for pair in views:
                    self._nest(pair, body)
                if k >= n:
                    stacked[k - n].append(self._result(self._made[k], m, body))
            self._closed(carried, inside.results[:n], body)
            state = {m: body.constants.of(inside.results[carried.index(m)]) for m in state}
        import torch

        known: list[Tensor | None] = [state.get(m) for m in carried] + [None] * len(stacked)
        for k, arrays in enumerate(stacked, n):
            known[k] = self._keep(self._made[k], torch.stack(arrays))
        self.body.constants.made[self.node] = known  # type: ignore[assignment]

    def _closed(self, carried: Sequence[FxNode], results: Sequence[FxNode], body: Body) -> None:
        """Put the carry for the next iteration into the body, in the layouts that the carry has."""
        new = []
        for k, (name, m) in enumerate(zip(carried, results, strict=True)):
            takers = self.walk.program.takers.get(Place(self.path).its("carry", k), ())
            if takers:
                value = self._operand(takers[0].operands[0], m, body)
                new.append(replace(value, tensor=_tensor(self.walk.index.values[name]) or ""))
        self.body.values |= {v.tensor: v for v in new}

    def _stack(self, at: Place, outer: FxNode) -> RankValue | None:
        """A stack in the layout in which the loop slices it, with its first dim not split. It gets the name of the
        slice. None if it does not depend on data."""
        for pair in self._at(at):
            v = self._operand(pair.local.operands[0], outer, self.body)
            if v.layout.along(0) or v.gradient.along(0):
                raise NotOnParts("the dim that it iterates over is split")
            return replace(v, tensor=pair.local.results[0].tensor)
        return None

    def _slice(self, outer: FxNode, iteration: int) -> Tensor:
        return self._known(outer)[iteration]

    def _within(
        self, given: dict[FxNode, Callable[[], Tensor]], state: dict[FxNode, Tensor], iteration: int
    ) -> Body:
        """The state of an iteration before its walk."""
        around = self.body.constants

        def seed_at(path: str) -> int:
            return around.seed_at(f"{path} in turn {iteration}")

        constants = Constants(
            index=around.index,
            buffers=around.buffers,
            device=around.device,
            seed_at=seed_at,
            made=dict(state),
            given=given,
        )
        return self.body.within(constants)

    # Branches.

    def _branch(self) -> None:
        if any(_tensor(v) not in self.walk.program.maker for v in self._made):
            raise NotOnParts("a branch returns a value that depends on no data")
        meets = [self.walk.program.maker[_tensor(v) or ""] for v in self._made]
        index, operands = self.node.args[0], self.node.args[3]
        asked = self._known(index) if not self._decided(index) else self._asked()
        k = self._likely() if _is_fake(asked) else 0 if bool(asked) else 1
        inside, at = self.scope.inner[f"{self.path}.{k}"], Place(self.path)
        body = self.body.within(self.body.constants)
        self.walk.steps(inside, f"{self.path}.{k}.", body)
        arrays = []
        for j, m in enumerate(inside.results):
            *views, left = self._at(at.its("out", k, j)) or (None,)
            for pair in filter(None, views):
                self._nest(pair, body)
            if left is not None:
                self._copied(left, m, body)
            arrays.append(self._operand(meets[j].operands[k], m, body).array)
        for made, x in zip(self._made, self._touched(arrays, operands), strict=True):
            self._keep(made, x)

    def _asked(self) -> Tensor:
        """The predicate that selects the branch, as a tensor that every rank has whole."""
        for v in self._made:
            op = self.walk.program.maker[_tensor(v) or ""]
            return self.walk.read(op.operands[-1], self.body).array
        raise NotOnParts("its branches return nothing")

    def _likely(self) -> int:
        """The number of the branch that the cost model takes as the likely one."""
        of_branch = {at.index[0]: at for at in self.walk.borders if (at.path, at.part) == (self.path, "out")}
        return max(of_branch, key=lambda k: self._at(of_branch[k])[-1].op.chance)

    def _touched(self, results: Sequence[Tensor], operands: Sequence[FxNode]) -> Sequence[Tensor]:
        """The results, with a gradient of zero for each operand that the branch does not read, as in PyTorch."""
        import torch

        read = [v for m in operands for v in self._values(m)]
        arrays = [v.array if v.gradient_carrier is None else v.gradient_carrier for v in read]
        trained = [x for x in arrays if x.requires_grad]
        if not trained or not torch.is_grad_enabled():
            return results
        floating = [x.is_floating_point() for x in results]
        there = iter(
            _touch().apply(sum(floating), *(x for x, f in zip(results, floating, strict=True) if f), *trained)
        )
        return [next(there) if f else x for x, f in zip(results, floating, strict=True)]

    def _values(self, m: FxNode) -> Iterator[RankValue]:
        value = self.walk.index.values[m]
        name = _tensor(value)
        if name in self.body.values:
            yield self.body.values[name]

    # Both loops and branches.

    def _at(self, at: Place) -> Sequence[OpPair]:
        return self.walk.borders.get(at, ())

    def _nest(self, pair: OpPair, body: Body) -> None:
        """Run a view at the border."""
        NodeOps(walk=self.walk, node=self.node, path=self.path, body=body).nest(pair)

    def _handed_on(self, at: Place, outer: FxNode) -> None:
        """Copy a value that enters into the layout of the border."""
        for pair in self._at(at):
            if pair.local.results:
                self._copied(pair, outer, self.body)

    def _copied(self, pair: OpPair, m: FxNode, body: Body) -> None:
        """Run a copy of a node's value at the border."""
        v = self._operand(pair.local.operands[0], m, body)
        (r,) = pair.local.results
        body.values[r.tensor] = replace(v, tensor=r.tensor, layout=r.layout)

    def _operand(self, o: LocalOperand, m: FxNode, body: Body) -> RankValue:
        """An operand in the layout in which it is read. m: the node whose value it is."""
        if not o.constant:
            return self.walk.read(o, body)
        x = part(body.constants.of(m), o.shape, o.layout, self.walk.groups)
        return RankValue(array=x, tensor=o.tensor, shape=o.shape, layout=o.layout)

    def _result(self, made: Value | None, m: FxNode, body: Body) -> Tensor:
        """The slice of a stacked result that one iteration computes."""
        op = self.walk.program.maker.get(_tensor(made) or "")
        return body.constants.of(m) if op is None else self._operand(op.operands[0], m, body).array

    def _keep(self, made: Value | None, x: Tensor) -> Tensor | None:
        """Put a result into the body. Returns it instead if it does not depend on data."""
        name = _tensor(made)
        if name is None or name not in self.walk.program.maker:
            return x
        r = self.walk.program.result(name)
        self.body.values[name] = RankValue(
            array=x, tensor=name, shape=r.shape, layout=r.layout, gradient=r.gradient
        )
        return None

    def _decided(self, m: FxNode) -> bool:
        return self.walk.index.decided(m)

    def _known(self, m: FxNode) -> Tensor:
        """The value of a node outside that does not depend on data."""
        return self.body.constants.of(m)


def _tensor(value: Value | list[Value | None] | None) -> str | None:
    return value.tensor.name if isinstance(value, Value) and value.tensor is not None else None


def _is_fake(x: Tensor) -> bool:
    """Whether it is a fake tensor, which has no values. Steps whose messages are only counted run on such tensors."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor)


def _slice_of(stack: RankValue, iteration: int) -> RankValue:
    """The slice of a stack that one iteration reads."""
    return replace(
        stack,
        array=stack.array[iteration],
        gradient_carrier=None if stack.gradient_carrier is None else stack.gradient_carrier[iteration],
        shape=stack.shape[1:],
        layout=_sliced(stack.layout),
        gradient=_sliced(stack.gradient),
    )


def _sliced(layout: AxisLayout) -> AxisLayout:
    return layout.renumbered(lambda dim: dim - 1)


@cache
def _touch() -> type[TorchFunction]:
    import torch

    class Touch(torch.autograd.Function):
        """Returns the first ``count`` tensors unchanged. The others get a gradient of zero."""

        @staticmethod
        def forward(ctx, count, *given):  # type: ignore[no-untyped-def]
            ctx.others = given[count:]
            return tuple(x.view_as(x) for x in given[:count])

        @staticmethod
        def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
            return None, *gradients, *(torch.zeros_like(x) for x in ctx.others)

    return Touch
