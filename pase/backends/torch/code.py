"""One rank's program of a step as Python code to read, without ranks, process groups or data."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from pase.backends.torch.program import can_record, recorded
from pase.backends.torch.spmd.process_groups import AxisGroups
from pase.backends.torch.spmd.record import LAYER, ProgramCall, RecordedBlock
from pase.backends.torch.spmd.values import RankValue
from pase.errors import PaseError
from pase.local.types import LocalResult
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.fx import GraphModule

    from pase.backends.torch.parallel import ParallelModule
    from pase.backends.torch.plan import TorchPlan
    from pase.backends.torch.spmd.interpreter import Body

__all__ = ["groups_of_one", "rank_code"]

_WIDTH = 100


def groups_of_one(plan: TorchPlan, rank: int) -> AxisGroups:
    """The groups that a rank would be in. They have names, but send nothing. Raises PaseError if there is no such
    rank."""
    mesh = plan.mesh
    if not 0 <= rank < mesh.devices:
        raise PaseError(
            f"there is no rank {rank}: the plan is for {mesh.devices} devices",
            where="plan.torch, rank=...",
            fix=f"pass a number from 0 to {mesh.devices - 1}",
        )
    place: list[int] = []
    for size in reversed(mesh.sizes):
        rank, at = divmod(rank, size)
        place.insert(0, at)
    made = AxisGroups(mesh=mesh, devices=cast("DeviceMesh", None), place=tuple(place))
    for axes in {made.wide(a) for a in plan.sent_along} - {()}:
        made.names[axes] = "_".join(axes)
    return made


def rank_code(step: ParallelModule, rank: int) -> str:
    """The code of a rank's program; see ``TorchPlan.code``. step: with ``groups_of_one``."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    plan, walk, mesh = step.plan, step.walk, step.plan.mesh
    if not can_record(walk):
        raise PaseError(
            "the model has branches that depend on data, so its step walks the graph and has no code",
            where=f"model '{plan.program.name}'",
        )
    with FakeTensorMode():
        body = _body(step)
    program = recorded(walk, body, step.finished)
    place = ", ".join(f"{n} {i}" for n, i in zip(mesh.names, walk.groups.place, strict=True))
    head = f"# {plan.program.name}: rank {rank} of {mesh.devices} ({place}). Returns the loss"
    written = step.buffers.written
    tail = f", then the next values of {', '.join(written)}" if written else ""
    return "\n\n".join([*textwrap.wrap(head + tail, _WIDTH, subsequent_indent="# "), *_texts(program.module)])


def _body(step: ParallelModule) -> Body:
    """The inputs of a micro-batch on a rank, as fake tensors."""
    import torch

    plan, walk = step.plan, step.walk
    tensors, traced = plan.traced.graph.tensors, plan.traced.program

    def array(r: LocalResult, layout: AxisLayout, trained: bool) -> Tensor:
        dtype = getattr(torch, tensors[r.tensor].dtype)
        return torch.empty(layout.local_shape(r.shape, plan.mesh), dtype=dtype, requires_grad=trained)

    values = {}
    for node, tensor in plan.leaves.items():
        if tensor not in plan.program.maker:  # a buffer that is only read is a constant
            continue
        r, trained = plan.program.result(tensor), node in traced.parameters and tensors[tensor].needs_grad
        apart = node in traced.parameters and r.layout != r.gradient
        values[tensor] = RankValue(
            array=array(r, r.layout, trained and not apart),
            tensor=tensor,
            shape=r.shape,
            layout=r.layout,
            gradient_carrier=array(r, r.gradient, trained) if apart else None,
            gradient=r.gradient if apart else AxisLayout(),
        )
    nodes = {n.name: n for n in traced.graph.graph.nodes}
    split = set(traced.mutated.values())
    buffers = {
        name: torch.empty(nodes[name].meta["val"].shape, dtype=nodes[name].meta["val"].dtype)
        for name, path in traced.buffers.items()
        if path not in split
    }
    body = walk.body(values, buffers, step.device, 0)
    if walk.totals:
        walk.count(body)
    return body


def _texts(module: GraphModule) -> Iterator[str]:
    """The code of a module, and of the blocks that it calls."""
    yield _text(module, "forward")
    for n in module.graph.nodes:
        if isinstance(n.target, ProgramCall) and isinstance(n.target.run, RecordedBlock):
            yield _text(n.target.run.module, n.target.name)


def _text(module: GraphModule, name: str) -> str:
    """The code of one function, with the user's layers as comments."""
    layers = {n.name: n.meta.get(LAYER, "") for n in module.graph.nodes if n.op != "placeholder"}
    out, layer = [], ""
    for line in module.code.splitlines():
        if line.startswith("def forward("):
            line = line.replace("forward(self, ", f"{name}(").replace("forward(self)", f"{name}()")
            out += textwrap.wrap(line, _WIDTH, subsequent_indent=" " * 8)
            continue
        made = re.match(r" {4}(\w+) = ", line)
        now = layers.get(made[1], "") if made else ""
        if now and now != layer:
            out.append(f"    # {now}")
            layer = now
        if line.strip():
            out.append(re.sub(r";( +\w+ =)+ None$", "", line))
    return "\n".join(out)
