"""Runs one node of an exported graph on one rank. The frontend may have lowered it to several ops.

A node with several ops (a norm, a loss, a linear layer with its bias) runs as PyTorch's own op (``rules``) if nothing
is resharded or summed between its ops. Otherwise its ops run one by one (``nests``).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from pase.backends.torch.spmd import flex_attention, halo  # noqa: F401, registers their rules
from pase.backends.torch.spmd.batch_norm import NormOps, SplitNorm
from pase.backends.torch.spmd.collectives import summed
from pase.backends.torch.spmd.masks import ATTENTION, MaskForm
from pase.backends.torch.spmd.nests import run_nest
from pase.backends.torch.spmd.pairs import Anchor, OpPair, made_by, partitioned
from pase.backends.torch.spmd.picks import PickOps, SplitLabel
from pase.backends.torch.spmd.rules import JOINING, RankCall, ShapeAndLayout, evaluate
from pase.backends.torch.spmd.values import (
    NotOnParts,
    RankValue,
    ReshapeStep,
    Steps,
    apply_views,
    inverse,
    layout_through,
    of_broadcast,
    steps_from,
    through_reshape,
)
from pase.errors import PaseError
from pase.frontends.common.values import Value
from pase.frontends.torch.control import flex_operands
from pase.frontends.torch.types import FxNode
from pase.frontends.torch.values import arguments, op_name
from pase.ir.functions import WINDOW_SUM
from pase.local.reshard import part, places_of
from pase.local.types import LocalOp, LocalOperand, LocalResult
from pase.memory.residuals import differentiated
from pase.pytree import Tree
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pase.backends.torch.spmd.interpreter import Body, RankWalk
    from pase.frontends.torch.values import TorchOperand

__all__ = ["NodeOps"]


_NOTHING: Mapping[int, int] = {}
_MEAN, _SUM = 1, 2
"""ATen's values of ``reduction`` for a loss that is averaged or summed."""
_MEANS = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d", "mse_loss", "l1_loss"})
"""Losses that are a sum divided by a count."""


_ATTENDED = ("query", "key", "value")
"""The operands of an attention, in the order in which its nest reads them."""


@dataclass(frozen=True, kw_only=True)
class NodeOps:
    """A node of the graph at its path, with the state of the walk before it."""

    walk: RankWalk
    node: FxNode
    path: str
    body: Body
    whole_constants: dict[str, Tensor] = field(default_factory=dict)
    """The whole values of the constants that its ops read, by tensor."""

    def run(self, pairs: Sequence[OpPair]) -> None:
        """Run the node and put its results into the body."""
        done = [pair for pair in pairs if self._known(pair)]
        if done:
            if left := [pair for pair in pairs if pair not in done]:
                self._around_totals(left)
            return
        before, work, after = partitioned(pairs)
        for pair in before:
            self.nest(pair)
        if any(pair.makes in self.walk.scaled for pair in work):
            self._one_by_one(work)
        elif all(pair.op.kind == "view" and pair.op.name == "broadcast" for pair in work):
            for pair in work:
                self.nest(pair)
        elif self._closed(work):
            self._at_once(work, before, self._anchors(work), {})
        elif work and work[0].op.kind in ("conv", "matmul") and self._arguments.get("bias") is not None:
            # The bias is added separately. The product has the shape of the sum, and the same views lead to the result.
            views = [a[1] for a in self._anchors(work) if a is not None]
            product = work[0].makes
            self._at_once(work[:1], before, [(product, views[0] if views else ())], {"bias": None})
            for pair in work[1:]:
                self.nest(pair)
        elif len(work) > 1 and not any(t in made_by(work) for pair in work for t in pair.reads):
            anchors = self._anchors(work)  # several independent ops, such as the parts of a split
            for pair in work:
                self._at_once(
                    [pair], before, [a if a and a[0] in made_by([pair]) else None for a in anchors], {}
                )
        elif total := self._total(work):
            above = _needed(work, total)
            self._at_once(above, before, [(total, ())], {"reduction": _SUM})
            counts = [p for t in work[-1].reads if t != total for p in _needed(work, t)]
            self._one_by_one([*counts, work[-1]])
        else:
            self._apart(work)
        for pair in after:
            self.nest(pair)

    def _apart(self, work: Sequence[OpPair]) -> None:
        """Run ops between which something is sent: those that are one op of ours at once, and the others one by one."""
        if (norm := self._split_norm(work)) is not None and self._normalized(norm):
            for pair in norm.rest:
                self.nest(pair)
        elif (pick := PickOps.of(work)) is not None and self._picked(pick):
            self._after_pick(pick)
        else:
            self._one_by_one(work)

    def _picked(self, pick: PickOps) -> bool:
        """Run the log-softmax of scores at a label, over a split dim, as one op. Returns False, and does nothing, if
        anything else reads what is inside, or the scores have a gradient carrier."""
        own = pick.own
        inner = {id(pair.local) for pair in own}
        of_scores, of_ids = own[-1].local.operands
        if any(id(op) not in inner for op in self._readers(pick.inside)) or not (
            of_scores.transfer is None or self.walk.unchanged(of_scores.transfer)
        ):
            return False
        scores = self.walk.read(own[2].local.operands[0], self.body)
        if scores.gradient_carrier is not None or (scores.array.requires_grad and not pick.differentiated):
            return False
        for pair in pick.labels:
            self.nest(pair)
        ids, last = self.walk.read(of_ids, self.body).array, len(scores.shape) - 1
        here, mine = places_of(ids, last, scores.shape, scores.layout, self.walk.groups)
        run = SplitLabel(groups=self.walk.groups, axes=pick.axes, negated=self._negated(pick))
        with self.body.keeping.of(any(not pair.local.op.remat for pair in own)):
            made = run(scores.array, here, mine)
        self._keep_seen(own[-1], made)
        return True

    def _negated(self, pick: PickOps) -> bool:
        """Whether the look-up makes its result with the other sign, because nothing else reads it."""
        return pick.negation is not None and len(self.walk.program.uses[pick.own[-1].makes]) == 1

    def _after_pick(self, pick: PickOps) -> None:
        """Run the other ops of a look-up's node. What the look-up has done already passes its operand on."""
        program, ids = self.walk.program, pick.own[-1].reads[1]
        done: dict[int, int] = {}
        if pick.negation is not None and self._negated(pick):
            done[id(pick.negation.op)] = 0
        if (hiding := pick.hiding(pick.own[0].local.operands[0].shape[-1])) is not None:
            pair, labels = hiding
            while ids != labels and ids in program.maker and program.maker[ids].op.name == "reshape":
                ids = program.original(program.maker[ids].op.reads[0].tensor)
            if ids == labels:
                done[id(pair.op)] = 1
        self._one_by_one(pick.rest, done)

    def _split_norm(self, work: Sequence[OpPair]) -> NormOps | None:
        """The ops of a batch norm whose batch is split, if nothing but the node itself reads its statistics."""
        norm = NormOps.of(work) if "batch_norm" in self._name else None
        if norm is None:
            return None
        if any(op.op.eqn.path != self.path for op in self._readers(norm.inside)):
            return None
        statistics = (u for u in self.node.users if u.target is operator.getitem and u.args[1] in (1, 2))
        return None if any(u.users for u in statistics) else norm

    def _normalized(self, norm: NormOps) -> bool:
        """Run a batch norm whose batch is split as one op. Returns False, and does nothing, if a parameter has a
        gradient carrier."""
        own, given = norm.own, list[RankValue]()
        x = self.walk.read(own[0].local.operands[0], self.body)
        if x.array.requires_grad and not norm.differentiated:
            return False
        for pair in (norm.scale, norm.shift):
            if pair is not None:
                given.append(self.walk.read(pair.local.operands[1], self.body))
        values = (x, *given)
        if any(v.gradient_carrier is not None for v in values):
            return False
        count, eps = (
            next(float(n) for n in own[i].op.numbers or () if isinstance(n, (int, float))) for i in (1, 6)
        )
        run = SplitNorm(groups=self.walk.groups, axes=norm.axes, count=count, eps=eps)
        weight, bias = (*(v.array.reshape(-1) for v in given), None, None)[:2]
        with self.body.keeping.of(any(not pair.local.op.remat for pair in own)):
            made, mean, variance = run(x.array, weight, bias)
        inverse = (variance + run.eps).rsqrt()
        statistics = {own[1].makes: mean, own[5].makes: variance}
        updated = []
        for u in norm.updates:
            present = self.walk.read(u.fading.local.operands[0], self.body).array.reshape(-1)
            updated.append((u.added, u(present, statistics[u.batch])))
        done = ((own[1], mean), (own[5], variance), (own[7], inverse), *updated, (norm.last, made))
        for pair, value in done:
            self._keep_seen(pair, value)
        return True

    def _readers(self, tensors: Collection[str]) -> Iterator[LocalOp]:
        """The ops that read any of these tensors."""
        return (op for t in tensors for op, _ in self.walk.program.uses.get(t, ()))

    def _total(self, work: Sequence[OpPair]) -> str | None:
        """The sum of a loss over a batch that is split, of which the loss is the mean. PyTorch's own op computes it
        with the reduction "sum"; only the division, and what it divides by, is left. None if the node is another."""
        if self._name not in _MEANS or self._arguments.get("reduction") != _MEAN or not work:
            return None
        *_, last = work
        if last.op.function.name != "div" or self._of_probabilities:
            return None
        total = last.reads[0]
        return total if total in made_by(work) and self._closed(_needed(work, total)) else None

    @property
    def _of_probabilities(self) -> bool:
        """Whether the labels of a loss are probabilities. Its sum then has the other sign."""
        return (
            "mse" not in self._name
            and self._name != "l1_loss"
            and (self._arguments["target"].meta["val"].is_floating_point())
        )

    def some(self, pairs: Sequence[OpPair]) -> None:
        """Run these ops of the node, and no others."""
        every = self.walk.pairs.get(self.path, [])
        if len(pairs) == len(every):
            self.run(pairs)
        else:
            self._one_by_one(pairs)

    def _known(self, pair: OpPair) -> bool:
        """Whether its results are already in the body, because it is, or contributes to, a sum over all
        micro-batches."""
        return all(r.tensor in self.walk.counted and r.tensor in self.body.values for r in pair.local.results)

    def _around_totals(self, left: Sequence[OpPair]) -> None:
        """Run the remaining ops of a node for which the sums over all micro-batches are known.

        The ops that do not depend on such a sum run as PyTorch's own op, with the reduction "sum". The ops that do
        depend on it (a division by a count, for example) then run one by one.
        """
        behind = set(self.walk.totals)
        first: list[OpPair] = []
        rest: list[OpPair] = []
        for pair in left:
            told = behind & {*pair.reads}
            (rest if told else first).append(pair)
            behind |= made_by([pair]) if told else set()
        before, work, _ = partitioned(first)
        if work and "reduction" in self._arguments and self._closed(work):
            for pair in before:
                self.nest(pair)
            total = work[-1].makes
            self._at_once(work, before, [(total, ())], {"reduction": _SUM})
        else:
            self._apart(first)
        self._one_by_one(rest)

    # Running a node as PyTorch's own op.

    def _anchors(self, work: Sequence[OpPair]) -> list[Anchor | None]:
        """For each result of the node: the tensor of the work that the result is a view of, or None."""
        found = self.walk.index.values[self.node]
        made = made_by(work)
        out: list[Anchor | None] = []
        for v in found if isinstance(found, list) else [found]:
            out.append(next((anchor for anchor in steps_from(v) if anchor[0] in made), None))
        return out

    def _closed(self, work: Sequence[OpPair]) -> bool:
        """Whether nothing is resharded or summed between these ops, and each operand is read in only one layout. (An
        attention may read one tensor in several, as queries and as keys.)

        In a recomputed region, ops of several nodes run separately: backward may need only the first again, and then
        the operands of the others must not be sent again.
        """
        program, own = self.walk.program, made_by(work)
        ways: dict[str, set[object]] = {}
        for pair in work:
            for o in pair.local.operands:
                name = program.original(o.tensor)
                if name not in own:
                    ways.setdefault(name, set()).add(None if o.constant else self._way(o))
                elif (
                    o.summed
                    or (o.transfer is not None and not self.walk.unchanged(o.transfer))
                    or (
                        o.transfer is not None
                        and pair.local.op.region is not None
                        and not self._pooled(o.transfer)
                    )
                ):
                    return False
        read = {program.original(o.tensor) for pair in work for o in pair.local.operands}
        partial = any(
            r.partial_over(program.mesh) and (r.tensor in read or pair.local.combine != "sum")
            for pair in work
            for r in pair.local.results
        )
        one_way = all(len(w) == 1 for w in ways.values()) or _is_attention(work)
        return bool(work) and one_way and (len(work) == 1 or not partial)

    def _pooled(self, transfer: int) -> bool:
        """Whether a window op computes what the transfer passes on."""
        program = self.walk.program
        return program.maker[program.transfers[transfer].tensor].op.kind == "window"

    def _way(self, o: LocalOperand) -> object:
        """A key that is equal for operands that share one transfer."""
        if o.transfer is None:
            return o.layout, o.summed
        t = self.walk.program.transfers[o.transfer]
        steps = t.forward or t.backward or t.tensor in self.walk.program.originals
        return o.transfer if steps else (o.layout, t.backward is None)

    def _at_once(
        self,
        work: Sequence[OpPair],
        before: Sequence[OpPair],
        anchors: Sequence[Anchor | None],
        fixed: Mapping[str, TorchOperand],
    ) -> None:
        reads = _Reads.of(self, work, before)
        arrays = self._computed(work, reads, anchors, fixed, gradient=False)
        gradient_carriers = (
            self._computed(work, reads, anchors, fixed, gradient=True) if reads.has_gradient_carrier else {}
        )
        for pair in work:
            for r in pair.local.results:
                if r.tensor in arrays:
                    x = self._reduced(pair.local, r, arrays[r.tensor], self._name in JOINING)
                    self._keep(r, x, gradient_carriers.get(r.tensor))

    def _computed(
        self,
        work: Sequence[OpPair],
        reads: _Reads,
        anchors: Sequence[Anchor | None],
        fixed: Mapping[str, TorchOperand],
        *,
        gradient: bool,
    ) -> dict[str, TorchOperand]:
        """Tensor -> the op's result. gradient: whether to compute the gradient carriers instead of the values."""
        mesh = self.walk.program.mesh
        results = {r.tensor: r for pair in work for r in pair.local.results}
        outs: list[ShapeAndLayout | None] = []
        for a in anchors:
            if a is None:
                outs.append(None)
                continue
            r = results[a[0]]
            layout = layout_through(r.gradient if gradient else r.layout, a[1], mesh)
            outs.append((_shape_through(r.shape, a[1]), layout))
        given, layouts = reads.given(outs, gradient)
        if given.get("device") is not None:  # it may have been traced on another device than it runs on
            given = {**given, "device": self.body.constants.device}
        call = RankCall(
            target=self.node.target,
            ops=[pair.local for pair in work],
            given={**given, **fixed},
            layouts=layouts,
            outs=outs,
            groups=self.walk.groups,
            seed=self.body.constants.seed_at(self.path),
            whole=_values(self.node.meta["val"]),
            mask=self._mask_form,
        )
        try:
            with self.body.keeping.of(any(not pair.local.op.remat for pair in work)):
                made = evaluate(self._name, call)
        except PaseError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as e:
            raise NotOnParts(f"PyTorch raises an error: {' '.join(str(e).split())[:300]}") from e
        out: dict[str, TorchOperand] = {}
        for x, a, where in zip(made, anchors, outs, strict=False):
            if a is not None and where is not None and a[0] not in out:
                out[a[0]] = self._checked(
                    apply_views(x, where[1], inverse(a[1]), mesh), results[a[0]], gradient
                )
        return out

    def _checked(self, x: Tensor, r: LocalResult, gradient: bool) -> Tensor:
        want = (r.gradient if gradient else r.layout).local_shape(r.shape, self.walk.program.mesh)
        if tuple(x.shape) != want:
            raise NotOnParts(
                f"its result on this rank has shape {list(x.shape)}, but {list(want)} in the plan"
            )
        return x

    def _reduced(self, local: LocalOp, r: LocalResult, x: Tensor, joined: bool) -> Tensor:
        """All-reduce a partial result that the same node reads. joined: whether a rule has already combined the parts
        of several ranks in another way than by a sum."""
        if r.partial_over(self.walk.program.mesh) and local.combine != "sum" and not joined:
            raise NotOnParts("no rule combines its partial results")
        if not r.summed or local.combine != "sum":
            return x  # the edge to the reader sums it
        return summed(x, r.summed, self.walk.groups)

    def _keep(self, r: LocalResult, x: Tensor, gradient_carrier: Tensor | None) -> None:
        self.body.values[r.tensor] = RankValue(
            array=x,
            tensor=r.tensor,
            shape=r.shape,
            layout=r.layout,
            gradient_carrier=gradient_carrier,
            gradient=r.gradient,
        )

    def _keep_seen(self, pair: OpPair, value: Tensor) -> None:
        """Keep the result of an op, whose elements are there in another shape."""
        (r,) = pair.local.results
        self._keep(r, value.reshape(r.layout.local_shape(r.shape, self.walk.program.mesh)), None)

    # Running the ops of a node one by one.

    @property
    def _name(self) -> str:
        return op_name(self.node)

    @cached_property
    def _arguments(self) -> dict[str, TorchOperand]:
        if self._name == "flex_attention":
            return flex_operands(self.node)
        return arguments(self.node.target, self.node.args, self.node.kwargs)

    @property
    def _mask_form(self) -> MaskForm | None:
        mask = self._arguments.get("attn_mask") if self._name == ATTENTION else None
        return None if mask is None else self.walk.known_masks.get(mask)

    def _one_by_one(self, work: Sequence[OpPair], passed: Mapping[int, int] = _NOTHING) -> None:
        """Run these ops in traced order.

        passed: identity of an op that need not run -> which of its operands is its result.
        """
        mine = {id(pair.op): pair for pair in work}
        for pair in (mine[id(op)] for op in self.walk.ops[self.path] if id(op) in mine):
            if id(pair.op) in passed:
                local = pair.local
                value, (r,) = self.walk.read(local.operands[passed[id(pair.op)]], self.body), local.results
                self._keep(r, self._checked(value.array, r, False), value.gradient_carrier)
            else:
                self.nest(pair)

    def _whole(self, tensor: str) -> Tensor:
        """The whole value of a constant: one of the node's operands, or what the node's ops make of constants."""
        if tensor not in self.whole_constants:
            made = self._of_inputs(tensor)
            self.whole_constants[tensor] = self._made_whole(tensor) if made is None else made
        return self.whole_constants[tensor]

    def _made_whole(self, tensor: str) -> Tensor:
        """The whole value of a constant that one of the node's ops makes."""
        t = self.walk.traced.graph.tensors[tensor]
        op = next((op for op in self.walk.ops[self.path] if [w.tensor for w in op.writes] == [tensor]), None)
        if op is None:
            raise NotOnParts("a constant that it reads is not among its operands")
        ins = [self._whole(a.tensor) for a in op.reads]
        return run_nest(op, None, ins, tuple(map(int, t.shape)), self.walk.groups).to(_dtype(t.dtype))

    def _of_inputs(self, tensor: str) -> Tensor | None:
        """The whole value of a constant that is one of the node's operands, or that one of them is a view of."""
        constants, mesh = self.body.constants, self.walk.program.mesh
        for m in self.node.all_input_nodes:
            value = None if self.walk.index.decided(m) else self.walk.index.values.get(m)
            for made, steps in steps_from(value):
                if made == tensor:
                    return apply_views(constants.of(m), AxisLayout.whole(mesh), inverse(steps), mesh)
        return None

    def nest(self, pair: OpPair) -> None:
        """Run one of the node's ops."""
        op, local = pair
        moves = any(o.halo for o in local.operands)
        if (moves and op.function is not WINDOW_SUM) or len(local.results) != 1:
            raise NotOnParts(f"'{op.name}' in it cannot be run separately from the rest")
        (r,) = local.results
        ins = [self._constant(o) if o.constant else self.walk.read(o, self.body) for o in local.operands]
        if moves and any(v.gradient_carrier is not None for v in ins):
            raise NotOnParts(f"the gradient of '{op.name}' in it arrives in another layout")
        if (factors := self.walk.scaled.get(r.tensor)) is not None:
            ins = [v.times(by) for v, by in zip(ins, factors, strict=True)]
        trained = r.tensor in differentiated(self.walk.traced.graph)

        def computed(arrays: Sequence[Tensor], layout: AxisLayout) -> Tree:
            if not trained:  # the maximum of a softmax: autograd would keep its operand
                arrays = [x.detach() if x.requires_grad else x for x in arrays]
            shape = layout.local_shape(r.shape, self.walk.program.mesh)
            with self.body.keeping.of(not local.op.remat):
                x = run_nest(op, local, arrays, shape, self.walk.groups)
            dtype = _dtype(self.walk.traced.graph.tensors[r.tensor].dtype)
            return x if x.dtype == dtype else x.to(dtype)

        x = self._checked(computed([v.array for v in ins], r.layout), r, False)
        gradient_carrier = None
        if any(v.gradient_carrier is not None for v in ins):
            gradient_carrier = computed(
                [v.array if v.gradient_carrier is None else v.gradient_carrier for v in ins], r.gradient
            )
        if local.combine != "sum" and r.partial_over(self.walk.program.mesh):
            if x.requires_grad:
                raise NotOnParts(
                    f"'{op.name}' in it has a gradient and is combined over several ranks, not as a sum"
                )
            x = self.walk.groups.all_reduce(x, r.summed, local.combine) if r.summed else x
        self._keep(r, self._reduced(local, r, x, True), gradient_carrier)

    def _constant(self, o: LocalOperand) -> RankValue:
        """An operand that does not depend on data."""
        x = part(self._whole(o.tensor), o.shape, o.layout, self.walk.groups)
        return RankValue(array=x, tensor=o.tensor, shape=o.shape, layout=o.layout)


@dataclass(frozen=True, kw_only=True)
class _Reads:
    """What the work of a node reads.

    values: by tensor.
    roots: tensor that a preceding view computes -> (the source of the view, the steps from it).
    constants: operands that do not depend on data.
    told: an operand's name in the call -> ``values`` of it alone, if one tensor is several operands.
    """

    of_node: NodeOps
    values: dict[str, RankValue]
    roots: dict[str, Anchor]
    constants: list[LocalOperand]
    pointwise: bool
    told: Mapping[str, Mapping[str, RankValue]]

    @classmethod
    def of(cls, ops: NodeOps, work: Sequence[OpPair], before: Sequence[OpPair]) -> _Reads:
        program, own = ops.walk.program, made_by(work)
        roots: dict[str, Anchor] = {}
        for pair in before:
            read = pair.reads[0]
            root, steps = roots.get(read, (read, ()))
            roots[pair.makes] = root, (*steps, *pair.as_steps)
        values: dict[str, RankValue] = {}
        constants = []
        for pair in work:
            for o in pair.local.operands:
                name = program.original(o.tensor)
                if o.constant:
                    constants.append(o)
                elif name not in own and name not in values:
                    values[name] = ops.walk.read(o, ops.body)
        told: dict[str, Mapping[str, RankValue]] = {}
        if _is_attention(work):
            operands = work[0].local.operands[: len(_ATTENDED)]
            names = [program.original(o.tensor) for o in operands]
            for argument, name, o in zip(_ATTENDED, names, operands, strict=True):
                told[argument] = {name: ops.walk.read(o, ops.body) if names.count(name) > 1 else values[name]}
        kinds = {pair.op.kind for pair in work}
        return cls(
            of_node=ops,
            values=values,
            roots=roots,
            constants=constants,
            pointwise=kinds == {"elementwise"},
            told=told,
        )

    @property
    def has_gradient_carrier(self) -> bool:
        return any(v.gradient_carrier is not None for v in self.values.values())

    def given(
        self, outs: Sequence[ShapeAndLayout | None], gradient: bool
    ) -> tuple[dict[str, TorchOperand], dict[str, ShapeAndLayout]]:
        """The op's operands on this rank, and the layouts of those that are tensors."""
        layouts: dict[str, ShapeAndLayout] = {}
        arguments = self.of_node._arguments.items()
        return {k: self._operand(k, v, outs, gradient, layouts) for k, v in arguments}, layouts

    def _operand(
        self,
        name: str,
        v: TorchOperand,
        outs: Sequence[ShapeAndLayout | None],
        gradient: bool,
        layouts: dict[str, ShapeAndLayout],
    ) -> TorchOperand:
        """An operand on this rank. layouts: the layout of a tensor is added to it.

        A function within ``given`` that calls itself would keep every operand until Python collects its cycles.
        """
        if isinstance(v, (list, tuple)):
            return [self._operand("", x, outs, gradient, layouts) for x in v]
        if not _is_node(v):
            return v
        x, layouts[name] = self._one(v, outs, gradient, self.told.get(name, self.values))
        return x

    def _one(
        self,
        m: FxNode,
        outs: Sequence[ShapeAndLayout | None],
        gradient: bool,
        values: Mapping[str, RankValue],
    ) -> tuple[Tensor | None, ShapeAndLayout]:
        walk = self.of_node.walk
        mesh, value = walk.program.mesh, walk.index.values.get(m)
        if not isinstance(value, Value):
            raise NotOnParts(f"one of its operands is a {type(value).__name__}, not a tensor")
        for name, steps in steps_from(value):
            for read, root in ((name, (name, ())), *self.roots.items()):
                if root[0] == name and read in values:
                    return self._viewed(values[read], (*inverse(root[1]), *steps), gradient)
        if walk.index.decided(m):
            return None, (value.shape, AxisLayout.whole(mesh))  # the op needs only its shape
        return self._constant(m, value, outs)

    def _viewed(self, v: RankValue, steps: Steps, gradient: bool) -> tuple[Tensor, ShapeAndLayout]:
        mesh = self.of_node.walk.program.mesh
        beside = v.gradient_carrier if gradient else None
        layout = v.layout if beside is None else v.gradient
        x = apply_views(v.array if beside is None else beside, layout, steps, mesh)
        return x, (_shape_through(v.shape, steps), layout_through(layout, steps, mesh))

    def _constant(
        self, m: FxNode, value: Value, outs: Sequence[ShapeAndLayout | None]
    ) -> tuple[Tensor, ShapeAndLayout]:
        """A constant in the layout in which an operand of its shape is read, or in the layout of a pointwise result."""
        walk = self.of_node.walk
        x = self.of_node.body.constants.of(m)
        nowhere = AxisLayout.whole(walk.program.mesh)
        same = [o for o in self.constants if math.prod(o.shape) == math.prod(value.shape)]
        own = {t for t, _ in steps_from(value)}
        beside = (n for n in self.of_node.node.all_input_nodes if n is not m)
        others = {t for n in beside for t, _ in steps_from(walk.index.values.get(n))}
        known = (o for o in same if o.tensor in own)
        operand = next(known, next((o for o in same if o.tensor not in others), None))
        read = None
        if operand is not None:
            read = through_reshape(operand.layout, operand.shape, value.shape, walk.program.mesh)
        elif self.pointwise and outs and outs[0] is not None:
            read = of_broadcast(value.shape, *outs[0])
        if read is None:
            return x, (value.shape, nowhere)
        return part(x, value.shape, read, walk.groups), (value.shape, read)


def _is_attention(work: Sequence[OpPair]) -> bool:
    return len(work) == 1 and work[0].op.kind == "attention"


def _needed(work: Sequence[OpPair], tensor: str) -> list[OpPair]:
    """The ops of the work that a tensor depends on."""
    wanted, found = {tensor}, []
    for pair in reversed(work):
        if made_by([pair]) & wanted:
            found.append(pair)
            wanted |= {*pair.reads}
    return found[::-1]


def _shape_through(shape: tuple[int, ...], steps: Steps) -> tuple[int, ...]:
    for step in steps:
        shape = step.new if isinstance(step, ReshapeStep) else tuple(shape[i] for i in step.order)
    return shape


def _is_node(v: object) -> bool:
    import torch

    return isinstance(v, torch.fx.Node)


def _dtype(name: str) -> torch.dtype:
    import torch

    return getattr(torch, name)


def _values(x: Tree) -> list[Tensor]:
    return list(x) if isinstance(x, (tuple, list)) else [x]
