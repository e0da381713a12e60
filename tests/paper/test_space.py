"""The search space of the paper: against brute force, and its refusals."""

import numpy as np
import pytest

from pase import zoo
from pase.errors import PaseError
from pase.frontends.jax.frontend import trace
from pase.ir import named, simplify
from pase.paper import PROTOTYPE, SOUND, build, complete, layers_of
from pase.search import solve
from pase.search.check import brute_force
from tests.baselines.helpers import graph_of


def reduced(model):
    m = zoo.reduced(model)
    return named(simplify(trace(m.loss_fn, m.params, m.batch).graph))


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


def test_a_loop_over_layers_is_as_good_as_its_layers():
    """All iterations of a loop share a config. Separate configs per layer are not better."""
    rolled, apart = graph_of("transformer?layers=2"), graph_of("transformer?layers=2&scan=0")
    assert len(layers_of(apart).nodes) > len(layers_of(rolled).nodes)
    cost = [solve(build(g, 8)[0]).cost for g in (rolled, apart)]
    assert cost[1] <= cost[0] * (1 + 1e-12)
    assert cost[1] == pytest.approx(cost[0], rel=1e-6)


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
