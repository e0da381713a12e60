"""How a bucket plan's messages transform arrays: they are cut, joined, reduced or gathered, and reassembled.

Everything here runs inside a region that is manual over all mesh axes, on one device's local arrays. A tensor of the
problem is one collective of one parameter (or of one layer of a stacked one). Several in a row are stages, and
each takes the result of the previous one: for example, a gradient scattered over some axes and then summed over others,
or a parameter gathered axis by axis.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.backends.jax_moves import after
from pase.errors import PaseError
from pase.plan.constraints import Placement
from pase.schedule.plan import BucketPlan, Piece
from pase.schedule.types import ScheduleProblem

if TYPE_CHECKING:
    from jax import Array
    from jax.sharding import PartitionSpec

__all__ = ["ManualRegion", "Moves", "Slot", "moves_of", "path_of", "placement_of"]

_NAME = re.compile(
    r"^(?P<path>.*?)(\[(?P<repeat>\d+)\])?(?P<grad>\.grad)?"
    r"(\.(?P<kind>all_reduce|reduce_scatter|all_gather|all_to_all|permute)(\.\d+)?(?P<again>\.again\d+)?)?$"
)


@dataclass(frozen=True, kw_only=True)
class Slot:
    """The place of a problem's tensor: a whole parameter, or one slice of its first dim (a layer of a scanned stack).

    It also states what is done to it, over which data axes, and after which tensor.
    """

    leaf: int
    repeat: int | None
    kind: str
    axes: tuple[str, ...]
    follows: int | None
    gradient: bool
    again: bool
    """Whether this is the second gather of the pass, for backward."""


def path_of(keys: tuple[object, ...]) -> str:
    """``blocks.0.w``: the name of a parameter in layouts and problems."""
    import jax

    return jax.tree_util.keystr(keys, simple=True, separator=".")


def placement_of(spec: PartitionSpec) -> Placement:
    """A PartitionSpec as axes per dim."""
    return tuple(() if a is None else (a,) if isinstance(a, str) else tuple(a) for a in spec)


@dataclass(frozen=True, kw_only=True)
class Moves:
    """A plan's messages as they apply to a parameter tree.

    slots: by tensor of the problem; None if it is not executed here (see ``left``). chains: (leaf, repeat) -> the last
    tensor of its gradient's stages, and of its gather's. left: leaves whose moves are left to the compiler.
    """

    problem: ScheduleProblem
    plan: BucketPlan
    sizes: Mapping[str, int]
    placements: tuple[Placement, ...]
    data_axes: tuple[str, ...]
    slots: tuple[Slot | None, ...]
    gradients: Mapping[tuple[int, int | None], int]
    gathers: Mapping[tuple[int, int | None], int]
    left: frozenset[int]

    def messages(self, *, gradient: bool, update: int | None = None) -> list[int]:
        """Messages with something to execute here: for gradients (of an update), or for gathers."""
        out = []
        for i, m in enumerate(self.plan.messages):
            mine = [s for p in m.pieces if (s := self.slots[p.tensor]) is not None and not s.again]
            if any(s.gradient == gradient for s in mine) and update in (None, m.update):
                out.append(i)
        return out

    def holders(self) -> dict[int, list[int]]:
        """Tensor -> the messages that hold pieces of it."""
        out: dict[int, list[int]] = {}
        for i, m in enumerate(self.plan.messages):
            for t in dict.fromkeys(p.tensor for p in m.pieces):
                out.setdefault(t, []).append(i)
        return out

    def pieces(self, message: int) -> list[tuple[Piece, Slot]]:
        """The pieces of the message that are executed here."""
        found = [(p, self.slots[p.tensor]) for p in self.plan.messages[message].pieces]
        return [(p, s) for p, s in found if s is not None and not s.again]

    def dims(self, s: Slot) -> Placement:
        """The placement of the slot's contents, without the layers' dim of a stack."""
        return self.placements[s.leaf][0 if s.repeat is None else 1 :]


class ManualRegion:
    """One device's arrays in the manual region, while it is traced.

    leaves: local arrays of all parameters or gradients. buffers: results of messages, 1-D local arrays by message.
    """

    def __init__(
        self, moves: Moves, leaves: Sequence[Array], buffers: Mapping[int, Array], update: int
    ) -> None:
        self.moves, self.leaves, self.buffers, self.update = moves, leaves, dict(buffers), update
        self._holders = moves.holders()
        self._values: dict[int, Array] = {}
        self._rows_of: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}

    def run(self, todo: Sequence[int]) -> dict[int, Array]:
        """Send these messages in order, each as soon as its contents are ready. Each link is a chain."""
        waiting = list(todo)
        last: dict[int, Array] = {}
        while waiting:
            ready = next((i for i in waiting if self._can_send(i)), None)
            if ready is None:
                raise PaseError(
                    f"plan '{self.moves.plan.policy}': messages {waiting} wait for stages that no message contains"
                )
            waiting.remove(ready)
            link = self.moves.plan.messages[ready].link
            self.buffers[ready] = self._send(ready, last.get(link))
            if self.buffers[ready].shape[0]:
                last[link] = self.buffers[ready]
        return {i: self.buffers[i] for i in todo}

    def built(self, *, gradient: bool) -> list[Array]:
        """Every leaf after its last stage: gradients summed, or parameters whole. Other leaves are unchanged."""
        import jax.numpy as jnp

        chains = self.moves.gradients if gradient else self.moves.gathers
        out = []
        for i, leaf in enumerate(self.leaves):
            if (i, None) in chains:
                out.append(self._value(chains[i, None]))
            elif (i, 0) in chains:
                out.append(jnp.stack([self._value(chains[i, r]) for r in range(leaf.shape[0])]))
            else:
                out.append(leaf)
        return out

    def _of_update(self, tensor: int) -> list[int]:
        messages = self.moves.plan.messages
        return [i for i in self._holders.get(tensor, ()) if messages[i].update == self.update]

    def _can_send(self, message: int) -> bool:
        before = {s.follows for _, s in self.moves.pieces(message)} - {None}
        return all(i in self.buffers for t in before for i in self._of_update(t))  # type: ignore[arg-type]

    def _send(self, message: int, before: Array | None) -> Array:
        import jax
        import jax.numpy as jnp

        pieces = self.moves.pieces(message)
        kind, axes = pieces[0][1].kind, pieces[0][1].axes
        parts = []
        for p, s in pieces:
            x = self._entry(s)
            rows = self._rows(x, s) if kind == "reduce_scatter" else x.reshape(1, -1)
            a, b = self._range(p, rows.shape[1])
            parts.append(rows[:, a:b])
        buffer = jnp.concatenate(parts, axis=1)
        if not buffer.shape[1]:
            return buffer.reshape(-1)
        if before is not None:
            buffer = after(buffer, before)
        if kind == "reduce_scatter":
            return jax.lax.psum_scatter(buffer, axes, scatter_dimension=0, tiled=True).reshape(-1)
        if kind == "all_gather":
            return jax.lax.all_gather(buffer, axes, axis=0, tiled=True).reshape(-1)
        return jax.lax.psum(buffer.reshape(-1), axes)

    def _range(self, piece: Piece, elements: int) -> tuple[int, int]:
        """The elements [from, to) that the piece covers, in a local row of this length."""
        nbytes = self.moves.problem.tensors[piece.tensor].nbytes
        return (
            round(piece.offset * elements / nbytes),
            round((piece.offset + piece.nbytes) * elements / nbytes),
        )

    def _entry(self, s: Slot) -> Array:
        """The local array that goes into a tensor's collective."""
        if s.follows is not None:
            return self._value(s.follows)
        return self.leaves[s.leaf] if s.repeat is None else self.leaves[s.leaf][s.repeat]

    def _ways(self, s: Slot) -> int:
        return math.prod(self.moves.sizes[a] for a in s.axes)

    def _value(self, t: int) -> Array:
        """The local array that comes out of a tensor's collective, from the buffers that hold pieces of it."""
        import jax.numpy as jnp

        if t not in self._values:
            s = self.moves.slots[t]
            assert s is not None
            rows = self._ways(s) if s.kind == "all_gather" else 1
            parts = []
            for i in self._of_update(t):
                table = self.buffers[i].reshape(rows, -1)
                for (tensor, offset), (at, width) in self._places(i).items():
                    if tensor == t:
                        parts.append((offset, table[:, at : at + width]))
            whole = jnp.concatenate([x for _, x in sorted(parts, key=lambda x: x[0])], axis=1)
            shape = self._shape_after(t)
            self._values[t] = (
                self._merged(whole, s, shape) if s.kind == "all_gather" else whole.reshape(shape)
            )
        return self._values[t]

    def _places(self, message: int) -> dict[tuple[int, int], tuple[int, int]]:
        """(tensor, offset) of each piece -> (first element, elements) in each row of the message's buffer."""
        if message not in self._rows_of:
            at, out = 0, {}
            for p, s in self.moves.pieces(message):
                row = math.prod(self._shape_after(p.tensor)) // (
                    self._ways(s) if s.kind == "all_gather" else 1
                )
                a, b = self._range(p, row)
                out[p.tensor, p.offset] = (at, b - a)
                at += b - a
            self._rows_of[message] = out
        return self._rows_of[message]

    def _shape_after(self, t: int) -> tuple[int, ...]:
        """The local shape after the tensor's collective."""
        s = self.moves.slots[t]
        assert s is not None
        if s.follows is not None:
            shape = list(self._shape_after(s.follows))
        else:
            shape = list(self.leaves[s.leaf].shape[0 if s.repeat is None else 1 :])
        for d, axes in enumerate(self.moves.dims(s)):
            n = math.prod(self.moves.sizes[a] for a in axes if a in s.axes)
            if s.kind == "reduce_scatter":
                shape[d] //= n
            elif s.kind == "all_gather":
                shape[d] *= n
        return tuple(shape)

    def _exposed(self, s: Slot, shape: Sequence[int]) -> tuple[list[int], list[int]]:
        """(shape with each of the slot's axes as a separate dim, order that puts those dims first)."""
        dims: list[int] = []
        front: dict[str, int] = {}
        rest: list[int] = []
        for d, axes in enumerate(self.moves.dims(s)):
            mine = [a for a in axes if a in s.axes]
            for a in mine:
                front[a] = len(dims)
                dims.append(self.moves.sizes[a])
            rest.append(len(dims))
            dims.append(shape[d] // math.prod(self.moves.sizes[a] for a in mine))
        return dims, [*(front[a] for a in s.axes), *rest]

    def _rows(self, x: Array, s: Slot) -> Array:
        """[ways, elements]: row i is the shard of the i-th device along the slot's axes."""
        dims, order = self._exposed(s, x.shape)
        return x.reshape(dims).transpose(order).reshape(self._ways(s), -1)

    def _merged(self, rows: Array, s: Slot, shape: tuple[int, ...]) -> Array:
        """The inverse: rows of shards are joined into the whole."""
        dims, order = self._exposed(s, shape)
        back = [order.index(i) for i in range(len(order))]
        return rows.reshape([dims[i] for i in order]).transpose(back).reshape(shape)


def moves_of(
    problem: ScheduleProblem,
    plan: BucketPlan,
    *,
    paths: Sequence[str],
    ranks: Sequence[int],
    placements: Sequence[Placement],
    layers: Sequence[int],
    sizes: Mapping[str, int],
    data_axes: tuple[str, ...],
    lenient: bool = False,
) -> Moves:
    """What the plan does to a tree of parameters.

    paths, ranks, placements, layers: for each leaf, its path, number of dims, storage, and size of its first dim.
    lenient: a parameter that the problem does not name is left to the compiler. Raises PaseError if the problem names a
    tensor that is not a parameter, or leaves out a parameter's gradient.
    """
    slots, leaf_of, broken = _slots(problem, paths, data_axes)
    chains: dict[bool, dict[tuple[int, int | None], list[int]]] = {True: {}, False: {}}
    for i, s in enumerate(slots):
        if s is not None and not s.again:
            chains[s.gradient].setdefault((s.leaf, s.repeat), []).append(i)
    broken |= set(leaf_of) - {leaf for leaf, _ in chains[True]}
    lost = [p for i, p in enumerate(paths) if not lenient and i not in leaf_of]
    if lost:
        raise PaseError(f"problem '{problem.name}' leaves out parameters {', '.join(lost)}")
    full = [tuple(p) + ((),) * (r - len(p)) for p, r in zip(placements, ranks, strict=True)]
    for i, place in enumerate(full):
        repeats = sorted({r for (leaf, r) in chains[True] if leaf == i}, key=lambda r: -1 if r is None else r)
        stacked = repeats != [None] and bool(repeats)
        whole = repeats == [None] or (repeats == list(range(layers[i])) and not place[0])
        stored = place[1:] if stacked else place
        gathered = any(a in data_axes for axes in stored for a in axes)
        ok = whole and all(
            _chain_works([slots[t] for t in chains[True].get((i, r), [])], stored, data_axes, True)
            and gathered == ((i, r) in chains[False])
            and _chain_works([slots[t] for t in chains[False].get((i, r), [])], stored, data_axes, False)
            for r in repeats
        )
        if not ok:
            broken.add(i)
    return Moves(
        problem=problem,
        plan=plan,
        sizes=dict(sizes),
        placements=tuple(full),
        data_axes=data_axes,
        slots=tuple(None if s is None or s.leaf in broken else s for s in slots),
        gradients={k: v[-1] for k, v in chains[True].items() if k[0] not in broken},
        gathers={k: v[-1] for k, v in chains[False].items() if k[0] not in broken},
        left=frozenset(broken),
    )


def _slots(
    problem: ScheduleProblem, paths: Sequence[str], data_axes: tuple[str, ...]
) -> tuple[list[Slot | None], list[int], set[int]]:
    """(the slot of each tensor of the problem; the parameter that each belongs to; parameters left to the compiler).

    A slot is None if the tensor moves only over other axes, which is the compiler's part. A parameter is left to the
    compiler if one of its tensors cannot be moved by hand.
    """
    where = {p: i for i, p in enumerate(paths)}
    slots: list[Slot | None] = []
    leaf_of: list[int] = []
    broken: set[int] = set()
    for t in problem.tensors:
        m = _NAME.match(t.name)
        assert m is not None  # the pattern takes any text
        exact = t.name in where
        leaf = where.get(t.name) if exact else where.get(m["path"])
        if leaf is None:
            raise PaseError(
                f"tensor '{t.name}' of '{problem.name}' is not a parameter; there are {', '.join(paths)}"
            )
        leaf_of.append(leaf)
        axes = t.axes.names or data_axes
        mine = tuple(a for a in data_axes if a in axes)
        if not mine:
            slots.append(None)
            continue
        slots.append(
            Slot(
                leaf=leaf,
                repeat=None if exact or m["repeat"] is None else int(m["repeat"]),
                kind=t.kind,
                axes=mine,
                follows=t.follows[0] if t.follows else None,
                gradient=t.kind != "all_gather",
                again=not exact and m["again"] is not None,
            )
        )
        known = t.kind in ("all_reduce", "reduce_scatter", "all_gather")
        beyond = t.kind != "all_reduce" and set(axes) - set(data_axes)
        if len(t.follows) > 1 or not known or beyond:
            broken.add(leaf)
    return [_cut_off(s, slots) for s in slots], leaf_of, broken


def _cut_off(s: Slot | None, slots: Sequence[Slot | None]) -> Slot | None:
    """A gather that follows its gradient's stages starts from the stored parameter.

    A gather that follows a move of the compiler starts from the result of that move.
    """
    from dataclasses import replace

    if s is None or s.follows is None:
        return s
    before = slots[s.follows]
    return replace(s, follows=None) if before is None or before.gradient != s.gradient else s


def _chain_works(
    stages: Sequence[Slot | None], stored: Placement, data: tuple[str, ...], gradient: bool
) -> bool:
    """Whether the stages lead from whole to stored (a gradient) or back (a parameter), in contiguous blocks.

    They must also sum over every data axis exactly once.
    """
    now = [[a for a in axes if a not in data] if gradient else list(axes) for axes in stored]
    seen: list[str] = []
    for n, s in enumerate(stages):
        if s is None or (n > 0) != (s.follows is not None):
            return False
        seen += s.axes
        if s.kind == "all_reduce":
            continue
        for d, axes in enumerate(stored):
            mine = [a for a in axes if a in s.axes]
            after = [a for a in axes if (a in now[d]) != (a in mine)]
            shorter, longer = (now[d], after) if gradient else (after, now[d])
            if longer[: len(shorter)] != shorter or set(longer) - set(shorter) != set(mine):
                return False
            now[d] = after
    goal = [list(axes) if gradient else [a for a in axes if a not in data] for axes in stored]
    return now == goal and (not gradient or sorted(seen) == sorted(data))
