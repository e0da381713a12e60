"""Layouts and partial sums against their definition: the elements that each device holds, and numpy's own sums."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pase.ir import Access, AccessMap, Dim, IterationSpace, Node, Op, Tensor, functions
from pase.machine import Mesh
from pase.tables.axis_layout import (
    PARTIAL,
    AxisLayout,
    blocks_of,
    forward_states,
    gradient_states,
    tensor_dim,
)
from pase.tables.layouts import NOT_SPLIT, configs, read_rule, state_index, write_rule
from tests.tables.holdings import coordinates, held
from tests.tables.strategies import meshes


def points(node: Node, config: np.ndarray, mesh: Mesh) -> list[dict[str, np.ndarray]]:
    """Per device, the indices of each iteration dim that it works on. The dim is cut into even blocks, axis by axis in
    mesh order."""
    out = []
    for coord in coordinates(mesh):
        mine = {d.name: np.arange(int(d.size)) for d in node.space}
        for a, choice in enumerate(config):
            if choice >= 0:
                name = node.space.dims[choice].name
                mine[name] = np.split(mine[name], mesh.sizes[a])[coord[a]]
        out.append(mine)
    return out


def touched(node: Node, access: Access, mine: dict[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """The elements of a tensor that a device reads or writes at its points: bool [elements]."""
    per_dim = []
    for walk in access.map.walks:
        index = np.zeros(1, dtype=int)
        for d in walk.dims:
            index = (index[:, None] * int(node.space[d].size) + mine[d][None, :]).ravel()
        per_dim.append(index)
    out = np.zeros(shape, dtype=bool)
    out[np.ix_(*per_dim)] = True
    return out.ravel()


def node_of(einsum: str, sizes: dict[str, int], reduced: str = "") -> tuple[Node, Op, list[Tensor]]:
    left, right = einsum.split("->")
    maps = [AccessMap.parse(m) for m in (*left.split(","), right)]
    tensors = [
        Tensor(name=f"t{i}", shape=tuple(prod(sizes[d] for d in w.dims) for w in m.walks), dtype="float32")
        for i, m in enumerate(maps)
    ]
    reads = tuple(Access(t.name, m) for t, m in zip(tensors[:-1], maps[:-1], strict=True))
    op = Op(
        name="op",
        kind="matmul",
        function=functions.MATMUL,
        reads=reads,
        writes=(Access(tensors[-1].name, maps[-1]),),
    )
    kinds = {d: "reduction" if d in reduced.split() else "parallel" for d in sizes}
    dims = tuple(Dim(name=d, size=n, kind=kinds[d]) for d, n in sizes.items())  # type: ignore[arg-type]
    return Node(name="n", space=IterationSpace(dims), ops=(op,)), op, tensors


@st.composite
def nodes(draw: st.DrawFn) -> tuple[Node, Op, list[Tensor]]:
    """Two operands and a result over up to four dims in any order, with neighbouring dims merged at times."""
    sizes = {d: draw(st.sampled_from([1, 2, 4, 4, 6, 8])) for d in "bmnk"[: draw(st.integers(1, 4))]}

    def walked() -> str:
        dims = draw(st.permutations(list(sizes)))[: draw(st.integers(1, len(sizes)))]
        merge = draw(st.integers(0, len(dims)))
        return " ".join((f"({' '.join(dims[:merge])})", *dims[merge:]) if merge > 1 else dims)

    maps = [walked() for _ in range(3)]
    sizes = {d: n for d, n in sizes.items() if any(d in m for m in maps)}
    return node_of(f"{maps[0]}, {maps[1]} -> {maps[2]}", sizes)


@given(meshes(max_axes=3), nodes(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_states_say_what_every_device_holds(mesh: Mesh, case: tuple[Node, Op, list[Tensor]], rng) -> None:  # type: ignore[no-untyped-def]
    """The states of two configs are equal exactly if every device holds the same elements."""
    node, op, tensors = case
    cfg = configs(node, mesh)
    cfg = cfg[rng.sample(range(len(cfg)), min(len(cfg), 8))]
    everything = ((read_rule, op.reads[0]), (read_rule, op.reads[1]), (write_rule, op.writes[0]))
    for (rule, access), tensor in zip(everything, tensors, strict=True):
        shape = tuple(map(int, tensor.shape))  # type: ignore[arg-type]
        rows = rule(node, op, access).states(cfg, mesh)
        holds = []
        for config, row in zip(cfg, rows, strict=True):
            want = [touched(node, access, mine, shape) for mine in points(node, config, mesh)]
            got = held(AxisLayout.of(row).summed, shape, mesh)[:, 0]
            assert (got == want).all()
            holds.append(np.array(want))
        plain = np.where(rows < 0, -1, rows)
        for i, j in itertools.combinations(range(len(cfg)), 2):
            assert (plain[i] == plain[j]).all() == (holds[i] == holds[j]).all()


EINSUMS = [
    ("b m k, k n -> b m n", "k", "bmk,kn->bmn"),
    ("b h q c, b h k c -> b h q k", "c", "bhqc,bhkc->bhqk"),
    ("b m, m -> b m", "", "bm,m->bm"),
    ("b s d, d -> b", "s d", "bsd,d->b"),
]


def sums_needed(
    einsum: str, arrays: list[np.ndarray], node: Node, config: np.ndarray, mesh: Mesh
) -> set[int]:
    """Axes along which devices that own the same elements of the result compute different numbers for them.

    Every device works on its own points of the whole loop nest, including dims that no operand uses.
    """
    left, right = einsum.split("->")
    names = "".join(d.name for d in node.space)
    work = points(node, config, mesh)
    parts = []
    for mine in work:
        mask = np.zeros([int(d.size) for d in node.space])
        mask[np.ix_(*(mine[c] for c in names))] = 1
        parts.append(np.einsum(f"{left},{names}->{right}", *arrays, mask))
    coords = coordinates(mesh)
    out = set()
    for a in range(len(mesh.sizes)):
        for i, j in itertools.combinations(range(len(coords)), 2):
            line = np.flatnonzero(coords[i] != coords[j]).tolist() == [a]
            if (
                line
                and all((work[i][c] == work[j][c]).all() for c in right)
                and not (parts[i] == parts[j]).all()
            ):
                out.add(a)
    again = prod(n for a, n in enumerate(mesh.sizes) if config[a] < 0)
    whole = np.einsum(f"{left},{names}->{right}", *arrays, np.ones([int(d.size) for d in node.space]))
    np.testing.assert_allclose(sum(parts) / again, whole)
    return out


@given(meshes(max_axes=2), st.sampled_from(EINSUMS), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_partial_is_where_numbers_differ(mesh: Mesh, case: tuple[str, str, str], rng) -> None:  # type: ignore[no-untyped-def]
    """Forward, this is the result. Backward, it is each operand's gradient, an einsum of the result's gradient."""
    text, reduced, einsum = case
    left, right = einsum.split("->")
    one, two = left.split(",")
    sizes = dict.fromkeys(dict.fromkeys(one + two + right), 4)
    node, op, _ = node_of(text, sizes, reduced)
    seed = np.random.default_rng(0)
    x, y, g = (seed.random([4] * len(letters)) for letters in (one, two, right))
    cfg = configs(node, mesh)
    config = cfg[rng.randrange(len(cfg))]

    def partial(row: np.ndarray) -> set[int]:
        return set(np.flatnonzero(row == PARTIAL).tolist())

    written = write_rule(node, op, op.writes[0]).states(config[None], mesh)[0]
    assert partial(written) == sums_needed(einsum, [x, y], node, config, mesh)
    for read, letters, other, value in ((0, one, two, y), (1, two, one, x)):
        row = read_rule(node, op, op.reads[read]).states(config[None], mesh)[0]
        assert partial(row) == sums_needed(f"{right},{other}->{letters}", [g, value], node, config, mesh)


def test_what_is_stored_is_split_in_contiguous_shards():
    """A stored dim that its readers view as two dims: the minor dim may be split only behind the whole major dim."""
    sizes = {"b": 8, "d": 2, "h": 4}
    space = IterationSpace(tuple(Dim(name=d, size=n, kind="parallel") for d, n in sizes.items()))
    stored = Op(
        name="x",
        kind="input",
        function=functions.COPY,
        reads=(),
        writes=(Access("x", AccessMap.parse("b (d h)")),),
    )
    mesh = Mesh(names=("x", "y"), sizes=(2, 2))
    found = {tuple(c) for c in configs(Node(name="x", space=space, ops=(stored,)), mesh).tolist()}
    b, d, h = range(3)
    assert {(d, h), (h, d), (b, d), (d, -1)} <= found
    assert not found & {(h, h), (b, h), (h, -1), (-1, h)}


def parameter(shape: tuple[int, ...]) -> Node:
    names = [f"d{i}" for i in range(len(shape))]
    dims = [Dim(name=n, size=s) for n, s in zip(names, shape, strict=True)]
    write = Access("w", AccessMap.of(*names))
    op = Op(
        name="parameter", kind="parameter", function=functions.BY_KIND["parameter"], reads=(), writes=(write,)
    )
    space = IterationSpace((*dims, Dim(name="state", size=0, kind="state")))
    return Node(name="w", space=space, ops=(op,))


@settings(max_examples=150)
@given(st.data(), meshes(), st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12]), min_size=1, max_size=3))
def test_shards_of_the_state_cover_the_parameter_once(data, mesh: Mesh, shape: list[int]) -> None:
    """Element by element: devices that differ on a state axis hold different shards of the gradient, and devices that
    differ on a storage axis hold different shards of both. A parameter shard consists of whole gradient shards."""
    node = parameter(tuple(shape))
    (state,) = state_index(node)
    cfg = configs(node, mesh)
    row = cfg[data.draw(st.integers(0, len(cfg) - 1))]
    written = write_rule(node, node.ops[0], node.ops[0].writes[0]).states(row[None], mesh)[0]

    def holds(states: np.ndarray) -> dict[tuple[int, ...], frozenset[int]]:
        out = {}
        index = np.arange(prod(shape)).reshape(shape)
        for device in itertools.product(*map(range, mesh.sizes)):
            mine = np.ones(shape, dtype=bool)
            for a, s in enumerate(states):
                if s >= 0:
                    t, blocks = tensor_dim(int(s)), blocks_of(int(s))
                    digit = np.indices(shape)[t] * blocks // shape[t] % mesh.sizes[a]
                    mine &= digit == device[a]
            out[device] = frozenset(index[mine].tolist())
        return out

    whole, part = holds(forward_states(written)), holds(gradient_states(written))
    assert all(part[d] <= whole[d] for d in whole)
    ways = prod(n for n, c in zip(mesh.sizes, row, strict=True) if c == state)
    assert all(len(part[d]) * ways == len(whole[d]) for d in whole)
    for d in whole:
        group = [e for e in whole if all(x == y or c == state for x, y, c in zip(d, e, row, strict=True))]
        assert frozenset().union(*(part[e] for e in group)) == whole[d]


def test_an_axis_that_divides_no_dim_cannot_split_the_state() -> None:
    mesh = Mesh(names=("a",), sizes=(4,))
    assert configs(parameter((6, 10)), mesh).tolist() == [[NOT_SPLIT]]
    assert configs(parameter((6, 8)), mesh).tolist() == [[NOT_SPLIT], [1], [2]]
