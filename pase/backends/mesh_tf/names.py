"""Names for Mesh-TensorFlow's dims, chosen such that one layout per name expresses the plan.

Mesh-TF has one set of rules for a whole program: the name of a tensor's dim determines the mesh axis that splits it.
Iteration dims with the same meaning therefore share a name throughout the graph. If the plan splits such a dim
differently in different places, the dim has a name for each split. Naming is a union-find over the edges' access maps
with one kind of constraint: two dims of one loop nest (such as the positions of q and k) never share a name.

Mesh-TF cannot split one dim over two mesh axes. If the axes are always used together, they are merged into one axis of
the mesh. Otherwise the dim becomes two dims, major and minor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pase.ir import Access, Graph, Node, Tensor
from pase.ir.sizes import is_one
from pase.machine import Mesh
from pase.tables.layouts import concrete_size

__all__ = ["MeshTfDim", "Names", "TensorDims", "flat", "merged_axes"]


@dataclass(frozen=True)
class MeshTfDim:
    """A dim of a Mesh-TF tensor. base: the name of its meaning. axis: the mesh axis that splits it."""

    base: str
    size: int
    axis: str | None = None


TensorDims = tuple[tuple[MeshTfDim, ...], ...]
"""The Mesh-TF dims of each dim of the source's tensor, major to minor. A dim of size 1 has none."""

_ROLES = ("pending", "state")  # kinds of dims that do not index a tensor


def flat(dims: TensorDims) -> tuple[MeshTfDim, ...]:
    return tuple(d for group in dims for d in group)


def merged_axes(
    mesh: Mesh, splits: Iterable[Mapping[str, tuple[str, ...]]]
) -> tuple[dict[str, str], dict[str, int]]:
    """(axis -> the axis of Mesh-TF's mesh that contains it, sizes of that mesh's axes). Axes of size 1 are left out.

    Adjacent axes are merged if every dim that uses one also uses the other.

    >>> merged_axes(Mesh(names=("x", "y", "z"), sizes=(2, 2, 4)), [{"b": ("x", "y")}, {"k": ("z",)}])
    ({'x': 'x_y', 'y': 'x_y', 'z': 'z'}, {'x_y': 4, 'z': 4})
    """
    uses = [set(axes) for split in splits for axes in split.values()]
    groups: list[list[str]] = []
    size = mesh.by_name
    for a in (n for n in mesh.names if size[n] > 1):
        if groups and any(a in u for u in uses) and all((a in u) == (groups[-1][-1] in u) for u in uses):
            groups[-1].append(a)
        else:
            groups.append([a])
    into = {a: "_".join(g) for g in groups for a in g}
    sizes: dict[str, int] = {}
    for a, g in into.items():
        sizes[g] = sizes.get(g, 1) * size[a]
    return into, sizes


@dataclass
class Names:
    """The names of a plan's dims. strategy: node -> iteration dim -> mesh axes, as in ``Plan.strategy``."""

    graph: Graph
    mesh: Mesh
    strategy: Mapping[str, Mapping[str, tuple[str, ...]]]
    axes: dict[str, int] = field(init=False)
    """The mesh: axis -> size."""
    _into: dict[str, str] = field(init=False)
    _base: dict[tuple[str, str], str] = field(init=False)
    _usual: dict[str, str | None] = field(init=False, default_factory=dict)
    """base -> the axis (or None) of the variant whose name is the base itself."""
    _used: dict[str, str | None] = field(init=False, default_factory=dict)
    """Every name used so far -> its mesh axis."""
    _anonymous: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._into, self.axes = merged_axes(self.mesh, map(self._walked, self.graph.nodes))
        self._base = _bases(self.graph)
        variants: dict[str, set[str | None]] = {}
        for n in self.graph.nodes:
            for d in n.space:
                if d.kind not in _ROLES and not is_one(d.size):
                    for f in self.factors(n, d.name):
                        variants.setdefault(f.base, set()).add(f.axis)
        self._usual = {base: next(iter(v)) if len(v) == 1 else None for base, v in variants.items()}

    def _walked(self, node: Node) -> dict[str, tuple[str, ...]]:
        """The split of those of the node's dims that index tensors."""
        split = self.strategy.get(node.name, {})
        return {d: axes for d, axes in split.items() if node.space[d].kind not in _ROLES}

    def split(self, node: Node, dim: str) -> tuple[str, ...]:
        """The axes of Mesh-TF's mesh that split the node's iteration dim, major to minor."""
        axes = self.strategy.get(node.name, {}).get(dim, ())
        return tuple(dict.fromkeys(self._into[a] for a in axes if a in self._into))

    def factors(self, node: Node, dim: str) -> tuple[MeshTfDim, ...]:
        """The iteration dim as Mesh-TF dims: a single dim, or one for each axis that splits it."""
        size, axes = concrete_size(node.space[dim].size, node.name), self.split(node, dim)
        base = self._base[node.name, dim]
        if len(axes) < 2:
            return (MeshTfDim(base, size, axes[0] if axes else None),)
        out = []
        for i, a in enumerate(axes):
            part = self.axes[a] if i < len(axes) - 1 else size
            out.append(MeshTfDim(f"{base}_part{i}", part, a))
            size //= part
        return tuple(out)

    def dims(self, node: Node, access: Access, tensor: Tensor) -> TensorDims:
        """The tensor's dims as this access indexes them. A dim under a window has the tensor's extent."""
        out: list[tuple[MeshTfDim, ...]] = []
        for walk, extent in zip(access.map.walks, tensor.shape, strict=True):
            extent = concrete_size(extent, tensor.name)
            made = tuple(f for d in walk.dims for f in self.factors(node, d))
            points = 1
            for f in made:
                points *= f.size
            if points == extent:
                out.append(tuple(f for f in made if f.size > 1))
            elif len(made) == 1:
                out.append((MeshTfDim(made[0].base, extent, made[0].axis),) if extent > 1 else ())
            else:
                out.append((self.fresh(extent),) if extent > 1 else ())
        return tuple(out)

    def fresh(self, size: int) -> MeshTfDim:
        """A new unsplit dim that nothing else uses."""
        self._anonymous += 1
        self._usual[f"whole{self._anonymous}"] = None
        return MeshTfDim(f"whole{self._anonymous}", size)

    def name(self, dim: MeshTfDim) -> str:
        """The dim's name in the program: the base for the usual variant; other variants add their axis."""
        usual = self._usual.setdefault(dim.base, dim.axis)
        name = dim.base if dim.axis == usual else f"{dim.base}_{dim.axis or 'whole'}"
        self._used[name] = dim.axis
        return name

    @property
    def mesh_shape(self) -> str:
        """``"data:4;model:2"``."""
        return ";".join(f"{a}:{n}" for a, n in self.axes.items())

    @property
    def layout_rules(self) -> str:
        """``"batch:data;h:model"``, for all names used so far."""
        return ";".join(f"{name}:{axis}" for name, axis in sorted(self._used.items()) if axis is not None)


def _bases(graph: Graph) -> dict[tuple[str, str], str]:
    """(node, iteration dim) -> a name. Dims with the same meaning share it; two dims of one node never do."""
    Key = tuple[str, str]
    of: dict[Key, Key] = {(n.name, d.name): (n.name, d.name) for n in graph.nodes for d in n.space}
    members: dict[Key, dict[str, str]] = {(node, dim): {node: dim} for node, dim in of}

    def join(x: Key, y: Key) -> None:
        a, b = of[x], of[y]
        if len(members[a]) < len(members[b]):
            a, b = b, a
        if not members[a].keys().isdisjoint(members[b]):  # also if a is b
            return
        joined = members.pop(b)
        members[a] |= joined
        of.update(dict.fromkeys(joined.items(), a))

    for e in graph.edges:
        src, dst = graph.node[e.src], graph.node[e.dst]
        _, write = src.write_of(e.tensor)
        for w, r in zip(write.map.walks, e.access.map.walks, strict=True):
            sizes = [[node.space[d].size for d in walk.dims] for node, walk in ((src, w), (dst, r))]
            if sizes[0] == sizes[1]:
                for x, y in zip(w.dims, r.dims, strict=True):
                    join((e.src, x), (e.dst, y))
    letters: dict[Key, Counter[str]] = {}
    for k, first in of.items():
        letters.setdefault(first, Counter())[_letter(k[1])] += 1
    taken: Counter[str] = Counter()
    names: dict[Key, str] = {}
    for root, counts in letters.items():
        word = counts.most_common(1)[0][0]
        taken[word] += 1
        names[root] = word if taken[word] == 1 else f"{word}{taken[word]}"
    return {k: names[first] for k, first in of.items()}


def _letter(dim: str) -> str:
    letter = dim.rstrip("0123456789")
    return {"b": "batch"}.get(letter, letter)
