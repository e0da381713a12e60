"""The forward and backward of a micro-batch on one rank, as one graph that ``torch.compile`` compiles.

The walk over the exported graph is traced on fake tensors. Its collectives are PyTorch's functional ones, which can be
traced. The compiled graph is therefore the same local program that runs without compilation. Random values follow from
the step's number; they are drawn before each run and passed to the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.rules import SEED, SEEDS_APART, seeded
from pase.errors import PaseError
from pase.frontends.torch.lower import place_of, source_of
from pase.frontends.torch.values import arguments
from pase.pytree import Tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.fx import GraphModule
    from torch.fx import Node as FxNode

__all__ = ["CompiledStep", "compiled"]


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A compiled step.

    name: the model's name.
    run: the compiled graph.
    draws: for each random tensor that ``run`` takes after its other arguments: the seed in the first step, and a
        function that draws it.

    A call raises PaseError if torch.compile cannot compile the graph.
    """

    name: str
    run: Callable[..., Sequence[Tree]]
    draws: Sequence[tuple[int, Callable[[], Tensor]]]
    device: torch.device

    def __call__(self, given: Sequence[Tensor], step: int) -> Sequence[Tree]:
        from torch._dynamo.exc import TorchDynamoException

        drawn = []
        for first, draw in self.draws:
            with seeded(first + step * SEEDS_APART, self.device):
                drawn.append(draw())
        try:
            return self.run(*given, *drawn)
        except TorchDynamoException as e:
            raise PaseError(
                f"torch.compile cannot compile the step: {' '.join(str(e).split())[:300]}",
                where=f"model '{self.name}'",
                fix="use compile=False",
            ) from e


def compiled(
    joint: Callable[..., Sequence[Tree]],
    given: Sequence[Tensor],
    backend: str,
    name: str,
    device: torch.device,
) -> CompiledStep:
    """Trace ``joint``, the first step, and compile it as one graph.

    given: example arguments; only their shapes and dtypes matter.
    name: the model's name.

    Raises PaseError if ``joint`` draws random values that do not come from ``seeded``, or if the backend does not
    exist.
    """
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    if backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise PaseError(
            f"torch.compile has no backend '{backend}'", where="compile", fix=f"use one of: {known}"
        )
    with preserve_node_meta():
        graph = make_fx(joint, tracing_mode="fake", _allow_non_fake_inputs=True)(*(x.detach() for x in given))
    draws = list(_taken_out(graph, name))
    run = torch.compile(graph, backend=backend, fullgraph=True, dynamic=False)
    return CompiledStep(name=name, run=run, draws=draws, device=device)


def _taken_out(graph: GraphModule, name: str) -> Iterator[tuple[int, Callable[[], Tensor]]]:
    """Replace the random values that a graph draws by arguments. (The graph would draw the same ones in each step.)"""
    import torch

    last = [n for n in graph.graph.nodes if n.op == "placeholder"][-1]
    found: dict[int, FxNode] = {}
    for n in list(graph.graph.nodes):
        random = torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
        if not random or arguments(n.target, n.args, n.kwargs).get("dropout_p") == 0.0:
            continue
        seed = (n.meta.get("custom") or {}).get(SEED)
        if n.all_input_nodes or seed is None:
            raise PaseError(
                "the op draws random values internally (such as dropout in attention), so a compiled step would draw "
                "other values on each rank",
                where=place_of(n, name, source_of(n).place),
                fix="set its dropout to 0, or use compile=False",
            )
        if seed not in found:  # a recomputation draws the same values again
            with graph.graph.inserting_after(last):
                last = found[seed] = graph.graph.placeholder(f"drawn_{n.name}")
            yield seed, partial(n.target, *n.args, **n.kwargs)
        n.replace_all_uses_with(found[seed])
        graph.graph.erase_node(n)
    for n in graph.graph.nodes:  # the annotations of recomputed regions have had their effect
        n.meta = {"val": n.meta["val"]} if "val" in n.meta else {}
    graph.recompile()
