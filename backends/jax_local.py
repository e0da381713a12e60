"""A local program run by JAX: the user's jaxpr walked once more, each equation on one device's part of its operands.

All of it stands inside of one ``shard_map`` over the whole mesh. Between equations, each edge of the program is one
function whose derivative is given: forward it makes the plan's moves, backward those that the plan has for the
gradient. Nothing else sends anything, and nothing is left to a partitioner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pase.backends import jax_local_rules as rules
from pase.backends.jax_equations import KEPT, boundary
from pase.backends.jax_moves import moved, part, summed, there_and_back
from pase.backends.jax_values import DeviceValue, NotByHand, packed, unpacked
from pase.errors import PaseError
from pase.frontends.from_jax import KEPT_WHOLE, TracedJax, inlined, inner_jaxpr
from pase.frontends.jax_control import by_platform
from pase.frontends.jax_versions import is_literal, scan_groups, source_line
from pase.ir import Place, PlacePart
from pase.ir.blocks import Block
from pase.local.types import Layout, LocalOp, LocalOperand, LocalProgram, LocalTransfer, local_shape

__all__ = ["LocalWalk"]

Cache = dict[int, Any]
"""What transfers brought so far in this loop's, branch's or rematerialised region's body: number -> array."""


@dataclass(frozen=True, kw_only=True)
class LocalWalk:
    """One walk over the jaxpr, on one device; run under ``shard_map``. blocks: equations that backward computes again;
    kept: those of them whose results it finds kept; devices: JAX's mesh."""

    program: LocalProgram
    traced: TracedJax
    blocks: Sequence[Block]
    kept: frozenset[Place]
    devices: Any

    @cached_property
    def _info(self) -> Any:
        return self.traced.jaxpr.jaxpr.debug_info._replace(arg_names=None, result_paths=None)

    def leaf(self, array: Any, tensor: str, shadow: Any = None) -> DeviceValue:
        """A parameter or an input as it is stored."""
        return DeviceValue(
            array=array, tensor=tensor, layout=self.program.result(tensor).layout, shadow=shadow
        )

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[DeviceValue], prefix: str, cache: Cache
    ) -> list[DeviceValue]:
        """cache: of the body that these equations stand in."""
        from jax.ad_checkpoint import checkpoint_name

        env: dict[Any, DeviceValue] = {
            v: DeviceValue(array=c) for v, c in zip(jaxpr.constvars, consts, strict=True)
        }
        env.update(zip(jaxpr.invars, args, strict=True))

        def value(var: Any) -> DeviceValue:
            return DeviceValue(array=var.val) if is_literal(var) else env[var]

        def one(i: int, cache: Cache) -> None:
            eqn = jaxpr.eqns[i]
            at = Place(f"{prefix}{i}")
            outs = self._equation(eqn, [value(v) for v in eqn.invars], at, cache)
            if at in self.kept:
                outs = [replace(h, array=checkpoint_name(h.array, KEPT)) for h in outs]
            env.update(zip(eqn.outvars, outs, strict=True))

        i = 0
        while i < len(jaxpr.eqns):
            block = next((b for b in self.blocks if b.prefix == prefix and b.start == i), None)
            if block is None:
                one(i, cache)
                i += 1
                continue
            self._again(jaxpr, block, env, one)
            i = block.stop
        return [value(v) for v in jaxpr.outvars]

    def _again(
        self, jaxpr: Any, block: Block, env: dict[Any, DeviceValue], one: Callable[[int, Cache], None]
    ) -> None:
        """A block of equations, rematerialised."""
        import jax

        reads, makes = boundary(jaxpr, block)
        given = [env[v] for v in reads]
        outside = dict(env)
        made: list[DeviceValue] = []

        def body(*arrays: Any) -> list[Any]:
            env.update(zip(reads, unpacked(given, arrays), strict=True))
            inside: Cache = {}
            for j in range(block.start, block.stop):
                one(j, inside)
            made[:] = [env[v] for v in makes]
            return packed(made)

        alone = block.stop - block.start == len(jaxpr.eqns) and block.prefix != ""  # a loop's body
        keeps = jax.checkpoint_policies.save_only_these_names(KEPT) if block.again == "light" else None
        arrays = jax.checkpoint(body, prevent_cse=not alone, policy=keeps)(*packed(given))
        env.clear()
        env.update(outside)
        env.update(zip(makes, unpacked(made, arrays), strict=True))

    def _equation(
        self, eqn: Any, ins: Sequence[DeviceValue], at: Place, cache: Cache
    ) -> Sequence[DeviceValue]:
        name = eqn.primitive.name
        if inlined(eqn):
            return self._call(eqn, ins, f"{at.path}.", cache)
        if name == "scan":
            return self._scan(eqn, ins, at, cache)
        if name == "while":
            return self._while(eqn, ins, at, cache)
        if name == "cond" and not by_platform(eqn):
            return self._cond(eqn, ins, at, cache)
        if name in KEPT_WHOLE:
            return self._own_rule(eqn, ins, at, cache)
        names = self.traced.results[at]
        made: dict[str, DeviceValue] = {}
        for op in self._makers(names):
            made.update(self._op(op, eqn, names, ins, cache))
        if not made:
            return self._constant(eqn, names, ins)
        return [made[n] for n in names]

    def _makers(self, names: Sequence[str]) -> list[LocalOp]:
        """The ops that make these tensors, each once; none makes a constant."""
        found = {id(op): op for n in names if (op := self.program.maker.get(n)) is not None}
        return list(found.values())

    def _constant(self, eqn: Any, names: Sequence[str], ins: Sequence[DeviceValue]) -> list[DeviceValue]:
        """What no data decides, whole on every device; whoever reads a part of it takes that."""
        if not names:
            raise self.refusal(eqn, "it makes nothing that the plan lays out")
        for h in ins:
            if h.layout is not None and any(s is not None for s in h.layout):
                raise self.refusal(
                    eqn, f"its operand '{h.tensor}' is split, and the plan knows of no data in it"
                )
        outs = rules.plainly(eqn, [h.array for h in ins], self._info)
        return [DeviceValue(array=x, tensor=n) for x, n in zip(outs, names, strict=True)]

    def _op(
        self, op: LocalOp, eqn: Any, names: Sequence[str], ins: Sequence[DeviceValue], cache: Cache
    ) -> dict[str, DeviceValue]:
        """Tensor -> what one op of an equation makes."""
        wanted = self._matched(op, ins)
        read = [h if w is None else self.brought(h, w, cache) for h, w in zip(ins, wanted, strict=True)]
        place = {n: k for k, n in enumerate(names)}
        results = [next((r for r in op.results if r.tensor == n), None) for n in names]

        def evaluated(arrays: Sequence[Any], gradient: bool) -> list[Any]:
            call = rules.LocalCall(
                eqn=eqn,
                op=op,
                mesh=self.program.mesh,
                devices=self.devices,
                info=self._info,
                operands=tuple(wanted),
                results=tuple(results),
                shapes=tuple(
                    None if r is None else self._local(r.shape, r.gradient if gradient else r.layout)
                    for r in results
                ),
            )
            return self._named(eqn, lambda: rules.evaluate(call, arrays))

        outs = evaluated([h.array for h in read], False)
        shadows: list[Any] = [None] * len(outs)
        if any(h.shadow is not None for h in read):
            shadows = evaluated([h.array if h.shadow is None else h.shadow for h in read], True)
        return {
            r.tensor: DeviceValue(
                array=outs[place[r.tensor]], tensor=r.tensor, layout=r.layout, shadow=shadows[place[r.tensor]]
            )
            for r in results
            if r is not None
        }

    def _matched(self, op: LocalOp, ins: Sequence[DeviceValue]) -> list[LocalOperand | None]:
        """Which operand of the op each value is; None of a number."""
        left = list(op.operands)
        out: list[LocalOperand | None] = [None] * len(ins)
        for named in (True, False):  # constants of a jaxpr have no names: they are what is left
            for i, h in enumerate(ins):
                if (h.tensor is not None) != named:
                    continue
                k = next((k for k, o in enumerate(left) if self._is(o, h)), None)
                if k is not None:
                    out[i] = left.pop(k)
        return out

    def _is(self, operand: LocalOperand, value: DeviceValue) -> bool:
        """Is this value what the op reads there?"""
        if value.tensor is not None:
            return self.program.original(operand.tensor) == value.tensor
        return operand.constant and operand.shape == tuple(getattr(value.array, "shape", ()))

    def brought(self, value: DeviceValue, wanted: LocalOperand, cache: Cache) -> DeviceValue:
        """The value as an op reads it."""
        if wanted.transfer is not None:
            array = self._transferred(value, wanted.transfer, cache)
            return replace(value, array=array, layout=wanted.layout, shadow=None)
        if value.layout is None:
            array = part(value.array, wanted.shape, wanted.layout, self.program.mesh)
            return replace(value, array=array, layout=wanted.layout)
        if value.layout != wanted.layout:
            raise PaseError(
                f"'{wanted.tensor}' is made as {value.layout} and read as {wanted.layout} within one node: this is a "
                f"defect of pase.local"
            )
        if not wanted.summed:
            return value

        def back(g: Any) -> Any:
            return summed(g, wanted.summed)

        return replace(value, array=there_and_back(value.array, value.shadow, lambda x: x, back), shadow=None)

    def _transferred(self, value: DeviceValue, number: int, cache: Cache) -> Any:
        """By a transfer, once in each body; out of a copy, which is made in the same body, where the op reads one."""
        if number in cache:
            return cache[number]
        t = self.program.transfers[number]
        if t.tensor in self.program.originals:
            (copy,) = self.program.maker[t.tensor].operands
            assert copy.transfer is not None
            value = replace(value, array=self._transferred(value, copy.transfer, cache), shadow=None)
        cache[number] = self._sent(value, t)
        return cache[number]

    def _sent(self, value: DeviceValue, t: LocalTransfer) -> Any:
        import jax

        shape, mesh = self.program.result(t.tensor).shape, self.program.mesh
        if value.layout is None:
            raise PaseError(
                f"'{t.tensor}' is made of no data, and the plan moves it: this is a defect of pase.local"
            )

        def there(x: Any) -> Any:
            with jax.named_scope(
                f"{t.tensor} for {t.dst}"
            ):  # a profile, or a compiled program, then says what it sends
                return moved(x, t.forward, shape, t.combine, mesh)

        def back(g: Any) -> Any:
            with jax.named_scope(f"gradient of {t.tensor} from {t.dst}"):
                return moved(g, t.backward or (), shape, "sum", mesh)

        return there_and_back(value.array, value.shadow, there, None if t.backward is None else back)

    def _local(self, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        return local_shape(shape, layout, self.program.mesh)

    def refusal(self, eqn: Any, why: str) -> NotByHand:
        """An equation that cannot be lowered."""
        where = source_line(eqn) or "an unknown line"
        return NotByHand(
            f"'{eqn.primitive.name}' at {where} cannot be lowered by hand: {why}. Use lowering='annotated', which "
            f"leaves it to XLA"
        )

    def _named(self, eqn: Any, run: Callable[[], Any]) -> Any:
        """What a rule says against an equation, with its name and line."""
        try:
            return run()
        except rules.NotLowered as e:
            raise self.refusal(eqn, str(e)) from None

    def _call(self, eqn: Any, ins: Sequence[DeviceValue], prefix: str, cache: Cache) -> Sequence[DeviceValue]:
        import jax

        jaxpr, consts = inner_jaxpr(eqn)
        if eqn.primitive.name not in ("remat", "remat2", "checkpoint"):
            return self.run(jaxpr, consts, ins, prefix, cache)
        made: list[DeviceValue] = []

        def body(*arrays: Any) -> list[Any]:
            made[:] = self.run(jaxpr, consts, unpacked(ins, arrays), prefix, {})
            return packed(made)

        p = eqn.params
        arrays = jax.checkpoint(body, prevent_cse=p["prevent_cse"], policy=p["policy"])(*packed(ins))
        return unpacked(made, arrays)

    def _own_rule(
        self, eqn: Any, ins: Sequence[DeviceValue], at: Place, cache: Cache
    ) -> Sequence[DeviceValue]:
        """A call with a derivative rule of its own, kept where nothing of it is summed or moved over devices."""
        jaxpr, _ = inner_jaxpr(eqn)
        ops = list(self._inside(jaxpr, f"{at.path}."))
        if not ops:
            names = self.traced.results[at]
            return self._constant(eqn, names, ins)
        own = {r.tensor for op in ops for r in op.results}
        inner = [o for op in ops for o in op.operands if self.program.original(o.tensor) in own]
        sums = any(o.transfer is not None or o.summed for o in inner) or any(
            r.summed or "partial" in r.layout for op in ops for r in op.results
        )
        if sums:
            raise self.refusal(eqn, "it has a derivative rule of its own, and is summed over devices inside")
        read = []
        for h in ins:
            wanted = {
                (o.transfer, o.layout): o
                for op in ops
                for o in op.operands
                if h.tensor is not None and self.program.original(o.tensor) == h.tensor
            }
            if len(wanted) > 1:
                raise self.refusal(
                    eqn, "it has a derivative rule of its own, and reads a tensor in two layouts"
                )
            read += [self.brought(h, o, cache) for o in wanted.values()] or [h]
        shapes = rules.LocalShapes.of(
            (v.shape, self._local(v.shape, v.layout)) for op in ops for v in (*op.operands, *op.results)
        )
        outs = self._named(eqn, lambda: rules.by_own_rule(eqn, [h.array for h in read], shapes, self._info))
        names = self.traced.results[at]
        return [
            DeviceValue(array=x, tensor=n, layout=self.program.result(n).layout)
            for x, n in zip(outs, names, strict=True)
        ]

    def _inside(self, jaxpr: Any, prefix: str) -> Any:
        """The ops of a call's equations."""
        for i, eqn in enumerate(jaxpr.eqns):
            if inlined(eqn) or eqn.primitive.name in KEPT_WHOLE:
                yield from self._inside(inner_jaxpr(eqn)[0], f"{prefix}{i}.")
            else:
                yield from self._makers(self.traced.results[Place(f"{prefix}{i}")])

    def _settled(
        self, at: Place, of: PlacePart, values: Sequence[DeviceValue], cache: Cache, *which: int
    ) -> list[DeviceValue]:
        """Values as this part of a loop's tensors, or of what a branch (which) returns, has them."""
        out = []
        for k, h in enumerate(values):
            key = at.its(of, *which, k)
            (name,) = self.traced.results.get(key, (None,))
            op = self.program.maker.get(name or "")
            if op is None:  # of one element, or of no data
                out.append(h if name is None else replace(h, tensor=name))
                continue
            r = self.program.result(op.results[0].tensor)
            (wanted,) = op.operands[:1]
            out.append(replace(self.brought(h, wanted, cache), tensor=r.tensor, layout=r.layout))
        return out

    def _closed(
        self, at: Place, carried: Sequence[DeviceValue], made: Sequence[DeviceValue], cache: Cache
    ) -> list[Any]:
        """What a body hands to its next turn, in the layouts of the carry."""
        out = []
        for k, (before, h) in enumerate(zip(carried, made, strict=True)):
            takers = self.program.takers.get(at.its("carry", k), ())
            if takers:
                (wanted,) = takers[0].operands
                h = self.brought(h, wanted, cache)
            elif h.layout is None and before.layout is not None:
                h = replace(h, array=part(h.array, self._whole(before), before.layout, self.program.mesh))
            out.append(h.array)
        return out

    def _whole(self, value: DeviceValue) -> tuple[int, ...]:
        return self.program.result(value.tensor or "").shape

    def _scan(self, eqn: Any, ins: Sequence[DeviceValue], at: Place, cache: Cache) -> Sequence[DeviceValue]:
        import jax

        p = eqn.params
        nc, nk = scan_groups(eqn)
        closed, names = p["jaxpr"], self.traced.results[at]
        consts = self._settled(at, "const", ins[:nc], cache)
        init = self._settled(at, "carry", ins[nc : nc + nk], cache)
        xs = self._settled(at, "xs", ins[nc + nk :], cache)
        stacked: list[DeviceValue] = []

        def body(carry: Sequence[Any], x: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            inside: Cache = {}
            carried = [replace(h, array=a) for h, a in zip(init, carry, strict=True)]
            slices = [self._slice(at, k, h, s) for k, (h, s) in enumerate(zip(xs, x, strict=True))]
            made = self.run(closed.jaxpr, closed.consts, [*consts, *carried, *slices], f"{at.path}.", inside)
            stacked[:] = [self._stacked(n, h, inside) for n, h in zip(names[nk:], made[nk:], strict=True)]
            return self._closed(at, init, made[:nk], inside), [h.array for h in stacked]

        carry, ys = jax.lax.scan(
            body,
            [h.array for h in init],
            packed(xs),
            length=p["length"],
            reverse=p["reverse"],
            unroll=p["unroll"],
        )
        last = [replace(h, array=a) for h, a in zip(init, carry, strict=True)]
        return [*last, *(replace(h, array=y) for h, y in zip(stacked, ys, strict=True))]

    def _slice(self, at: Place, k: int, stack: DeviceValue, arrays: Any) -> DeviceValue:
        """One turn's slice of a stack, whose first dim is not split."""
        (name,) = self.traced.results[at.its("x", k)]
        array, shadow = arrays
        if stack.layout is None:
            return DeviceValue(array=array, tensor=name)
        op = self.program.maker[name]
        (wanted,) = op.operands
        if self._moves(wanted) or wanted.layout != stack.layout or wanted.summed:
            raise NotByHand(
                f"the stack '{stack.tensor}' of the loop at {op.op.source or at} is moved inside of the loop, turn by "
                f"turn: lowering by hand does not do that. Use lowering='annotated'"
            )
        return DeviceValue(array=array, tensor=name, layout=op.results[0].layout, shadow=shadow)

    def _moves(self, wanted: LocalOperand) -> bool:
        """Does anything move the operand, or its gradient, on its way here?"""
        if wanted.transfer is None:
            return False
        t = self.program.transfers[wanted.transfer]
        copied = t.tensor in self.program.originals
        return bool(t.forward or t.backward) or (
            copied and self._moves(self.program.maker[t.tensor].operands[0])
        )

    def _stacked(self, name: str, value: DeviceValue, cache: Cache) -> DeviceValue:
        """One turn's part of the result of this name, which is stacked."""
        op = self.program.maker.get(name)
        if op is None:
            return replace(value, tensor=name)
        array = self.brought(value, op.operands[0], cache).array
        return DeviceValue(array=array, tensor=name, layout=op.results[0].layout)

    def _while(self, eqn: Any, ins: Sequence[DeviceValue], at: Place, cache: Cache) -> Sequence[DeviceValue]:
        import jax

        p = eqn.params
        nc, nb = p["cond_nconsts"], p["body_nconsts"]
        cond, body = p["cond_jaxpr"], p["body_jaxpr"]
        asks = self._settled(at, "ask", ins[:nc], cache)
        consts = self._settled(at, "const", ins[nc : nc + nb], cache)
        init = self._settled(at, "carry", ins[nc + nb :], cache)

        def turned(carry: Sequence[Any]) -> list[DeviceValue]:
            return [replace(h, array=a) for h, a in zip(init, carry, strict=True)]

        def goes_on(carry: Sequence[Any]) -> Any:
            return self.run(cond.jaxpr, cond.consts, [*asks, *turned(carry)], f"{at.path}.c.", {})[0].array

        def turn(carry: Sequence[Any]) -> list[Any]:
            inside: Cache = {}
            made = self.run(body.jaxpr, body.consts, [*consts, *turned(carry)], f"{at.path}.b.", inside)
            return self._closed(at, init, made, inside)

        return turned(jax.lax.while_loop(goes_on, turn, [h.array for h in init]))

    def _cond(self, eqn: Any, ins: Sequence[DeviceValue], at: Place, cache: Cache) -> Sequence[DeviceValue]:
        import jax

        names = self.traced.results[at]
        index, *operands = ins
        meets = [self.program.maker.get(n) for n in names]
        if any(m is None for m in meets):
            raise self.refusal(eqn, "a branch returns what no data decides")

        def branch(k: int, closed: Any) -> Callable[..., Any]:
            def run(*arrays: Any) -> list[Any]:
                inside: Cache = {}
                outs = self.run(
                    closed.jaxpr, closed.consts, unpacked(operands, arrays), f"{at.path}.{k}.", inside
                )
                left = self._settled(at, "out", outs, inside, k)
                met = [self._matched(m, [h])[0] for m, h in zip(meets, left, strict=True) if m is not None]
                return [
                    (h if w is None else self.brought(h, w, inside)).array
                    for h, w in zip(left, met, strict=True)
                ]

            return run

        for m in meets[:1]:
            wanted = None if m is None else self._matched(m, [index])[0]
            index = index if wanted is None else self.brought(index, wanted, cache)
        branches = [branch(k, closed) for k, closed in enumerate(eqn.params["branches"])]
        made = jax.lax.switch(index.array, branches, *packed(operands))
        return [
            DeviceValue(array=x, tensor=n, layout=self.program.result(n).layout)
            for x, n in zip(made, names, strict=True)
        ]
