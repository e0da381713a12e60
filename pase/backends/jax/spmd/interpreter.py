"""Runs a local program in JAX: walks the user's jaxpr again, and runs each equation on one device's part.

Everything runs inside one ``shard_map`` over the whole mesh. Between equations, each edge of the program is one
function with its own derivative: forward, it runs the plan's reshard steps, and backward, those that the plan has for
the gradient. Nothing else communicates, and nothing is left to a partitioner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pase.backends.jax.ops.arrays import JaxArrays, summed
from pase.backends.jax.ops.draws import Examples, drawn
from pase.backends.jax.ops.jaxprs import of_operand
from pase.backends.jax.ops.walk import JaxprWalk
from pase.backends.jax.spmd import rules
from pase.backends.jax.spmd.collectives import there_and_back
from pase.backends.jax.spmd.control import manual_cond, manual_scan, manual_while
from pase.backends.jax.spmd.custom_rules import call_with_rule
from pase.backends.jax.spmd.messages import BodyMessages
from pase.backends.jax.spmd.placement import given_form, message_bodies
from pase.backends.jax.spmd.prefetch import PARAMETER
from pase.backends.jax.spmd.values import Arrivals, Cache, DeviceValue, NotManual, faults_at, packed, unpacked
from pase.errors import PaseError
from pase.frontends.jax.control import by_platform
from pase.frontends.jax.draws import BatchDraw
from pase.frontends.jax.frontend import KEPT_WHOLE
from pase.frontends.jax.rules import BY_OPERAND
from pase.frontends.jax.types import Eqn
from pase.frontends.jax.versions import at_line, source_line
from pase.ir import Place
from pase.local.lower import between
from pase.local.reshard import part, resharded
from pase.local.types import Combine, LocalOp, LocalOperand, LocalProgram, LocalReshardStep, LocalTransfer
from pase.pytree import Tree
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import Mesh as JaxMesh


__all__ = ["ManualWalk"]


@dataclass(frozen=True, kw_only=True)
class ManualWalk(JaxprWalk[DeviceValue, Cache]):
    """The walk on one device, run under ``shard_map``.

    devices: JAX's mesh. arrivals: the parameters that are gathered outside of the loop over micro-batches, or whose
    gradients wait; None if each parameter is gathered where it is read.
    """

    program: LocalProgram
    devices: JaxMesh
    arrivals: Arrivals | None = None

    @property
    def only_finds(self) -> bool:
        """Whether this walk only finds the arrivals or the micro-batch's own sums, so that nothing has to be
        recomputed."""
        if super().only_finds:
            return True
        return self.arrivals is not None and self.arrivals.given is None and not self.arrivals.barred

    def constant(self, array: Array) -> DeviceValue:
        return DeviceValue(array=array)

    def changed(self, value: DeviceValue, change: Callable[[Array], Array]) -> DeviceValue:
        return replace(value, array=change(value.array))

    def packed(self, values: Sequence[DeviceValue]) -> list[Tree]:
        return packed(values)

    def unpacked(self, values: Sequence[DeviceValue], arrays: Sequence[Tree]) -> list[DeviceValue]:
        return unpacked(values, arrays)

    def inside(self, path: str) -> Cache:
        return Cache(body=path)

    def entered(self, values: Sequence[DeviceValue], state: Cache) -> None:
        for h in values:
            state.values.setdefault(h.tensor or "", h)

    @contextmanager
    def located(self, eqn: Eqn, at: Place) -> Iterator[None]:
        with faults_at(lambda _: self._named_at(eqn, at)), at_line(eqn):
            yield

    def within(self, what: str) -> ManualWalk:
        """The walk inside of a construct out of which no gather can be hoisted. what: names it in errors."""
        if self.arrivals is None:
            return self
        barred = replace(self.arrivals, given=None, found={}, wide={}, barred=what)
        return replace(self, arrivals=barred)

    def _arriving(self, key: str, number: int, make: Callable[[], Tree], value: DeviceValue) -> Tree:
        """The result of a transfer: ``make()``, or the arrival if there is one.

        key: of the arrival; the transfer's number, or "NUMBER back" for the carrier of its gradient.
        """
        if self.arrivals is None or number not in self.arrivals.numbers:
            return make()
        t = self.program.transfers[number]
        op = next(op for op in self.program.ops if op.node == t.src)
        stored = self.traced.graph.tensors[op.results[0].tensor].dtype
        return self.arrivals.of(key, t, stored, make, value)

    @cached_property
    def _scheduled(self) -> Mapping[str | None, Sequence[int]]:
        """Body -> the transfers that its messages carry."""
        if self.program.delayed or self.arrivals is not None:
            return {}
        return message_bodies(self.program, self.traced, self.blocks)

    def input(self, array: Array, tensor: str) -> DeviceValue:
        """An input. One that no op reads is whole on every device."""
        if tensor not in self.program.maker:
            return DeviceValue(array=array, tensor=tensor)
        return self.leaf(array, tensor)

    def leaf(self, array: Array, tensor: str, gradient_carrier: Array | None = None) -> DeviceValue:
        """A parameter or an input, in its storage layout."""
        return DeviceValue(
            array=array,
            tensor=tensor,
            layout=self.program.result(tensor).layout,
            gradient_carrier=gradient_carrier,
        )

    def scan(self, eqn: Eqn, ins: Sequence[DeviceValue], at: Place, state: Cache) -> Sequence[DeviceValue]:
        return list(map(self.known, manual_scan(self, eqn, ins, at, state)))

    def loop(self, eqn: Eqn, ins: Sequence[DeviceValue], at: Place, state: Cache) -> Sequence[DeviceValue]:
        return list(map(self.known, manual_while(self, eqn, ins, at, state)))

    def branches(
        self, eqn: Eqn, ins: Sequence[DeviceValue], at: Place, state: Cache
    ) -> Sequence[DeviceValue]:
        return manual_cond(self, eqn, ins, at, state)

    def single(self, eqn: Eqn, ins: Sequence[DeviceValue], at: Place, state: Cache) -> Sequence[DeviceValue]:
        if by_platform(eqn):
            self._check_whole(eqn, ins, "it has different code for each platform")
        name, names = eqn.primitive.name, self.traced.results[at]
        if name in KEPT_WHOLE:
            tensors = self.traced.graph.tensors
            if any(n and tensors[n].needs_grad for n in names):
                return call_with_rule(self, eqn, ins, at, state)
            return self.call(eqn, ins, f"{at.path}.", state)
        if name in BY_OPERAND and len(names) > 1:
            return self._by_operand(eqn, names, ins, state)
        draw = self.traced.drawn.get(at)
        mine = None if draw is None or self.examples is None else (draw, self.examples)
        return self._made(eqn, names, ins, state, mine)

    def known(self, value: DeviceValue) -> DeviceValue:
        """What its readers read: the whole batch's, if it is a sum over the batch that the micro-batches share."""
        if self.totals is None or value.tensor not in self.totals.sums.totals:
            return value
        return replace(value, array=self.totals.read(value.tensor, value.array))

    def _made(
        self,
        eqn: Eqn,
        names: Sequence[str],
        ins: Sequence[DeviceValue],
        cache: Cache,
        draw: tuple[BatchDraw, Examples] | None = None,
    ) -> list[DeviceValue]:
        """The results of an equation. Either all or none of them must depend on data. draw: as in ``ManualCall``."""
        made: dict[str, DeviceValue] = {}
        for op in self._makers(names):
            made.update(self.op_on_part(op, eqn, names, ins, cache, draw))
        made = {n: self.known(h) for n, h in made.items()}
        if not made:
            return self._constant(eqn, names, ins, draw)
        if unknown := [n for n in names if n not in made]:
            raise self.refusal(eqn, f"no op of the plan makes {', '.join(unknown)}")
        return [made[n] for n in names]

    def _check_whole(self, eqn: Eqn, ins: Sequence[DeviceValue], why: str) -> None:
        """Refuse an equation that needs whole arrays, if one of its operands is split."""
        for h in ins:
            if h.layout is not None and any(s is not None for s in h.layout):
                raise self.refusal(eqn, f"{why}, but its operand '{h.tensor}' is split")

    def _by_operand(
        self, eqn: Eqn, names: Sequence[str], ins: Sequence[DeviceValue], cache: Cache
    ) -> list[DeviceValue]:
        """The results of an equation whose i-th result has the layout of its i-th operand. Some may be constants."""
        import jax

        made = [
            self._made(of_operand(eqn, i), [n], [h], cache)[0]
            for i, (n, h) in enumerate(zip(names, ins, strict=True))
        ]
        if eqn.primitive.name == "optimization_barrier":  # each result waits for all operands
            return unpacked(made, jax.lax.optimization_barrier(packed(made)))
        return made

    def _makers(self, names: Sequence[str]) -> list[LocalOp]:
        """The ops that make these tensors, without duplicates. No op makes a constant."""
        found = {id(op): op for n in names if (op := self.program.maker.get(n)) is not None}
        return list(found.values())

    def _constant(
        self,
        eqn: Eqn,
        names: Sequence[str],
        ins: Sequence[DeviceValue],
        draw: tuple[BatchDraw, Examples] | None,
    ) -> list[DeviceValue]:
        """Values that do not depend on data. Every device makes the whole value; each reader takes its part."""
        if not names:
            raise self.refusal(eqn, "the plan has no layout for its results")
        # Only keys that were split as they arrived are not whole yet: a few bytes for each example.
        whole = AxisLayout.whole(self.program.mesh)
        arrays = [
            self.resharded(h, whole, tuple(v.aval.shape)).array for h, v in zip(ins, eqn.invars, strict=True)
        ]
        outs = rules.plainly(eqn, arrays, self.info) if draw is None else drawn(eqn, arrays, *draw)
        return [DeviceValue(array=x, tensor=n) for x, n in zip(outs, names, strict=True)]

    def op_on_part(
        self,
        op: LocalOp,
        eqn: Eqn,
        names: Sequence[str],
        ins: Sequence[DeviceValue],
        cache: Cache,
        draw: tuple[BatchDraw, Examples] | None = None,
    ) -> dict[str, DeviceValue]:
        """Tensor -> its value, for the results of one op of an equation. draw: as in ``ManualCall``."""
        wanted = self.matched(op, ins)
        self._named(eqn, lambda: rules.check_sums(self.program, ins, wanted))
        read = [
            self._seen(op, eqn, h, cache) if w is None else self.received(h, w, cache)
            for h, w in zip(ins, wanted, strict=True)
        ]
        for h in read:
            made = self.program.maker.get(h.tensor or "")
            if made is not None and made.node not in self.program.parameters:
                cache.begun.setdefault(op.node, h.array)
        place = {n: k for k, n in enumerate(names)}
        results = [next((r for r in op.results if r.tensor == n), None) for n in names]

        def evaluated(arrays: Sequence[Array], gradient: bool) -> list[Array]:
            arrays = arrays if self.totals is None else self.totals.operands(eqn, names, arrays)
            call = rules.ManualCall(
                eqn=eqn,
                op=op,
                mesh=self.program.mesh,
                devices=self.devices,
                info=self.info,
                operands=tuple(wanted),
                results=tuple(results),
                shapes=tuple(
                    None if r is None else self._local(r.shape, r.gradient if gradient else r.layout)
                    for r in results
                ),
                draw=draw,
            )
            return self._named(eqn, lambda: rules.evaluate(call, arrays))

        outs = evaluated([h.array for h in read], False)
        gradient_carriers: Sequence[Array | None] = [None] * len(outs)
        if any(h.gradient_carrier is not None for h in read):
            gradient_carriers = evaluated(
                [h.array if h.gradient_carrier is None else h.gradient_carrier for h in read], True
            )
        return {
            r.tensor: DeviceValue(
                array=outs[place[r.tensor]],
                tensor=r.tensor,
                layout=r.layout,
                gradient_carrier=gradient_carriers[place[r.tensor]],
            )
            for r in results
            if r is not None
        }

    def _seen(self, op: LocalOp, eqn: Eqn, value: DeviceValue, cache: Cache) -> DeviceValue:
        """A value that an op does not read directly.

        The op may read a view of the value that another op of the equation makes; a stacked value, for example, has one
        more dim. The value is then resharded in that form and converted back.
        """
        layout = value.layout
        if value.tensor is None or layout is None:
            return value
        for view in self.program.at.get(op.op.eqn, ()):
            (given,), made = self.matched(view, [value]), view.results[:1]
            wanted = [o for o in op.operands for r in made if self.program.original(o.tensor) == r.tensor]
            if given is None or not wanted:
                continue
            if [n for n in given.shape if n > 1] != [n for n in wanted[0].shape if n > 1]:
                break
            value = self.received(value, given, cache)
            seen = DeviceValue(
                array=value.array.reshape(self._local(made[0].shape, made[0].layout)),
                tensor=made[0].tensor,
                layout=made[0].layout,
                gradient_carrier=None
                if value.gradient_carrier is None
                else value.gradient_carrier.reshape(self._local(made[0].shape, made[0].gradient)),
            )
            arrived = self.received(seen, wanted[0], cache)
            held = iter(n for n, whole in zip(arrived.array.shape, wanted[0].shape, strict=True) if whole > 1)
            return replace(
                arrived, array=arrived.array.reshape([1 if n == 1 else next(held) for n in given.shape])
            )
        if not any(layout):
            return value
        raise self.refusal(
            eqn, f"it reads '{value.tensor}', which is split, but the plan has no layout for that"
        )

    def matched(self, op: LocalOp, ins: Sequence[DeviceValue]) -> list[LocalOperand | None]:
        """For each value, the operand of the op that it is; None for a literal."""
        left = list(op.operands)
        out: list[LocalOperand | None] = [None] * len(ins)
        for named in (True, False):  # constants of a jaxpr have no names: they take the remaining operands
            for i, h in enumerate(ins):
                if (h.tensor is not None) != named:
                    continue
                k = next((k for k, o in enumerate(left) if self._is(o, h)), None)
                if k is not None:
                    out[i] = left.pop(k)
        return out

    def _is(self, operand: LocalOperand, value: DeviceValue) -> bool:
        """Whether this value can be that operand."""
        if value.tensor is not None:
            return self.program.original(operand.tensor) == value.tensor
        return operand.constant and operand.shape == tuple(getattr(value.array, "shape", ()))

    def as_read(self, op: LocalOp, values: Sequence[DeviceValue], cache: Cache) -> list[DeviceValue]:
        """The values in the layouts in which an op reads them. A literal stays as it is."""
        wanted = self.matched(op, values)
        return [h if w is None else self.received(h, w, cache) for h, w in zip(values, wanted, strict=True)]

    def received(self, value: DeviceValue, wanted: LocalOperand, cache: Cache) -> DeviceValue:
        """The value in the layout in which an op reads it."""
        if value.layout is None:  # a constant, whole on every device
            array = part(value.array, wanted.shape, wanted.layout, JaxArrays(self.program.mesh))
            return replace(value, array=array, layout=wanted.layout)
        if wanted.transfer is not None:
            array = self._transferred(value, wanted.transfer, cache)
            return replace(value, array=array, layout=wanted.layout, gradient_carrier=None)
        if value.layout != wanted.layout:
            raise NotManual(
                f"'{wanted.tensor}' is made as {value.layout} but read as {wanted.layout} within one node; this is a "
                f"defect of pase.local"
            )
        if not wanted.summed:
            return value

        def back(g: Array) -> Array:
            return summed(g, wanted.summed)

        return replace(
            value,
            array=there_and_back(value.array, value.gradient_carrier, lambda x: x, back),
            gradient_carrier=None,
        )

    def _transferred(self, value: DeviceValue, number: int, cache: Cache) -> Array:
        """The value after a transfer, which each body sends once. A transfer of a copy starts from the copy's value."""
        if number in cache.arrived:
            return cache.arrived[number]
        t = self.program.transfers[number]
        if (messages := self._messages(cache)) is not None and number in messages.given:
            cache.arrived[number] = messages.arrived(number)
        else:
            cache.arrived[number] = self._arriving(
                str(number),
                number,
                lambda: self._sent(self._out_of_copy(value, number, cache), t),
                value,
            )
        return cache.arrived[number]

    def _messages(self, cache: Cache) -> BodyMessages | None:
        """The messages of a body; None if it has none."""
        if cache.messages is None and cache.body in self._scheduled:
            given = {
                k: given_form(self, self.program.transfers[k].tensor, cache)
                for k in self._scheduled[cache.body]
            }
            cache.messages = BodyMessages(
                program=self.program,
                given={k: h for k, h in given.items() if h is not None},
                begun=cache.begun,
            )
        return cache.messages

    def _out_of_copy(self, value: DeviceValue, number: int, cache: Cache) -> DeviceValue:
        """The value from which a transfer starts: the value itself, or the copy of it that the transfer sends."""
        if (before := self.program.before(number)) is None:
            return value
        return replace(value, array=self._transferred(value, before, cache), gradient_carrier=None)

    def _resharded(
        self, x: Array, steps: Sequence[LocalReshardStep], shape: tuple[int, ...], combine: Combine, what: str
    ) -> Array:
        import jax

        try:
            # The scope shows in profiles and in compiled programs what is sent.
            with jax.named_scope(what), faults_at(lambda _: f"the reshard of {what}"):
                return resharded(x, steps, shape, combine, JaxArrays(self.program.mesh))
        except NotManual:
            raise
        except PaseError as e:
            raise NotManual(f"it cannot be resharded manually: {e}", where=what) from None

    def _sent(
        self, value: DeviceValue, t: LocalTransfer, instead: Callable[[Array], Array] | None = None
    ) -> Array:
        """Run a transfer, with its gradient's way back. instead: replaces the forward reshard steps."""
        shape = self.program.result(t.tensor).shape

        def there(x: Array) -> Array:
            what = f"{t.tensor} for {t.dst}"
            if t.src in self.program.parameters:
                what = PARAMETER + what
            return self._resharded(x, t.forward, shape, t.combine, what)

        def back(g: Array) -> Array:
            what = f"gradient of {t.tensor} from {t.dst}"
            return self._resharded(g, t.backward or (), shape, "sum", what)

        return there_and_back(
            value.array, value.gradient_carrier, instead or there, None if t.backward is None else back
        )

    def gradient_carrier(self, value: DeviceValue, handed: LocalOperand, cache: Cache) -> Array:
        """Zeros in the layout in which an op returns the gradient of ``value``. Their gradient is resharded as in the
        plan and becomes that of the value. handed: the operand whose gradient it is."""
        import jax.numpy as jnp

        here = self._local(handed.shape, handed.gradient)

        def zeros(x: Array) -> Array:
            return jnp.zeros(here, x.dtype)

        if (number := handed.transfer) is None:
            return there_and_back(value.array, value.gradient_carrier, zeros, lambda g: g)
        t = self.program.transfers[number]
        return self._arriving(
            f"{number} back",
            number,
            lambda: self._sent(self._out_of_copy(value, number, cache), t, zeros),
            value,
        )

    def resharded(self, value: DeviceValue, want: AxisLayout | None, shape: tuple[int, ...]) -> DeviceValue:
        """A value in another layout. want: None for the same layout with partial sums reduced. shape: of the whole
        value."""
        mesh = self.program.mesh
        have = AxisLayout.whole(mesh) if value.layout is None else value.layout
        if want is None:
            want = have.summed
        op = self.program.maker.get(value.tensor or "")
        combine: Combine = "sum" if op is None else op.combine
        what = f"{value.tensor or 'a value'} of a derivative rule"
        array = self._resharded(value.array, between(have, want, mesh), shape, combine, what)
        return replace(value, array=array, layout=want, gradient_carrier=None)

    def _local(self, shape: tuple[int, ...], layout: AxisLayout) -> tuple[int, ...]:
        return layout.local_shape(shape, self.program.mesh)

    def refusal(self, eqn: Eqn, why: str) -> NotManual:
        """The error for an equation that cannot be lowered."""
        return NotManual(f"it cannot be lowered manually, because {why}", where=self._named_at(eqn))

    def _named_at(self, eqn: Eqn, at: Place | None = None) -> str:
        """The equation's primitive and the user's line. at: the equation's place; if JAX has lost the line, the ops at
        this place have it."""
        ops = () if at is None else self.program.at.get(at, ())
        line = source_line(eqn) or next((op.op.source for op in ops), None) or "an unknown line"
        return f"'{eqn.primitive.name}' at {line}"

    def _named(self, eqn: Eqn, run: Callable[[], Tree]) -> Tree:
        """The result of ``run``. If a rule refuses the equation, the error gets the equation's name and line."""
        try:
            return run()
        except rules.NotLowered as e:
            raise self.refusal(eqn, str(e)) from None
