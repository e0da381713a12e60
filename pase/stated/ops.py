"""What one device does in a micro-batch under a stated strategy, op by op: local work, and collectives in between."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pase.compiler.problem.options import CompileOptions
from pase.compiler.problem.problem import SplitProblem
from pase.compiler.resolve import traced_model
from pase.errors import PaseError
from pase.stated.model import micro_batch_graph
from pase.stated.place import numbers_heads, place
from pase.stated.strategy import parse
from pase.tables.itemize import Collective, LocalWork, collectives, local_work

__all__ = ["StatedOps", "stated_ops"]


@dataclass(frozen=True, kw_only=True)
class StatedOps:
    """One device's micro-batch under a strategy.

    work: node -> its pieces of work, in the order of the graph.
    parameters: the nodes that are parameters.
    between: collectives of activations and of their gradients.
    """

    strategy: str
    work: Mapping[str, tuple[LocalWork, ...]]
    parameters: frozenset[str]
    between: tuple[Collective, ...]

    def nbytes(self, *, of_parameters: bool, phase: str) -> float:
        """Return the bytes that a device reads and writes: of parameters in the update, or of light ops in a pass."""
        return sum(
            w.nbytes * w.times
            for name, works in self.work.items()
            for w in works
            if (name in self.parameters) == of_parameters and w.phase == phase and w.kind == "memory"
        )


def stated_ops(model: str, strategy: str, machine: str | None = None) -> StatedOps:
    """Return the ops of a model whose batch is one micro-batch of one data-parallel rank.

    strategy: as for ``pase price``, without replicas and stages, which do not change a micro-batch's ops: ``tp=4``.

    Raises Infeasible, with the reason, if the model cannot be split so, and PaseError if the strategy has replicas or
    stages.
    """
    devices = 1
    for part in strategy.split(","):
        name, _, ways = part.partition("=")
        devices *= int(ways) if name in ("tp", "cp") and ways.isdigit() else 1
    s = parse(strategy, devices)
    if s.pipeline > 1 or s.ranks > 1:
        raise PaseError(
            "replicas and stages do not change the ops of a micro-batch",
            where=f"'{strategy}'",
            fix="state only tp, sp and cp",
        )
    traced, _ = traced_model(model, None, (), CompileOptions(devices=devices))
    problem = SplitProblem.of(traced.graph, devices, machine, "analytic", "adam")
    if traced.frontend != "jax":
        raise PaseError(
            f"'{model}' was read by the {traced.frontend} frontend, but a stated strategy needs a JAX model here"
        )
    graph = micro_batch_graph(traced, 1, s.tensor)
    placed = place(graph, replace(s, micro=None), problem.model)
    parameters = [n for n in graph.nodes if n.kind == "parameter"]
    stored = {a.tensor for n in parameters for op in n.ops for a in op.writes}
    every = collectives(graph, placed.mesh, placed.strategy, problem.model)
    return StatedOps(
        strategy=strategy,
        work=local_work(graph, placed.mesh, placed.strategy, problem.model),
        parameters=frozenset(n.name for n in parameters),
        between=tuple(
            c for c in every if c.tensor not in stored and not (s.heads and numbers_heads(graph, c))
        ),
    )
