"""Turns intents into strategies, by an exact search over the configs that a baseline allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from pase.baselines.rules import RULES
from pase.baselines.types import Baseline, Intent, Skipped
from pase.errors import PaseError
from pase.files.quantities import bytes_text
from pase.ir import Graph
from pase.machine import CostModel, Machine, Mesh
from pase.search import solve
from pase.search.check import cost_of
from pase.tables import CostTables
from pase.tables.build import Space, build, config_space
from pase.tables.fixed import why_not
from pase.tables.layouts import NOT_SPLIT, concrete_size

__all__ = [
    "TablesOf",
    "baselines",
    "cheapest_by_name",
    "fill_in",
    "fill_in_alone",
    "fill_in_if_allowed",
    "intended",
    "may_be_noted",
    "price",
]

TablesOf = Callable[[Mesh], tuple[CostTables, Space]]


def baselines(
    graph: Graph,
    devices: int,
    machine: Machine,
    model: CostModel,
    *,
    only: tuple[str, ...] = (),
    tables_of: TablesOf | None = None,
) -> list[Baseline | Skipped]:
    """Every baseline's strategy for this graph, or the reason why it has none.

    model: prices what the baselines leave open. only: names of baselines, or of single variants
    (``megatron_8x4``); empty for all. tables_of: returns the tables of a mesh, if the caller has built them
    already (only the sizes of the mesh's axes matter).
    """
    built: dict[tuple[int, ...], tuple[CostTables, Space]] = {}

    def default(mesh: Mesh) -> tuple[CostTables, Space]:
        if mesh.sizes not in built:
            built[mesh.sizes] = build(graph, mesh, model)
        return built[mesh.sizes]

    made = intended(graph, devices, machine, only=only)
    return cheapest_by_name(fill_in_if_allowed(m, graph, tables_of or default) for m in made)


def intended(
    graph: Graph, devices: int, machine: Machine, *, only: tuple[str, ...] = ()
) -> list[Intent | Skipped]:
    """What each baseline intends for this graph, or why it does not apply. Nothing is priced.

    only: as in ``baselines``.

    Raises PaseError if there is no baseline of a name in ``only``.
    """
    out: list[Intent | Skipped] = []
    offered = set(RULES)
    for method, make in RULES.items():
        for made in make(graph, devices, machine):
            offered.add(made.name)
            if not only or method in only or made.name in only:
                out.append(made)
    if unknown := set(only) - offered:
        raise PaseError(
            f"there is no baseline named {', '.join(sorted(unknown))}",
            fix=f"choose from {', '.join(sorted(offered))}",
        )
    return out


def fill_in_if_allowed(made: Intent | Skipped, graph: Graph, tables_of: TablesOf) -> Baseline | Skipped:
    """``fill_in``, unless the intent's mesh does not hold the graph's fixed layouts."""
    if isinstance(made, Skipped):
        return made
    if (why := why_not(graph, made.mesh)) is not None:
        return Skipped(name=made.name, reason=why)
    return fill_in(made, *tables_of(made.mesh))


def cheapest_by_name(made: Iterable[Baseline | Skipped]) -> list[Baseline | Skipped]:
    """Of the variants of each baseline the cheapest; the first reason if there is none."""
    best: dict[str, Baseline | Skipped] = {}
    for found in made:
        so_far = best.get(found.name)
        better = isinstance(found, Baseline) and not (
            isinstance(so_far, Baseline) and so_far.cost <= found.cost
        )
        if so_far is None or better:
            best[found.name] = found
    return list(best.values())


def fill_in(intent: Intent, tables: CostTables, space: Space) -> Baseline | Skipped:
    """The cheapest strategy among the configs that the intent allows."""
    keep = _allowed(intent, space.graph, space.configs)
    if isinstance(keep, Skipped):
        return keep
    return _cheapest(
        intent, tables.restricted(dict(enumerate(keep))), space.graph, _taken(space.configs, keep)
    )


def fill_in_alone(intent: Intent, graph: Graph, model: CostModel) -> Baseline | Skipped:
    """``fill_in`` for a mesh that is used only here: prices only the configs that the intent allows."""
    configs = config_space(graph, intent.mesh, model)
    keep = _allowed(intent, graph, configs)
    if isinstance(keep, Skipped):
        return keep
    among = _taken(configs, keep)
    return _cheapest(intent, build(graph, intent.mesh, model, among=among)[0], graph, among)


def _allowed(intent: Intent, graph: Graph, configs: Sequence[np.ndarray]) -> list[np.ndarray] | Skipped:
    """For each node, the indices of the configs that the intent allows; Skipped if a node has none."""
    keep: list[np.ndarray] = []
    same: dict[tuple[int | str, int], np.ndarray] = {}  # nodes with equal configs share one array
    for node, cfg in zip(graph.nodes, configs, strict=True):
        key = (intent.alike.get(node.name, node.name), id(cfg))
        if key not in same:
            same[key] = np.flatnonzero(intent.allow(node, cfg, intent.mesh))
        allowed = same[key]
        if not len(allowed):
            reason = f"node '{node.name}' has no config on mesh {intent.mesh.sizes} that the baseline allows"
            return Skipped(name=intent.name, reason=reason)
        keep.append(allowed)
    return keep


def _taken(configs: Sequence[np.ndarray], keep: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The configs at these indices. Equal selections of equal nodes are one array."""
    made: dict[tuple[int, bytes], np.ndarray] = {}
    return [made.setdefault((id(cfg), k.tobytes()), cfg[k]) for cfg, k in zip(configs, keep, strict=True)]


def _cheapest(intent: Intent, tables: CostTables, graph: Graph, configs: Sequence[np.ndarray]) -> Baseline:
    """The cheapest strategy over these configs, as a baseline."""
    found = solve(tables)
    chosen = zip(graph.nodes, configs, found.choice, strict=True)
    strategy = {node.name: cfg[i] for node, cfg, i in chosen}
    notes = (*intent.notes, *_undivided(intent, graph, strategy))
    return Baseline(name=intent.name, mesh=intent.mesh, strategy=strategy, cost=found.cost, notes=notes)


_MUCH = 0.05


def _undivided(intent: Intent, graph: Graph, strategy: Mapping[str, np.ndarray]) -> Iterator[str]:
    """A note if much of the parameters lies whole on every device of the axes over which it should be split."""
    axes = list(intent.stored)
    ways, shape = _indivisible(intent, graph)
    whole = [p for p in shape if (strategy[graph.producer[p].name][axes] == NOT_SPLIT).any()]
    nbytes = _parameter_bytes(graph)
    lies, parameters = sum(nbytes[p] for p in whole), sum(nbytes.values())
    if lies > _MUCH * parameters:
        sizes = dict.fromkeys(n for p in sorted(whole, key=lambda p: -nbytes[p]) for n in shape[p])
        more = ", …" if len(sizes) > _SIZES else ""
        yield (
            f"{ways} divides none of the dims ({', '.join(map(str, [*sizes][:_SIZES]))}{more}) of "
            f"{bytes_text(lies)} of the {bytes_text(parameters)} of parameters, so these are not split over "
            f"{ways} devices"
        )


def _indivisible(intent: Intent, graph: Graph) -> tuple[int, dict[str, list[int]]]:
    """The number of devices that should share each parameter, and the shapes of those that it does not divide."""
    ways = math.prod(intent.mesh.sizes[a] for a in intent.stored)
    shape = {t.name: [concrete_size(s, t.name) for s in t.shape] for t in graph.parameters}
    return ways, {p: s for p, s in shape.items() if intent.stored and all(n % ways for n in s)}


def _parameter_bytes(graph: Graph) -> dict[str, int]:
    return {t.name: concrete_size(t.nbytes, t.name) for t in graph.parameters}


def may_be_noted(intent: Intent, graph: Graph) -> bool:
    """Whether the intent's baseline can have a note, before its strategy is known."""
    nbytes = _parameter_bytes(graph)
    lies = sum(nbytes[p] for p in _indivisible(intent, graph)[1])
    return bool(intent.notes) or lies > _MUCH * sum(nbytes.values())


_SIZES = 6


def price(graph: Graph, baseline: Baseline, model: CostModel) -> float:
    """The cost of the baseline under a cost model, from the same tables as the search's."""
    tables, space = build(graph, baseline.mesh, model)
    return cost_of(tables, space.index(baseline.strategy))
