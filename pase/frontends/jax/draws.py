"""Finds the random numbers that a JAX program draws for each example, so that a micro-batch draws its own part of them.

A micro-batch has a key that does not change between micro-batches, and a batch dim that is smaller. Drawn as written,
every micro-batch would get the same numbers. They are instead those that a step of the whole batch draws for these
examples.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from pase.frontends.jax.control import on_every_platform
from pase.frontends.jax.frontend import INLINED, KEPT_WHOLE, TracedJax, inner_jaxpr
from pase.frontends.jax.rules import draws_by_key
from pase.frontends.jax.types import Eqn, Jaxpr
from pase.frontends.jax.versions import opened, source_line
from pase.frontends.registry import NotInParts
from pase.ir import Graph, Place, named, simplify
from pase.ir.batch_dims import BatchDims, batch_dims
from pase.ir.functions import RANDOM
from pase.ir.two_batches import depends_on

__all__ = ["BatchDraw", "DrawnDim", "draws_of_batch"]

_DRAWS = ("random_bits", "rng_uniform")
_MAKE_KEYS = ("random_split", "random_fold_in")


class DrawnDim(NamedTuple):
    """Where the batch lies in a dim of random numbers: elements are numbered (outer, example, inner).

    examples: those of the micro-batch. whole: those of the batch.
    """

    whole: int
    examples: int
    inner: int


@dataclass(frozen=True, kw_only=True)
class BatchDraw:
    """The random numbers of the whole batch, of which a micro-batch has those of its own examples.

    shape: of the whole batch's numbers. dims: for each dim, where the batch lies in it; None for any other dim.
    """

    shape: tuple[int, ...]
    dims: tuple[DrawnDim | None, ...]


def draws_of_batch(
    whole: TracedJax, part: TracedJax, differing: Collection[str], cut: Collection[str]
) -> Mapping[Place, BatchDraw]:
    """Equation of ``part`` -> the draw of the whole batch of which it has a part.

    whole, part: the model traced on the whole batch and on a micro-batch. differing: the paths of the parameters and
    inputs that differ between micro-batches: the parts of the batch, and state that one passes on to the next. Numbers
    drawn by keys that depend on them differ, and numbers that do not depend on the batch's size are rightly the same.
    cut: the paths of the inputs that are cut into micro-batches.

    Raises NotInParts if the place of an example in the numbers is not known, or if the model makes a key for each
    example of the batch.
    """
    _check_keys(whole, part, differing)
    pairs = list(_pairs(whole, part))
    _check_generator(whole, part)
    if all(_shape(a) == _shape(b) for (_, a, _), (_, b, _) in pairs):
        return {}
    batch, found = _Batch(whole, cut), dict[Place, BatchDraw]()
    differ = _reached(part.graph, differing)
    for (there, every, _), (here, own, inside) in pairs:
        if _shape(every) == _shape(own) or differ.intersection(part.operands[here]):
            continue
        if inside:
            raise _refused(_line(part, here), "it is in a function with a derivative rule of its own")
        sizes = enumerate(zip(_shape(every), _shape(own), strict=True))
        dims = tuple(None if n == m else batch.within(there, d, n, m) for d, (n, m) in sizes)
        draw, known = BatchDraw(shape=_shape(every), dims=dims), whole.drawn.get(there)
        found[here] = draw if known is None else _of_whole(draw, known)
    return found


def _check_keys(whole: TracedJax, part: TracedJax, differing: Collection[str]) -> None:
    """Raise NotInParts if the number of keys that the model makes of one key depends on the batch's size."""
    differ: set[str] | None = None
    for (_, every, _), (here, own, _) in _pairs(whole, part, _MAKE_KEYS):
        if _shape(every) == _shape(own):
            continue
        differ = _reached(part.graph, differing) if differ is None else differ
        if not differ.intersection(part.operands[here]):
            raise _refused(
                str(source_line(own) or "an unknown line"),
                f"it makes {_shape(every)[0]} keys for the whole batch and {_shape(own)[0]} for its own part",
            )


def _check_generator(whole: TracedJax, part: TracedJax) -> None:
    """Raise NotInParts if a generator draws for all examples by the key of the first one, which a micro-batch may not
    have."""
    for (_, every, _), (here, own, _) in _pairs(whole, part, (*_DRAWS, *_MAKE_KEYS)):
        keys = [tuple(e.invars[0].aval.shape) for e in (every, own)]
        if keys[0] != keys[1] and not draws_by_key(own):
            raise NotInParts(
                f"a micro-batch cannot draw its part of the batch's random numbers at {_line(part, here)}: keys of "
                f"this generator ({own.invars[0].aval.dtype}) draw for a whole array by its first key",
                fix="use keys of JAX's default generator, threefry",
            )


def _of_whole(draw: BatchDraw, of: BatchDraw) -> BatchDraw:
    """The draw of a part of a micro-batch, whose own draw is ``of``, as a part of the whole batch's."""
    dims = [
        mine if mine is None or every is None else mine._replace(whole=every.whole)
        for mine, every in zip(draw.dims, of.dims, strict=True)
    ]
    return replace(of, dims=tuple(dims))


def _line(traced: TracedJax, at: Place) -> str:
    return next(
        (str(op.source) for n in traced.graph.nodes for op in n.ops if op.eqn == at), "an unknown line"
    )


def _refused(line: str, why: str) -> NotInParts:
    return NotInParts(
        f"a micro-batch cannot draw its part of the batch's random numbers at {line}: {why}",
        fix="pass one key per example in the batch (jax.random.split(key, examples), outside of the loss), or return "
        "the next key beside the loss and name it in carry",
    )


@dataclass(frozen=True)
class _Batch:
    """The batch in the program of the whole batch."""

    traced: TracedJax
    cut: Collection[str]

    def within(self, at: Place, d: int, n: int, m: int) -> DrawnDim:
        """Where the batch lies in dim ``d`` of what the equation at this place draws.

        n, m: the dim's size for the whole batch and for the micro-batch.
        """
        sizes = [
            t.shape[0]
            for t in self.traced.graph.tensors.values()
            if t.role == "input" and t.path in self.cut and t.shape
        ]
        size = next((s for s in sizes if isinstance(s, int)), 0)
        if n == size and size % m == 0:
            return DrawnDim(whole=n, examples=m, inner=1)
        graph = named(simplify(self.traced.graph))
        dims = batch_dims(graph, self.cut)
        inner = _inner(graph, dims, at, d)
        if inner is None or not size or (m * size) % n:
            raise _refused(
                _line(self.traced, at), f"which of its {n} rows belong to which example is not known"
            )
        return DrawnDim(whole=size, examples=m * size // n, inner=inner)


def _inner(graph: Graph, batch: BatchDims, at: Place, d: int) -> int | None:
    """The elements after the batch in dim ``d`` of what an op draws; None if the batch is not whole in it."""
    for n in graph.nodes:
        for op in n.ops:
            if op.eqn == at and op.function is RANDOM:
                return batch.inner(n, op.writes[0].map.walks[d])
    return None


def _pairs(
    whole: TracedJax, part: TracedJax, primitives: Collection[str] = _DRAWS
) -> Iterator[tuple[tuple[Place, Eqn, bool], tuple[Place, Eqn, bool]]]:
    """The equations of these primitives, which draw random numbers or make keys, in both programs."""
    both = [list(_draws(t.jaxpr.jaxpr, "", False, primitives)) for t in (whole, part)]
    names = [[e.primitive.name for _, e, _ in draws] for draws in both]
    if names[0] != names[1]:
        raise NotInParts(
            f"'{part.graph.name}' draws other random numbers on a micro-batch than on the whole batch",
            fix="write the model so that its code does not depend on the batch's size",
        )
    return zip(*both, strict=True)


def _draws(
    jaxpr: Jaxpr, prefix: str, inside: bool, primitives: Collection[str]
) -> Iterator[tuple[Place, Eqn, bool]]:
    """The equations of these primitives, with their places, and whether a backend keeps a call around them whole."""
    for i, eqn in enumerate(jaxpr.eqns):
        path, name = f"{prefix}{i}", eqn.primitive.name
        if name in primitives:
            yield Place(path), eqn, inside
        elif name in INLINED:
            yield from _draws(inner_jaxpr(eqn)[0], f"{path}.", inside or name in KEPT_WHOLE, primitives)
        elif (taken := on_every_platform(eqn)) is not None:
            yield from _draws(taken[0], f"{path}.", inside, primitives)
        elif name == "scan":
            yield from _draws(eqn.params["jaxpr"].jaxpr, f"{path}.", inside, primitives)
        elif name == "while":
            for body, key in (("cond_jaxpr", "c"), ("body_jaxpr", "b")):
                yield from _draws(eqn.params[body].jaxpr, f"{path}.{key}.", inside, primitives)
        elif name == "cond":
            for k, branch in enumerate(eqn.params["branches"]):
                yield from _draws(opened(branch)[0], f"{path}.{k}.", inside, primitives)


def _shape(eqn: Eqn) -> tuple[int, ...]:
    return tuple(eqn.outvars[0].aval.shape)


def _reached(graph: Graph, paths: Collection[str]) -> set[str]:
    """The tensors that depend on a parameter or an input with one of these paths."""
    leaves = (t for t in graph.tensors.values() if t.role in ("parameter", "input"))
    return depends_on(graph, {t.name for t in leaves if t.path in paths})
