"""A run's graph under changes, and what a report says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from pase.files.json_values import JsonObject
from pase.replay.graph import DataflowGraph
from pase.replay.types import Timeline

__all__ = ["Rewrite", "Rewritten"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Rewritten:
    """A run under one change, or under several that are applied one after another.

    control: the unchanged run, built in the same way; the changed graph is compared with it.
    added_s: time that is added to the replay of the graph.
    of_ranks: the number of ranks after the change; 0 if it is unchanged.
    note: what a reader must know of the prediction. detail: more values for the report.
    """

    graph: DataflowGraph
    control: DataflowGraph | None = None
    added_s: float = 0.0
    of_ranks: int = 0
    note: str = ""
    detail: JsonObject = field(default_factory=dict)

    def noted(self, note: str) -> Rewritten:
        """The same run with one more note."""
        return replace(self, note="; ".join(x for x in (self.note, note) if x))

    def under(self, change: Rewrite, t: Timeline) -> Rewritten:
        """This run under one more change. t: the run's timeline."""
        made = change(t, self.graph)
        return replace(
            self.noted(made.note),
            graph=made.graph,
            control=self.control if made.control is None else made.control,
            added_s=self.added_s + made.added_s,
            of_ranks=made.of_ranks or self.of_ranks,
            detail=self.detail | made.detail,
        )


Rewrite: TypeAlias = Callable[[Timeline, DataflowGraph], Rewritten]
"""A what-if: a change of a run's graph."""
