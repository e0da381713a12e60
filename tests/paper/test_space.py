"""The paper's formulas computed independently, loops unrolled in their edges, and the search against brute force."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pase import zoo
from pase.errors import PaseError
from pase.frontends.jax.frontend import trace
from pase.ir import AccessMap, named, simplify
from pase.paper import PROTOTYPE, SOUND, LayerFlow, build, complete, layers_of
from pase.paper.costs import flow_cost
from pase.search import solve
from pase.search.check import brute_force
from tests.baselines.helpers import graph_of
from tests.paper.table2 import full, product_dims

R = 5000.0


def reduced(model):
    m = zoo.reduced(model)
    return named(simplify(trace(m.loss_fn, m.params, m.batch).graph))


def transfer(shape, a, b, times=1.0):
    nothing = AccessMap(())
    flow = LayerFlow(src="u", dst="v", shape=shape, written=nothing, read=nothing, times=times)
    return flow_cost(flow, np.array([a]), np.array([b]), PROTOTYPE)[0, 0] / R


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        ((4, 1), (4, 1), 0),  # the same split
        ((1, 1), (4, 1), 2 * 16),  # sliced locally, but charged all the same (notes: fault 8)
        ((4, 1), (1, 1), 2 * (64 - 16)),  # gathered: the missing words, both ways
        ((4, 1), (1, 4), 2 * (16 - 4)),  # all-to-all: a quarter of the block is already there
        ((4, 1), (2, 2), 2 * (16 - 8)),
        ((2, 1), (4, 1), 2 * 16),  # more parts than at the writer: nothing counts as being there already
    ],
)
def test_edges_by_hand(a, b, words):
    assert transfer((8, 8), a, b) == words
    assert transfer((8, 8), a, b, times=3) == 3 * words


@given(st.tuples(*[st.sampled_from([1, 2, 4, 8])] * 4))
def test_edges_cost_nothing_where_nothing_changes_and_never_less(splits):
    a, b = splits[:2], splits[2:]
    assert transfer((64, 64), a, a) == 0
    assert transfer((64, 64), a, b) >= 0


def test_products_by_hand():
    """A layer of b = 256, k = 1024, n = 4096 in every split over 8 devices: the three all-reduces of the notes."""
    tables, space = build(graph_of("mlp"), 8)
    v = next(i for i, n in enumerate(space.layers.nodes) if n in full(space.layers))
    node = space.layers.nodes[v]
    b, (out,), (into,) = product_dims(node)
    index = {d.name: i for i, d in enumerate(node.space)}
    assert len(space.configs[v]) == 20  # ways to place at most three factors of two on three dims
    for counts, cost in zip(space.configs[v], tables.node_costs[v], strict=True):
        pm, pn, pk = (int(counts[index[d]]) for d in (b, out, into))
        m, n, k = 256 / pm, 4096 / pn, 1024 / pk

        def all_reduce(words, ways):
            return R * 2 * (ways - 1) / ways * words

        want = 3 * m * n * k + all_reduce(m * n, pk) + all_reduce(m * k, pn) + all_reduce(n * k, pm)
        assert cost == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("model", ["mlp", "alexnet"])
@pytest.mark.parametrize("rules", [PROTOTYPE, SOUND], ids=["prototype", "sound"])
def test_search_is_brute_force(model, rules):
    tables, space = build(reduced(model), 2, rules)
    if model == "alexnet":  # only the last layers, because brute force over all of them is out of reach
        fixed = {n.name: {} for n in space.layers.nodes[:-6]}
        found, _ = complete(tables, space, fixed)
        costs = tuple(
            np.where((cfg > 1).any(axis=1), np.inf, c) if n.name in fixed else c
            for n, cfg, c in zip(space.layers.nodes, space.configs, tables.node_costs, strict=True)
        )
        small = [i for i, n in enumerate(space.layers.nodes) if n.name not in fixed]
        best = min(
            _cost(tables, costs, choice, small)
            for choice in np.ndindex(*[len(tables.node_costs[i]) for i in small])
        )
        assert found.cost == pytest.approx(best, rel=1e-12)
    else:
        assert solve(tables).cost == pytest.approx(brute_force(tables).cost, rel=1e-12)


def _cost(tables, costs, picked, where):
    choice = np.zeros(len(costs), dtype=int)
    choice[where] = picked
    total = sum(c[k] for c, k in zip(costs, choice, strict=True))
    return total + sum(e.cost[e.src_class[choice[e.src]], e.dst_class[choice[e.dst]]] for e in tables.edges)


def test_stacked_layers_pass_their_state_on():
    """Twelve layers: the first reads the sum of the embeddings, eleven read the previous layer, and the last norm reads
    the last layer."""
    layers = layers_of(graph_of("gpt2"))
    kinds = {n.name: n.kind for n in layers.nodes}
    assert not {"copy", "carry", "parameter", "input"} & set(kinds.values())
    into = Counter()
    for f in layers.flows:
        if f.dst == "reduce@layer_norm":
            into[f.src] += f.times
    assert into == {"map@gpt.loss_fn": 1, "map@feed_forward": 11}
    read = {f.dst: f.src for f in layers.flows}
    # Looked up, cast, summed.
    assert read["map@gpt.loss_fn"] == "map@lookup" and read["map@lookup"] == "wte:take"
    assert [f.src for f in layers.flows if f.dst == "reduce@layer_norm~3"] == ["map@feed_forward"]


def test_a_loop_over_layers_is_as_good_as_its_layers():
    """All iterations of a loop share a config. Separate configs per layer are not better."""
    rolled, apart = graph_of("transformer?layers=2"), graph_of("transformer?layers=2&scan=0")
    assert len(layers_of(apart).nodes) > len(layers_of(rolled).nodes)
    cost = [solve(build(g, 8)[0]).cost for g in (rolled, apart)]
    assert cost[1] <= cost[0] * (1 + 1e-12)
    assert cost[1] == pytest.approx(cost[0], rel=1e-6)


def test_recurrence_is_one_layer():
    layers = layers_of(graph_of("rnnlm"))
    lstm = next(n for n in layers.nodes if n.name == "lstm")
    assert {d.name: d.size for d in lstm.space} == dict(l=2, b=64, s=256, d=2048, e=2048, g=4, two=2)
    assert {(f.src, f.dst) for f in layers.flows if "lstm" in (f.src, f.dst)} == {
        ("embedding:take", "lstm"),
        ("lstm", "lstm"),
        ("lstm", "classifier.w:dot"),
    }


@pytest.mark.parametrize("p", [1, 2, 4])
def test_configs_use_at_most_p_devices(p):
    _, space = build(reduced("transformer"), p)
    for node, cfg in zip(space.layers.nodes, space.configs, strict=True):
        assert (cfg.prod(axis=1) <= p).all() and (cfg[0] == 1).all()
        assert len(np.unique(cfg, axis=0)) == len(cfg)
        for d, column in zip(node.space, cfg.T, strict=True):
            assert (int(d.size) % column == 0).all()


@pytest.mark.parametrize("p", [0, -4, 12])
def test_devices_are_a_power_of_two(p):
    with pytest.raises(PaseError) as e:
        build(reduced("mlp"), p)
    assert "power of two" in e.value.what and str(p) in e.value.what and e.value.fix


def test_a_split_outside_the_space_names_its_layer():
    tables, space = build(reduced("mlp"), 2)
    name = space.layers.nodes[0].name
    with pytest.raises(KeyError, match=rf"'{name}': {{'b': 3}}.* p = 2"):
        complete(tables, space, {name: {"b": 3}})
