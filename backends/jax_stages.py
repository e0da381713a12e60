"""A traced model cut into the stages of a pipeline: the equations, loop turns, parameters and inputs of each stage.

The program is a list of pieces, each of which reads and makes values: single equations, written-out blocks as a whole,
and the single turns of the loop over layers. A piece that works on activations (values that depend on parameters and on
the batch) belongs to one stage: pieces before the blocks to the first, pieces after them to the last. Any other piece
(a mask, a cast of weights, labels) runs in each stage that needs it. Activations that a later stage reads are passed on
from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from pase.errors import PaseError
from pase.frontends.from_jax import TracedJax, inlined, inner_jaxpr
from pase.frontends.jax_blocks import blocks_of, loops_of
from pase.frontends.jax_types import Eqn, Jaxpr
from pase.frontends.jax_versions import is_dropped, is_literal, scan_groups
from pase.ir import Place, PlacePart
from pase.ir.blocks import Block

if TYPE_CHECKING:
    from pase.backends.jax_walk import Copies, JaxprWalk

__all__ = ["Stage", "StagePiece", "StageRows", "StageWeight", "stages_of"]

Key: TypeAlias = Any
"""A value: a variable of a jaxpr, an intermediate value of a loop (place, turn, which), or ``StageRows``."""
Env = dict[Key, Any]


@dataclass(frozen=True)
class StageRows:
    """The part of a stack, read by the loop over layers, that the turns of one stage read."""

    of: Key


@dataclass(frozen=True, kw_only=True, eq=False)
class StagePiece:
    """run: reads its inputs from the environment and writes its results there. block: the index of its block; -1 before
    the blocks, and their number after them. rows: whether and how it can run on only some rows of stacks.
    """

    reads: tuple[Key, ...]
    makes: tuple[Key, ...]
    block: int
    run: Callable[[JaxprWalk, Env, Copies], None]
    by_rows: StagePiece | None = None


@dataclass(frozen=True)
class StageWeight:
    """A leaf of the parameters in a stage. rows: the first and the end of those that it has; None: all of it."""

    leaf: int
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Stage:
    """pieces: in the order in which they run. read_whole: leaves that its blocks read, not by rows. alike: equal for
    stages that do the same with other weights. enters, leaves: activations that are passed in and on. names: value ->
    tensor of the traced graph. constants: values that belong to the program.
    """

    pieces: tuple[StagePiece, ...]
    weights: tuple[StageWeight, ...]
    batch: tuple[int, ...]
    read_whole: frozenset[int]
    alike: Hashable
    enters: tuple[Key, ...]
    leaves: tuple[Key, ...]
    inputs: Mapping[Key, int]
    names: Mapping[Key, str]
    constants: Mapping[Key, Any]
    avals: Mapping[Key, Any]

    def run(
        self, walk: JaxprWalk, weights: Sequence[Any], batch: Sequence[Any], entered: Sequence[Any]
    ) -> list[Any]:
        """The outputs of the stage, computed from values (or tracers) of one micro-batch."""
        env: Env = dict(self.constants)
        leaf = {i: v for v, i in self.inputs.items()}
        n = len(walk.plan.traced.param_paths)
        for w, x in zip(self.weights, weights, strict=True):
            key = leaf[w.leaf]
            env[key if w.rows is None else StageRows(key)] = walk.defined(x, self.names[key])
        for i, x in zip(self.batch, batch, strict=True):
            env[leaf[n + i]] = walk.defined(x, self.names[leaf[n + i]])
        for key, x in zip(self.enters, entered, strict=True):
            env[key] = walk.defined(x, self.names.get(key))
        copies: Copies = {}
        for piece in self.pieces:
            piece.run(walk, env, copies)
        return [key.val if is_literal(key) else env[key] for key in self.leaves]


def stages_of(
    traced: TracedJax, leaf_names: Sequence[str], cuts: Sequence[int], again: Sequence[Block] = ()
) -> tuple[Stage, ...]:
    """The stages with these numbers of blocks. traced: on one micro-batch. again: blocks that any stage recomputes.

    Raises PaseError if the program does not have these blocks one after the other.
    """
    listing = _Listing(traced=traced, blocks=sum(cuts), again=again)
    return _Cut(listing=listing, leaf_names=leaf_names, cuts=tuple(cuts)).stages()


@dataclass(kw_only=True)
class _Listing:
    """The program's pieces, in order."""

    traced: TracedJax
    blocks: int
    again: Sequence[Block]
    names: dict[Key, str] = field(default_factory=dict)
    constants: dict[Key, Any] = field(default_factory=dict)
    avals: dict[Key, Any] = field(default_factory=dict)
    loop: str = ""
    """Path of the loop over layers; else the blocks are ``runs``."""
    runs: dict[tuple[str, int], int] = field(default_factory=dict)
    """(prefix, first equation) of a written-out block -> the equation after its last."""
    reverse: bool = False
    _met: int = -1
    _bodies: int = 0

    def __post_init__(self) -> None:
        loops = loops_of(self.traced, self.blocks)
        if len(loops) == 1:
            self.loop = loops[0]
            return
        found = blocks_of(self.traced)
        if loops or len(found) != self.blocks or len({b.prefix for b in found}) != 1:
            raise PaseError(
                f"'{self.traced.graph.name}' cannot be run in stages: of {self.blocks} equal blocks in a row there "
                f"are {len(loops)} loops, and {len(found)} written out"
            )
        self.runs = {(b.prefix, b.start): b.stop for b in found}

    def pieces(self) -> list[StagePiece]:
        closed = self.traced.jaxpr
        self.constants.update(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        return list(self._of(closed.jaxpr, ""))

    def _holds_blocks(self, path: str) -> bool:
        return self.loop.startswith(f"{path}.") or any(p.startswith(f"{path}.") for p, _ in self.runs)

    def _of(self, jaxpr: Jaxpr, prefix: str) -> Iterator[StagePiece]:
        i = 0
        while i < len(jaxpr.eqns):
            eqn, path, stop = jaxpr.eqns[i], f"{prefix}{i}", i + 1
            if path == self.loop:
                yield from self._turns(eqn, Place(path))
            elif inlined(eqn) and self._holds_blocks(path):
                inner, consts = inner_jaxpr(eqn)
                self.constants.update(zip(inner.constvars, consts, strict=True))
                yield from map(self._alias, eqn.invars, inner.invars)
                yield from self._of(inner, f"{path}.")
                yield from map(self._alias, inner.outvars, eqn.outvars)
            else:
                is_block = (prefix, i) in self.runs
                if is_block:
                    stop, self._met = self.runs[prefix, i], self._met + 1
                    self._bodies += 1
                else:
                    stop = max(
                        (b.stop for b in self.again if (b.prefix, b.start) == (prefix, i)), default=i + 1
                    )
                yield self._span(jaxpr, prefix, i, stop, is_block)
            i = stop

    def _here(self) -> int:
        """The place of a piece that is not a block: before, between, or after the blocks."""
        return self.blocks if self._bodies == self.blocks else self._met

    def _alias(self, source: Any, target: Any) -> StagePiece:
        def run(walk: JaxprWalk, env: Env, copies: Copies) -> None:
            env[target] = source.val if is_literal(source) else env[source]

        self.avals[target] = target.aval
        if not is_literal(source) and source in self.names:
            self.names[target] = self.names[source]
        return StagePiece(reads=_variables([source]), makes=_variables([target]), block=self._here(), run=run)

    def _span(self, jaxpr: Jaxpr, prefix: str, start: int, stop: int, is_block: bool) -> StagePiece:
        """Equations of one list, as one piece."""
        mine = jaxpr.eqns[start:stop]
        makes = tuple(v for e in mine for v in e.outvars if not is_dropped(v))
        reads = tuple(
            dict.fromkeys(v for v in _variables([v for e in mine for v in e.invars]) if v not in makes)
        )
        for i, e in enumerate(mine, start):
            for v, name in zip(e.outvars, self.traced.results[Place(f"{prefix}{i}")], strict=True):
                self.names[v], self.avals[v] = name, v.aval

        def run(walk: JaxprWalk, env: Env, copies: Copies) -> None:
            walk.span(jaxpr, env, start, stop, prefix, copies)

        def some(walk: JaxprWalk, env: Env, copies: Copies) -> None:
            inner: Env = {v: env[StageRows(v) if v.aval.shape else v] for v in reads}
            walk.span(jaxpr, inner, start, stop, prefix, {})
            env.update({StageRows(v): inner[v] for v in makes})

        by_rows = None
        if not is_block and stop == start + 1 and _elementwise(mine[0]):
            by_rows = StagePiece(
                reads=tuple(StageRows(v) if v.aval.shape else v for v in reads),
                makes=tuple(map(StageRows, makes)),
                block=self._here(),
                run=some,
            )
        block = self._met if is_block else self._here()
        return StagePiece(reads=reads, makes=makes, block=block, run=run, by_rows=by_rows)

    def _turns(self, eqn: Eqn, at: Place) -> Iterator[StagePiece]:
        """The loop over layers: its operands as the body takes them, its turns, its results."""
        nc, nk = scan_groups(eqn)
        self.reverse = bool(eqn.params["reverse"])
        operands, names = list(eqn.invars), self.traced.operands[at]
        consts: list[Key] = [(at.path, "const", k) for k in range(nc)]
        stacks = [(at.path, "xs", k) for k in range(len(operands) - nc - nk)]
        carry: list[list[Key]] = [
            [(at.path, "carry", t, k) for k in range(nk)] for t in range(self.blocks + 1)
        ]
        made = eqn.params["jaxpr"].jaxpr.outvars
        for keys in carry:
            for k, key in enumerate(keys):
                self.avals[key] = made[k].aval
                self.names[key] = self.traced.results[at.its("carry", k)][0]
        parts: list[tuple[PlacePart, int, Key]] = [("const", k, key) for k, key in enumerate(consts)]
        parts += [("carry", k, key) for k, key in enumerate(carry[0])]
        for (part, k, key), var, name in zip(parts, operands, names, strict=False):
            yield self._settled(at.its(part, k), var, var, key, key, name)
        for k, (key, var, name) in enumerate(zip(stacks, operands[nc + nk :], names[nc + nk :], strict=True)):
            yield self._settled(at.its("xs", k), var, StageRows(var), key, StageRows(key), name)
        ys = [[(at.path, "y", t, k) for k in range(len(made) - nk)] for t in range(self.blocks)]
        for t in range(self.blocks):
            self._met = t
            for k, key in enumerate(ys[t]):
                self.avals[key] = made[nk + k].aval
            yield self._turn(eqn, at, t, (consts, carry[t], stacks), (carry[t + 1], ys[t]))
        self._bodies = self.blocks
        results = self.traced.results[at]
        for k, var in enumerate(eqn.outvars):
            if not is_dropped(var):
                turns = ys[::-1] if self.reverse else ys
                last = [carry[-1][k]] if k < nk else [y[k - nk] for y in turns]
                yield self._result(var, last, results[k], k >= nk)

    def _settled(self, at: Place, var: Any, reads: Key, key: Key, makes: Key, name: str | None) -> StagePiece:
        def run(walk: JaxprWalk, env: Env, copies: Copies) -> None:
            env[makes] = walk.settled(at, var.val if is_literal(var) else env[reads], name, copies)

        self.avals[key] = var.aval
        return StagePiece(
            reads=() if is_literal(var) else (reads,), makes=(makes,), block=self._here(), run=run
        )

    def _turn(self, eqn: Eqn, at: Place, t: int, reads: Any, makes: Any) -> StagePiece:
        consts, carry, stacks = reads

        def run(walk: JaxprWalk, env: Env, copies: Copies) -> None:
            first, stop = env[_TURNS]
            row = stop - 1 - t if self.reverse else t - first
            x = [env[StageRows(key)][row] for key in stacks]
            carried, ys = walk.turn(eqn, at, [env[k] for k in consts], [env[k] for k in carry], x)
            env.update(zip((*makes[0], *makes[1]), (*carried, *ys), strict=True))

        return StagePiece(
            reads=(*consts, *carry, *map(StageRows, stacks)), makes=(*makes[0], *makes[1]), block=t, run=run
        )

    def _result(self, var: Any, reads: Sequence[Key], name: str, stacked: bool) -> StagePiece:
        def run(walk: JaxprWalk, env: Env, copies: Copies) -> None:
            import jax.numpy as jnp

            values = [env[key] for key in reads]
            env[var] = walk.defined(jnp.stack(values) if stacked else values[0], name)

        self.names[var], self.avals[var] = name, var.aval
        return StagePiece(reads=tuple(reads), makes=(var,), block=self.blocks, run=run)


_TURNS = ("turns",)
"""The key in the environment for the first of a stage's turns, and the end."""
_ELEMENTWISE = frozenset({"convert_element_type", "mul", "add", "sub", "div", "neg", "tanh", "exp", "copy"})


def _elementwise(eqn: Eqn) -> bool:
    """Whether each row of the result depends only on the same row of the operands."""
    shapes = {v.aval.shape for v in (*eqn.invars, *eqn.outvars)} - {()}
    return eqn.primitive.name in _ELEMENTWISE and len(shapes) == 1


def _variables(values: Sequence[Any]) -> tuple[Key, ...]:
    return tuple(v for v in values if not is_literal(v))


@dataclass(kw_only=True)
class _Cut:
    """Assigns pieces to stages."""

    listing: _Listing
    leaf_names: Sequence[str]
    cuts: tuple[int, ...]

    def stages(self) -> tuple[Stage, ...]:
        traced, listing = self.listing.traced, self.listing
        jaxpr = traced.jaxpr.jaxpr
        inputs = {v: i for i, v in enumerate(jaxpr.invars)}
        listing.names.update(zip(jaxpr.invars, self.leaf_names, strict=True))
        listing.avals.update({v: v.aval for v in jaxpr.invars})
        every = listing.pieces()
        pinned = self._pinned(every, inputs)
        many = len(self.cuts)
        wanted: list[list[Key]] = [[] for _ in range(many)]
        for p, s in pinned.items():
            wanted[s] += p.reads
        wanted[-1] += _variables(jaxpr.outvars)
        made_in = {key: s for p, s in pinned.items() for key in p.makes}
        cross = [self._crossing(wanted, made_in, s) for s in range(1, many)]
        enters = [(), *cross]
        leaves = [*cross, tuple(jaxpr.outvars)]
        whole: set[Key] = set()
        while True:
            plans = [
                self._of_stage(every, pinned, s, wanted[s], enters[s], inputs, whole) for s in range(many)
            ]
            more = {
                key for _, needs in plans for key in needs if key in inputs and not isinstance(key, StageRows)
            }
            if more <= whole:
                break
            whole |= more
        out = []
        for s, (pieces, needs) in enumerate(plans):
            mine = [
                k for p, at in pinned.items() if at == s and 0 <= p.block < listing.blocks for k in p.reads
            ]
            _, of_blocks = self._of_stage(every, pinned, s, mine, enters[s], inputs, whole)
            made = self._stage(pieces, needs, of_blocks, s, inputs, enters[s], leaves[s])
            turns_alone = bool(listing.loop) and 0 < s < many - 1
            beside = tuple(p for p in pieces if pinned.get(p) != s)
            same = (self.cuts[s], beside, *(self._counted(keys, s) for keys in (enters[s], leaves[s])))
            out.append(replace(made, alike=same) if turns_alone else made)
        return tuple(out)

    def _counted(self, keys: Sequence[Key], stage: int) -> tuple[Hashable, ...]:
        """Values, with the turns that make them counted from the stage's first."""
        first = self._turns_of(stage)[0]
        return tuple(
            (*k[:2], k[2] - first, k[3]) if isinstance(k, tuple) and len(k) == 4 else k for k in keys
        )

    def _turns_of(self, stage: int) -> tuple[int, int]:
        first = sum(self.cuts[:stage])
        return first, first + self.cuts[stage]

    def _rows_of(self, stage: int) -> tuple[int, int]:
        """The rows of stacks that the stage's turns read."""
        first, stop = self._turns_of(stage)
        n = self.listing.blocks
        return (n - stop, n - first) if self.listing.reverse else (first, stop)

    def _pinned(self, every: Sequence[StagePiece], inputs: Mapping[Key, int]) -> dict[StagePiece, int]:
        """Pieces that work on activations -> their stage."""
        n = len(self.listing.traced.param_paths)
        of_weights: set[Key] = {v for v, i in inputs.items() if i < n}
        of_batch: set[Key] = {v for v, i in inputs.items() if i >= n}
        out: dict[StagePiece, int] = {}
        stage_of = [s for s, many in enumerate(self.cuts) for _ in range(many)]
        for p in every:
            keys = {k.of if isinstance(k, StageRows) else k for k in p.reads}
            made = {k.of if isinstance(k, StageRows) else k for k in p.makes}
            if keys & of_weights:
                of_weights |= made
            if keys & of_batch:
                of_batch |= made
            if keys & of_weights and keys & of_batch:
                if any(isinstance(k, StageRows) for k in p.makes):
                    raise PaseError(
                        f"'{self.listing.traced.graph.name}' cannot be run in stages: its loop over layers slices a "
                        f"stack that is made of the batch and of parameters; hand it on from layer to layer instead"
                    )
                inside = 0 <= p.block < self.listing.blocks
                out[p] = stage_of[p.block] if inside else 0 if p.block < 0 else len(self.cuts) - 1
        return out

    def _crossing(
        self, wanted: Sequence[Sequence[Key]], made_in: Mapping[Key, int], stage: int
    ) -> tuple[Key, ...]:
        """Values that are made before this stage and read in it or after it."""
        later = dict.fromkeys(key for keys in wanted[stage:] for key in keys)
        return tuple(key for key in later if made_in.get(key, stage) < stage)

    def _of_stage(
        self,
        every: Sequence[StagePiece],
        pinned: Mapping[StagePiece, int],
        stage: int,
        wanted: Sequence[Key],
        enters: Sequence[Key],
        inputs: Mapping[Key, int],
        whole: set[Key],
    ) -> tuple[list[StagePiece], list[Key]]:
        """(the stage's pieces in order, the leaves that they read, whole or by rows)."""
        producer = {key: p for p in every for key in p.makes}
        number = {p: i for i, p in enumerate(every)}
        have, needs = set(enters) | set(self.listing.constants), dict[Key, None]()
        placed = {p: i for p, i in number.items() if pinned.get(p) == stage}
        have |= {key for p in placed for key in p.makes}
        left = list(wanted)
        while left:
            key = left.pop()
            if key in have:
                continue
            have.add(key)
            maker = self._maker(key, stage, producer, pinned, inputs, whole)
            if maker is None:
                needs[key] = None
            elif maker not in placed:
                source = producer.get(key.of if isinstance(key, StageRows) else key)
                placed[maker] = number.get(maker, -1 if source is None else number[source])
                left += maker.reads
        # Rows of a value stand right behind what makes it.
        order = sorted(placed, key=lambda p: (placed[p], isinstance(p.makes[0], StageRows)))
        return order, list(needs)

    def _maker(
        self,
        key: Key,
        stage: int,
        producer: Mapping[Key, StagePiece],
        pinned: Mapping[StagePiece, int],
        inputs: Mapping[Key, int],
        whole: set[Key],
    ) -> StagePiece | None:
        """The piece that makes a value in a stage; None if it is a leaf, or the stage's rows of a leaf of the
        parameters.
        """
        if not isinstance(key, StageRows):
            return None if key in inputs else producer[key]
        found, source = producer.get(key), producer.get(key.of)
        if found is not None:
            return found
        if source is not None and source.by_rows is not None and source not in pinned:
            return source.by_rows
        n = len(self.listing.traced.param_paths)
        cut = inputs.get(key.of, n) < n and key.of not in whole
        return None if cut else self._sliced(key, stage)

    def _sliced(self, key: StageRows, stage: int) -> StagePiece:
        """The stage's rows of a stack that it has whole."""
        first, stop = self._rows_of(stage)

        def run(walk: JaxprWalk, env: Env, copies: Copies) -> None:
            env[key] = env[key.of][first:stop]

        return StagePiece(reads=(key.of,), makes=(key,), block=-1, run=run)

    def _stage(
        self,
        pieces: Sequence[StagePiece],
        needs: Sequence[Key],
        of_blocks: Sequence[Key],
        stage: int,
        inputs: Mapping[Key, int],
        enters: tuple[Key, ...],
        leaves: tuple[Key, ...],
    ) -> Stage:
        n = len(self.listing.traced.param_paths)
        weights, batch = [], []
        for key in needs:
            i = inputs[key.of if isinstance(key, StageRows) else key]
            if i < n:
                weights.append(StageWeight(i, self._rows_of(stage) if isinstance(key, StageRows) else None))
            else:
                batch.append(i - n)
        return Stage(
            pieces=tuple(pieces),
            weights=tuple(sorted(weights, key=lambda w: w.leaf)),
            batch=tuple(sorted(batch)),
            read_whole=frozenset(inputs[key] for key in of_blocks if not isinstance(key, StageRows)),
            alike=stage,
            enters=enters,
            leaves=leaves,
            inputs=inputs,
            names=self.listing.names,
            constants={**self.listing.constants, _TURNS: self._turns_of(stage)},
            avals=self.listing.avals,
        )
