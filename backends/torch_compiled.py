"""A micro-batch's forward and backward on one rank as one graph, compiled by ``torch.compile``.

The walk over the exported graph is traced on fake tensors, with its collectives, which are PyTorch's functional ones.
What is compiled is therefore the local program that runs without compilation, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pase.errors import PaseError
from pase.frontends.torch_values import arguments
from pase.pytree import Tree

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor
    from torch.fx import GraphModule

__all__ = ["added", "compiled"]


def compiled(
    joint: Callable[..., Sequence[Tree]], given: Sequence[Tensor], backend: str, name: str
) -> Callable[..., Sequence[Tree]]:
    """``joint`` as one compiled graph. given: its arguments, of which shapes and dtypes count. name: the model's.

    Raises PaseError if it draws random values, or if there is no such backend.
    """
    import torch
    from torch.fx.experimental.proxy_tensor import make_fx

    if backend not in torch.compiler.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        raise PaseError(f"torch.compile has no backend '{backend}'; there are: {known}")
    graph = make_fx(joint, tracing_mode="fake")(*(x.detach() for x in given))
    _check(graph, name)
    return torch.compile(graph, backend=backend, fullgraph=True, dynamic=False)


def _check(graph: GraphModule, name: str) -> None:
    """Random values follow from the step and the place of an op, which a compiled graph does not know."""
    import torch

    for n in graph.graph.nodes:
        random = torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
        if random and arguments(n.target, n.args, n.kwargs).get("dropout_p") != 0.0:
            raise PaseError(
                f"'{name}' draws random values (dropout), and a compiled step would draw others on each rank: set its "
                f"dropout to 0, or use compile=False"
            )


def added(parameter: DTensor, gradient: Tensor) -> None:
    """Add this rank's part of a gradient to a parameter's ``grad``, which is its own: a sum hands one tensor to both of
    its operands, and what is broadcast has one number in many places."""
    import torch
    from torch.distributed.tensor import DTensor

    if parameter.grad is not None:
        parameter.grad.to_local().add_(gradient)  # type: ignore[attr-defined]
        return
    parameter.grad = DTensor.from_local(
        gradient.clone(memory_format=torch.contiguous_format),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
