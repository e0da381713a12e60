"""Helper: the op of a framework that is being lowered, with a graph of its own."""

from __future__ import annotations

import numpy as np

from pase.frontends.common.values import Site, Value
from pase.ops import GraphBuilder
from tests.ops.evaluated import numbers, results


class OneOp(Site):
    place = "op 'it' of model 'm'"

    def __init__(self) -> None:
        self.builder = GraphBuilder("m")
        self.given: dict[str, np.ndarray] = {}

    @property
    def b(self) -> GraphBuilder:
        return self.builder

    def input(self, *shape: int) -> Value:
        """An input of the model, with random numbers for ``computed``."""
        t = self.builder.input(f"x{len(self.given)}", shape, "float32")
        self.given[t.name] = numbers(*shape)
        return self.value(t)

    def weight(self, *shape: int) -> Value:
        """A tensor that the model stores, as the frontends read it."""
        out = Value(
            shape=shape,
            dtype="float32",
            make=lambda: self.builder.parameter("w", shape, "float32"),
            note=("initializer",),
            weight=True,
        )
        return out

    def array(self, v: Value) -> np.ndarray:
        """The random numbers of an input."""
        assert v.tensor is not None
        return self.given[v.tensor.name]

    def computed(self, v: Value) -> np.ndarray:
        """What a value contains, by the access maps of the nests that were added."""
        t = self.tensor(v)
        return results(self.builder.nodes, self.given)[t.name]

    @property
    def flops(self) -> float:
        """The FLOPs of all products."""
        total = 0.0
        for n in self.builder.nodes:
            if n.kind == "matmul":
                points = float(np.prod([int(d.size) for d in n.space]))  # type: ignore[call-overload]
                total += n.main.flops_per_point * points
        return total
