"""The buffers of a module in a step on one rank: their values before the step, and the values that it writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.backends.torch.spmd.values import RankValue

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    from pase.backends.torch.parallel import ParallelModule
    from pase.backends.torch.spmd.interpreter import Body
    from pase.frontends.torch.export.module import TorchProgram

__all__ = ["StepBuffers"]


@dataclass(frozen=True, kw_only=True)
class StepBuffers:
    """Reads and writes the buffers of a step.

    A buffer that depends on data (``mutated``) is a DTensor and flows through the plan. Every rank has all other
    buffers whole, and computes the next values of ``counters`` itself.

    copied: whether a buffer that the step reads and writes is copied first. It must be if the step writes it before
    backward, because autograd may have saved it, or if a later micro-batch reads its value before the step.
    """

    step: ParallelModule
    copied: bool = True

    @property
    def _program(self) -> TorchProgram:
        return self.step.plan.traced.program

    def constants(self) -> dict[str, Tensor]:
        """Placeholder -> a buffer that does not depend on data, with its value before the step."""
        split, counted = (set(x.values()) for x in (self._program.mutated, self._program.counters))
        out = {}
        for node, path in self._program.buffers.items():
            if path not in split:
                x = self.step.buffer(path).to(self.step.device)
                out[node] = x.clone() if self.copied and path in counted else x
        return out

    def entering(self) -> dict[str, RankValue]:
        """Tensor -> a buffer that depends on data, with its value from the previous step."""
        plan, split, out = self.step.plan, set(self._program.mutated.values()), {}
        for node, path in self._program.buffers.items():
            if path in split and node in plan.leaves:
                r = plan.program.result(plan.leaves[node])
                x = _local(self.step.buffer(path))
                x = x.clone() if self.copied else x
                out[r.tensor] = RankValue(array=x, tensor=r.tensor, shape=r.shape, layout=r.layout)
        return out

    @property
    def written(self) -> list[str]:
        """Paths of the buffers that the step writes."""
        return [*self._program.mutated.values(), *self._program.counters.values()]

    def leaving(self, body: Body) -> dict[str, Tensor]:
        """Path -> the next value of a buffer that the step writes."""
        program, leaves = self._program, self.step.plan.leaves
        tensor = {path: leaves[node] for node, path in program.buffers.items() if node in leaves}
        nodes = {n.name: n for n in program.graph.graph.nodes}
        split = {
            path: self.step.walk.next_value(tensor[path], self.step.value(node), body)
            for node, path in program.mutated.items()
        }
        return split | {path: body.constants.of(nodes[n]) for n, path in program.counters.items()}

    def write_back(self, new: Mapping[str, Tensor]) -> None:
        """Store the next values of buffers, all of a dtype in one op."""
        import torch

        held = {path: _local(self.step.buffer(path)) for path in new}
        storages = {x.untyped_storage()._cdata for x in held.values()}
        by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for path, x in new.items():
            if x.untyped_storage()._cdata in storages:  # a buffer's next value may be another's present one
                x = x.clone()
            by_dtype.setdefault(held[path].dtype, []).append((held[path], x))
        with torch.no_grad():
            for same in by_dtype.values():
                torch._foreach_copy_([into for into, _ in same], [x for _, x in same])


def _local(buffer: Tensor | DTensor) -> Tensor:
    """This rank's part of a buffer. ``to_local`` makes a view of it, which is an op, for autograd."""
    local = getattr(buffer, "_local_tensor", buffer)
    return buffer.to_local() if buffer.requires_grad and local is not buffer else local  # type: ignore[union-attr]
