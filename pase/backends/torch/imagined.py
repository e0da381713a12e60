"""A rank's step whose tensors have shapes but no data. It needs no other rank, no GPU and no memory for data.

It is made and run under PyTorch's ``FakeTensorMode``. Collectives need only the names of their groups.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pase.backends.torch.gradients import LocalGradients
from pase.backends.torch.parallel import ParallelModule
from pase.backends.torch.spmd.process_groups import AxisGroups
from pase.pytree import Tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from pase.backends.torch.plan import TorchPlan

__all__ = ["ImaginedStep", "imagined_batch", "imagined_step"]


class _ImaginedGradients(LocalGradients):
    """The leaves are the parameters themselves, which get the gradients."""

    @contextlib.contextmanager
    def collected(self, stored: Mapping[str, Any]) -> Iterator[Mapping[str, Tensor]]:
        yield stored


@dataclass(kw_only=True)
class ImaginedStep(ParallelModule):
    """A step whose parameters (``stored``) and buffers have no data, and are no DTensors.

    held: path -> a buffer that was read.
    """

    held: dict[str, Tensor] = field(default_factory=dict)

    def buffer(self, path: str) -> Any:
        if path not in self.held:
            nodes = {n.name: n for n in self.plan.traced.program.graph.graph.nodes}
            every = self.plan.traced.program.buffers.items()
            like = next(nodes[name].meta["val"] for name, p in every if p == path)
            written = path in self.plan.traced.program.mutated.values()
            self.held[path] = _fake(self._written(path) if written else like.shape, like.dtype)
        return self.held[path]

    def local(self) -> dict[str, Tensor]:
        return dict(self.stored)

    def leaves(self, batch: Sequence[Tree]) -> list[Tensor]:
        return list(batch)  # the batch is already in the plan's form

    def _written(self, path: str) -> tuple[int, ...]:
        node = next(n for n, p in self.plan.traced.program.buffers.items() if p == path)
        r = self.plan.program.result(self.plan.leaves[node])
        return r.layout.local_shape(r.shape, self.plan.mesh)


def _fake(shape: Sequence[int], dtype: torch.dtype, requires_grad: bool = False) -> Tensor:
    import torch

    return torch.empty(tuple(shape), dtype=dtype, requires_grad=requires_grad)


def imagined_step(plan: TorchPlan, groups: AxisGroups) -> ImaginedStep:
    """The step of the rank of these groups. It must be called under ``FakeTensorMode``."""
    import torch

    step = ImaginedStep(
        plan=plan,
        module=torch.nn.Module(),
        walk=plan.walk(groups),
        device=torch.device("cpu"),
        seed=0,
        gradients=_ImaginedGradients(),
    )
    tensors = plan.traced.graph.tensors
    for node in plan.traced.program.parameters:
        if node in plan.leaves:
            r = plan.program.result(plan.leaves[node])
            t = tensors[r.tensor]
            shape = r.gradient.local_shape(r.shape, plan.mesh)
            step.stored[r.tensor] = _fake(shape, getattr(torch, t.dtype), t.needs_grad)
    return step


def imagined_batch(plan: TorchPlan) -> list[Tensor | None]:
    """This rank's part of a batch, which ``ImaginedStep.backward`` takes; None for an input that nothing reads."""
    import torch

    out: list[Tensor | None] = []
    for name in plan.traced.program.inputs:
        if name not in plan.leaves:
            out.append(None)
            continue
        r = plan.program.result(plan.leaves[name])
        first, *rest = r.layout.local_shape(r.shape, plan.mesh) or (1,)
        k = plan.accumulate if name in plan.cut else 1
        shape = (k * first, *rest) if r.shape else ()
        out.append(_fake(shape, getattr(torch, plan.traced.graph.tensors[r.tensor].dtype)))
    return out
