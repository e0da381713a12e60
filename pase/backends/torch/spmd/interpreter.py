"""Runs a local program in PyTorch: walks the exported graph again and runs each op on one rank's parts of its operands.

Between ops, each edge of the program is one ``autograd.Function``. Its forward runs the plan's reshard steps for the
value, and its backward runs the plan's reshard steps for the gradient. Everything else is ordinary differentiation of
the local computation, op by op (``call``).
"""

from __future__ import annotations

import contextlib
import operator
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from pase.backends.torch.spmd.call import NodeOps
from pase.backends.torch.spmd.collectives import SentLater, passed, there_and_back
from pase.backends.torch.spmd.constants import Constants, NodeIndex
from pase.backends.torch.spmd.control import ControlNode
from pase.backends.torch.spmd.freed import FreedParameters
from pase.backends.torch.spmd.gathered_again import (
    AgainMark,
    GatheredAgain,
    GatheredTaker,
    TakesGathered,
    only_a_factor,
    read_again,
)
from pase.backends.torch.spmd.gathers import gather_messages
from pase.backends.torch.spmd.masks import MaskForm, known_masks
from pase.backends.torch.spmd.messages import GradientSending
from pase.backends.torch.spmd.pairs import OpPair
from pase.backends.torch.spmd.process_groups import AxisGroups
from pase.backends.torch.spmd.recompute import recomputed
from pase.backends.torch.spmd.record import Recording, at_layer, recorder
from pase.backends.torch.spmd.rules import RANK_RULES, SEEDS_APART
from pase.backends.torch.spmd.values import NotOnParts, RankValue, apply_views, steps_from
from pase.errors import PaseError
from pase.frontends.common.values import Value
from pase.frontends.torch.export.functional import NO_GRADIENT
from pase.frontends.torch.frontend import TracedTorch
from pase.frontends.torch.lower import layer_of, place_of, source_of
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import TorchScope, op_name
from pase.ir import Op, Place
from pase.ir.blocks import Block, holders
from pase.local.reshard import resharded
from pase.local.types import LocalOp, LocalOperand, LocalProgram, LocalTransfer
from pase.machine import BUCKET_BYTES
from pase.pytree import Tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.utils.checkpoint import CheckpointPolicy

T = TypeVar("T")

__all__ = ["Body", "Keeping", "KeptTransfers", "RankWalk"]


@dataclass(kw_only=True)
class KeptTransfers:
    """The results of transfers that a walk keeps for later readers, by number.

    A kept value is the same for every reader, whichever op reads it first: an op under ``torch.no_grad``, an op of a
    recomputed block, or an op of a loop's iteration. It is therefore computed in the gradient mode of its walk. It
    belongs to one body: one micro-batch, one stage, one iteration, and either the first run or a recomputation.

    watched: whether autograd records the walk that computes them.
    received: the results that were computed before the walk and are valid in all of it.
    """

    watched: bool
    received: dict[int, Tensor] = field(default_factory=dict)
    made: dict[int, Tensor] = field(default_factory=dict)

    def receive(self, sent: Mapping[int, Tensor]) -> None:
        """Add the results of transfers that ran before the walk."""
        self.received.update(sent)
        self.made.update(sent)

    def inner(self) -> KeptTransfers:
        """The initial state for a nested body: only the results from before the walk."""
        return KeptTransfers(watched=self.watched, received=self.received, made=dict(self.received))

    def of(self, number: int, make: Callable[[], Tensor]) -> Tensor:
        """The result of a transfer. ``make`` computes it for all readers if it is not there yet.

        If the first reader ran under ``torch.no_grad`` and computed it there, later readers that are differentiated
        would get a value without history, and their gradients would be lost silently.
        """
        if number not in self.made:
            import torch

            with torch.set_grad_enabled(self.watched):
                self.made[number] = make()
        return self.made[number]


@dataclass
class Keeping:
    """Whether the current op keeps its result, in a block where only cheap work is recomputed."""

    now: bool = False

    @contextlib.contextmanager
    def of(self, kept: bool) -> Iterator[None]:
        self.now = kept
        try:
            yield
        finally:
            self.now = False


@dataclass
class Body:
    """The state of a walk: what it has computed so far.

    constants: values that do not depend on data.
    seed: the seed of all random ops together.
    kept: results of transfers, within the current recomputed block or outside of all blocks.
    values: results of ops, by tensor.
    """

    constants: Constants
    kept: KeptTransfers
    seed: int
    values: dict[str, RankValue] = field(default_factory=dict)
    keeping: Keeping = field(default_factory=Keeping)

    def within(self, constants: Constants, keeping: Keeping | None = None) -> Body:
        """The initial state of a nested body: a recomputed block, one iteration of a loop, or a branch."""
        return Body(
            constants=constants,
            kept=self.kept.inner(),
            seed=self.seed,
            values=dict(self.values),
            keeping=keeping or self.keeping,
        )


@dataclass(frozen=True, kw_only=True)
class RankWalk:
    """Walks over the graph on one rank.

    blocks: blocks of nodes that backward recomputes.
    counting: the ops that compute a micro-batch's share of the totals, as (place, tensor).
    totals: tensors that are sums over all micro-batches.
    scaled: tensor that an addition writes -> the factors of its operands (see ``BatchSums``).
    only: the numbers of the top-level nodes to run; None runs all of them.
    bucket_bytes: the size of the messages in which parameters are gathered and their gradients are sent.
    """

    program: LocalProgram
    traced: TracedTorch
    groups: AxisGroups
    blocks: tuple[Block, ...] = ()
    counting: frozenset[tuple[Place, str]] = frozenset()
    totals: frozenset[str] = frozenset()
    scaled: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    only: frozenset[int] | None = None
    bucket_bytes: float = BUCKET_BYTES

    @cached_property
    def sending(self) -> GradientSending:
        """Sends the gradients of parameters while backward goes on, if it is open; in a stage, those of hoisted
        transfers."""
        return GradientSending(
            program=self.program,
            groups=self.groups,
            bucket_bytes=self.bucket_bytes,
            among=None if self.only is None else frozenset(self.hoisted),
        )

    @cached_property
    def gathers(self) -> tuple[tuple[int, ...], ...]:
        """The transfers whose gathers are joined, for each message."""
        return gather_messages(self.program, self.bucket_bytes)

    @cached_property
    def gathered_again(self) -> GatheredTaker:
        """Where the edges hand over the parameters that backward gathers again."""
        return GatheredTaker()

    def again(self) -> GatheredAgain:
        """What backward gathers again of a micro-batch that begins."""
        return GatheredAgain(taker=self.gathered_again if self._gathers_again else None)

    def freed(self) -> TakesGathered:
        """``again``, if a recorded program runs op by op."""
        return FreedParameters(taker=self.gathered_again) if self._gathers_again else self.again()

    @cached_property
    def _gathers_again(self) -> bool:
        return any(self._again(n) is not None for n in range(len(self.program.transfers)))

    def _again(self, number: int) -> AgainMark | None:
        """The mark of a transfer that backward runs again; None for others."""
        if all(s.free for s in self.program.transfers[number].forward):
            return None
        if not read_again(self.program, number, self._inside):
            return None
        factor = only_a_factor(self.program, number, self._inside)
        return AgainMark(taker=self.gathered_again, factor=factor)

    @cached_property
    def counted(self) -> frozenset[str]:
        """The tensors that the ops in ``counting`` compute."""
        return frozenset(t for _, t in self.counting)

    @cached_property
    def index(self) -> NodeIndex:
        return NodeIndex(scope=self.traced.scope, data=frozenset(self.program.maker))

    @cached_property
    def known_masks(self) -> Mapping[FxNode, MaskForm]:
        """The operands of attention that are masks of a known form."""
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():  # masks are compared as real tensors
            return known_masks(self.index.paths, self.index)

    @cached_property
    def borders(self) -> Mapping[Place, list[OpPair]]:
        """Place -> its ops that depend on data, in traced order. For loops and branches, this includes the places of
        the ops that they have in addition to the nodes of their bodies."""
        found: dict[Place, list[OpPair]] = {}
        maker = self.program.maker
        for ops in self.ops.values():
            for op in ops:
                local = next((maker[w.tensor] for w in op.writes if w.tensor in maker), None)
                if local is not None:
                    found.setdefault(op.eqn, []).append(OpPair(op, local))
        return found

    @cached_property
    def pairs(self) -> Mapping[str, list[OpPair]]:
        """Path of a node -> its ops that depend on data."""
        return {at.path: pairs for at, pairs in self.borders.items() if at.part is None}

    @cached_property
    def ops(self) -> Mapping[str, list[Op]]:
        """Path of a node -> all ops of the node that read something, in traced order."""
        found: dict[str, list[Op]] = {}
        for node in self.traced.graph.nodes:
            for op in node.ops:
                if op.reads:
                    found.setdefault(op.eqn.path, []).append(op)
        return found

    def body(
        self, leaves: Mapping[str, RankValue], buffers: Mapping[str, Tensor], device: torch.device, seed: int
    ) -> Body:
        """The initial state of a walk.

        leaves: parameters and inputs, by tensor.
        buffers: the buffers that do not depend on data, by placeholder.
        seed: the seed of random ops, which must be the same on all ranks.
        """
        import torch

        base = seed * SEEDS_APART

        def seed_at(path: str) -> int:
            return base + zlib.crc32(path.encode())

        return Body(
            constants=Constants(index=self.index, buffers=buffers, device=device, seed_at=seed_at),
            kept=KeptTransfers(watched=torch.is_grad_enabled()),
            seed=base,
            values=dict(leaves),
        )

    def run(self, body: Body) -> None:
        """Run all nodes; their results are in ``body.values``."""
        self.steps(self.traced.scope, "", body)

    def steps(self, scope: TorchScope, prefix: str, body: Body) -> None:
        """Run a list of nodes whose places start with ``prefix``."""
        i = 0
        while i < len(scope.nodes):
            block = next((b for b in self.blocks if (b.prefix, b.start) == (prefix, i)), None)
            if block is None:
                if self._runs(prefix, i):
                    self._step(scope, i, prefix, body)
                i += 1
                continue
            if any(self._runs(prefix, j) for j in range(i, block.stop)):
                self._recompute(block, scope, body)
            i = block.stop

    def _runs(self, prefix: str, i: int) -> bool:
        return self.only is None or bool(prefix) or i in self.only

    def _inside(self, op: LocalOp) -> bool:
        """Whether the walk runs the op."""
        return self.only is None or op.op.eqn.number_in("") in self.only

    def count(self, body: Body) -> dict[str, Tensor]:
        """This micro-batch's share of the totals, computed from inputs alone. Intermediate results stay in ``body``."""
        import torch

        with torch.no_grad():
            for i in range(len(self.traced.scope.nodes)):
                self._step(self.traced.scope, i, "", body, of=self._counts)
        return {t: body.values[t].array for t in self.totals}

    def _counts(self, pair: OpPair) -> bool:
        return any((pair.op.eqn, w.tensor) in self.counting for w in pair.op.writes)

    @cached_property
    def hoisted(self) -> tuple[int, ...]:
        """The numbers of the transfers that run once per step, for all micro-batches."""
        users = {n: self.program.users(n) for n, t in enumerate(self.program.transfers) if t.hoisted}
        return tuple(n for n, ops in users.items() if any(map(self._inside, ops)))

    def arrivals(self, body: Body) -> dict[int, Tensor]:
        """Number -> result of each hoisted transfer.

        body: holds the parameters; their views and casts are added to it.
        """
        for i in range(len(self.traced.scope.nodes)) if self.hoisted else ():
            if self._runs("", i):
                self._step(self.traced.scope, i, "", body, of=self._of_parameters)
        return {
            n: self._transferred(body.values[self.program.transfers[n].tensor], n, body) for n in self.hoisted
        }

    def stored(self, transfer: int) -> str:
        """The parameter that a transfer sends, directly or through a view or a cast of it."""
        return self._stored[self.program.transfers[transfer].src]

    @cached_property
    def _stored(self) -> Mapping[str, str]:
        """Name of a parameter's node -> its tensor."""
        return {op.node: op.results[0].tensor for op in self.program.ops if op.op.kind == "parameter"}

    @cached_property
    def _sent_later(self) -> frozenset[str]:
        """The nodes of parameters whose gradients are sent while backward goes on."""
        return frozenset(
            t.src for t in self.program.transfers if t.backward and t.src in self.program.parameters
        )

    @cached_property
    def _only_ways(self) -> frozenset[int]:
        """The transfers that pass a parameter, or a view of it, on as it is, once in a micro-batch, if nothing else
        reads it."""
        program, found = self.program, set()
        for t in self._stored.values():
            uses = program.uses.get(t, ())
            while [o.transfer for _, o in uses] == [None] and uses[0][0].node in program.parameters:
                uses = program.uses.get(uses[0][0].results[0].tensor, ())
            numbers = {o.transfer for _, o in uses}
            if len(numbers) == 1 and not any(op.op.loops for op, _ in uses):
                found |= {n for n in numbers if n is not None and not program.transfers[n].forward}
        return frozenset(found)

    def _of_parameters(self, pair: OpPair) -> bool:
        """Whether the op is a view or a cast of a parameter."""
        return pair.local.node in self.program.parameters

    def _recompute(self, block: Block, scope: TorchScope, body: Body) -> None:
        """Run a block of nodes so that backward recomputes it. Only the tensors that ops outside read are kept."""
        from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

        keeping = Keeping()
        # A recomputation must not see what later blocks add, nor keep what was gathered outside of it.
        before = replace(body, values=dict(body.values), kept=body.kept.inner())

        def policy(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if keeping.now else CheckpointPolicy.PREFER_RECOMPUTE

        def inside() -> list[RankValue]:
            mine = before.within(body.constants, keeping)
            for j in range(block.start, block.stop):
                if self._runs(block.prefix, j):
                    self._step(scope, j, block.prefix, mine)
            return [v for k, v in mine.values.items() if k not in before.values and k in self._leave[block]]

        light = block.recompute == "light"

        def run(what: Callable[[], T]) -> T:
            around = create_selective_checkpoint_contexts(policy) if light else [contextlib.nullcontext()] * 2
            return recomputed(what, *around)

        into = recorder()
        if into is None:
            made = run(inside)
        else:
            made = _recorded_block(into, inside, run, keeping, f"block_{block.prefix}{block.start}")
        body.values.update({v.tensor: v for v in made})

    @cached_property
    def _leave(self) -> dict[Block, frozenset[str]]:
        """Block -> tensors computed in it that ops outside of it read."""
        held_by = holders(self.blocks)
        blocks = {id(op): held_by(op.op.eqn)[:1] for op in self.program.ops}  # none, or one
        left: dict[Block, set[str]] = {b: set() for b in self.blocks}
        for tensor, uses in self.program.uses.items():
            mine = blocks.get(id(self.program.maker.get(tensor)), ())
            if mine and any(blocks[id(op)] != mine and op.op.kind != "copy" for op, _ in uses):
                left[self.blocks[mine[0]]].add(tensor)
        return {b: frozenset(tensors) for b, tensors in left.items()}

    def _step(
        self,
        scope: TorchScope,
        i: int,
        prefix: str,
        body: Body,
        *,
        of: Callable[[OpPair], bool] | None = None,
    ) -> None:
        """Run a node. of: if given, run only the node's ops for which it returns True."""
        import torch

        n, path = scope.nodes[i], f"{prefix}{i}"
        if n.op != "call_function" or n.target is operator.getitem:
            return
        unwatched = NO_GRADIENT in (n.meta.get("custom") or {})
        with at_layer(lambda: layer_of(n)), torch.no_grad() if unwatched else contextlib.nullcontext():
            try:
                if isinstance(n.target, torch._ops.HigherOrderOperator) and op_name(n) not in RANK_RULES:
                    self._control(scope, n, path, body, of)
                elif path in scope.inner:
                    inner = scope.inner[path]
                    for j in range(len(inner.nodes)):
                        self._step(inner, j, f"{path}.", body, of=of)
                else:
                    self._node(n, path, body, of)
            except NotOnParts as e:
                if e.told:
                    raise
                raise NotOnParts(
                    f"the op cannot be run on parts of its operands: {e.what}",
                    where=place_of(n, self.program.name, source_of(n).place),
                    fix=e.fix or "compile with another mesh or strategy",
                    told=True,
                ) from e

    def _control(
        self, scope: TorchScope, n: FxNode, path: str, body: Body, of: Callable[[OpPair], bool] | None
    ) -> None:
        if of is None:
            ControlNode(walk=self, scope=scope, node=n, path=path, body=body).run()
        elif of == self._counts and any(
            at.path == path or at.path.startswith(f"{path}.") for at, _ in self.counting
        ):
            raise NotOnParts("its body counts what the loss is divided by, over all micro-batches")

    def _node(self, n: FxNode, path: str, body: Body, of: Callable[[OpPair], bool] | None) -> None:
        # A node has no pairs if it is a view that its readers apply, or does not depend on data.
        pairs = self.pairs.get(path)
        if not pairs or (of is None and self.hoisted and all(map(self._of_parameters, pairs))):
            return
        node = NodeOps(walk=self, node=n, path=path, body=body)
        if of is None:
            node.run(pairs)
        elif some := list(filter(of, pairs)):
            node.some(some)

    # Reading values through transfers.

    def read(self, o: LocalOperand, body: Body) -> RankValue:
        """An operand in the layout in which the op reads it."""
        value = body.values[self.program.original(o.tensor)]
        if o.transfer is not None:
            array = self._transferred(value, o.transfer, body)
            return RankValue(array=array, tensor=value.tensor, shape=value.shape, layout=o.layout)
        if value.layout != o.layout:
            raise PaseError(
                f"it is computed in layout {value.layout} and read in layout {o.layout} within one node",
                where=f"tensor '{o.tensor}'",
                fix="report this as a bug in pase.local",
            )
        if not o.summed:
            return value
        array = there_and_back(
            value.array,
            value.gradient_carrier,
            passed,
            lambda g: self.groups.all_reduce(g, o.summed),
            "gradient_all_reduce",
            anyshape=True,
        )
        return replace(value, array=array, gradient_carrier=None)

    def unchanged(self, number: int) -> bool:
        """Whether a transfer passes its tensor, and the gradient, on as they are."""
        t = self.program.transfers[number]
        before = self.program.before(number)
        return not (t.forward or t.backward) and (before is None or self.unchanged(before))

    def _transferred(self, value: RankValue, number: int, body: Body) -> Tensor:
        """The value after a transfer, which runs once per body. A transfer of a copy starts from the result of the
        copy's own transfer.
        """
        return body.kept.of(number, lambda: self._made(value, number, body))

    def _made(self, value: RankValue, number: int, body: Body) -> Tensor:
        t = self.program.transfers[number]
        if (before := self.program.before(number)) is not None:
            value = replace(value, array=self._transferred(value, before, body), gradient_carrier=None)
        later = None
        if t.src in self._sent_later:
            later = SentLater(number=number, taker=self.sending, alone=number in self._only_ways)
        unchanged = not t.forward and t.backward == () and value.gradient_carrier is None
        if unchanged and (later is None or value.array.is_leaf):
            return value.array
        shape = self.program.result(t.tensor).shape

        def there(x: Tensor) -> Tensor:
            return resharded(x, t.forward, shape, t.combine, self.groups)

        def back(g: Tensor) -> Tensor:
            return resharded(g, t.backward or (), shape, "sum", self.groups)

        alone = all(s.kind == "all_reduce" for s in (*t.forward, *(t.backward or ())))
        return there_and_back(
            value.array,
            value.gradient_carrier,
            there if t.forward else passed,
            None if t.backward is None else back,
            _named(t),
            anyshape=alone,
            later=later,
            again=self._again(number),
        )

    def output(self, value: Value, body: Body) -> Tensor:
        """A returned value of the model, in the plan's layout."""
        wanted = {t: op.operands[0] for t, op in self.program.outputs.items()}
        return self._returned(
            value, wanted, "the model returns a value for which its plan has no layout", body
        )

    def next_value(self, leaf: str, value: Value, body: Body) -> Tensor:
        """The next value of a buffer that the step writes, in the buffer's layout."""
        takers = self.program.takers.get(self.program.maker[leaf].op.eqn, ())
        wanted = {self.program.original(op.operands[0].tensor): op.operands[0] for op in takers}
        missing = "the plan has no layout for the next value of one of its buffers"
        x = self._returned(value, wanted, missing, body)
        return x.detach() if x.requires_grad else x

    def _returned(self, value: Value, wanted: Mapping[str, LocalOperand], missing: str, body: Body) -> Tensor:
        """A value in the layout in which it is wanted, by tensor. missing: the error if none of them is wanted."""
        for tensor, steps in steps_from(value):
            if tensor in wanted:
                got = self.read(wanted[tensor], body)
                return apply_views(got.array, got.layout, steps, self.program.mesh)
        raise PaseError(missing, where=f"model '{self.program.name}'")


def _named(t: LocalTransfer) -> str:
    """The name of an edge in a recorded program: its reshard steps, and those of its gradient."""
    there, back = ("_".join(s.kind for s in steps) for steps in (t.forward, t.backward or ()))
    return "_".join(filter(None, (there, f"gradient_{back}" if back else ""))) or "edge"


def _recorded_block(
    into: Recording,
    inside: Callable[[], list[RankValue]],
    run: Callable[[Callable[[], Tree]], Tree],
    keeping: Keeping,
    name: str,
) -> list[RankValue]:
    """Record a recomputed block as one call of a graph of its own."""
    block = into.block(keeping)
    with block.running():
        found = inside()
        carried = [v.gradient_carrier for v in found if v.gradient_carrier is not None]
        block.returned([v.array for v in found], carried)
    into.call_of(block, run, [*(v.array for v in found), *carried], name)
    return found
