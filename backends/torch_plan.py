"""A plan run by PyTorch: ``plan.torch``.

Every rank of ``torch.distributed`` runs the plan's local program (``torch_local``) on its part. Parameters are stored
as DTensors in the layout in which the plan keeps their gradients and optimizer state. Optimizers, ``clip_grad_norm_``
and ``torch.distributed.checkpoint`` therefore work on them. DTensor itself computes nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING, Any

from pase.backends.torch_groups import AxisGroups, axis_groups
from pase.backends.torch_local import Body, RankWalk
from pase.backends.torch_moves import moved, part
from pase.backends.torch_values import RankValue
from pase.errors import PaseError
from pase.frontends.from_torch import TracedTorch
from pase.frontends.torch_blocks import micro
from pase.frontends.values import Value
from pase.ir import named, simplify
from pase.ir.blocks import Block, accumulated, kept_results, rematerialised
from pase.local.lower import program_of
from pase.local.parts import placement
from pase.local.types import Layout, LocalMove, LocalOp, LocalProgram, local_shape
from pase.machine import Mesh
from pase.pytree import Tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from pase.plan.types import PlanData

__all__ = ["ParallelModule", "TorchPlan", "TorchStep", "torch_plan"]


@dataclass(frozen=True, kw_only=True)
class TorchPlan:
    """The plan in PyTorch, as returned by ``plan.torch``."""

    traced: TracedTorch
    """The model on one micro-batch."""
    mesh: Mesh
    strategy: Mapping[str, Mapping[str, tuple[str, ...]]]
    accumulate: int = 1
    """Micro-batches per step. Gradients are summed over them; the loss is assumed to be a mean over the batch."""
    blocks: tuple[Block, ...] = ()
    """Nodes of the exported graph that backward recomputes, in addition to those that the model marks itself."""

    @cached_property
    def program(self) -> LocalProgram:
        """The local program: what each device computes and sends."""
        graph = accumulated(named(simplify(rematerialised(self.traced.graph, self.blocks))), self.accumulate)
        return program_of(graph, self.mesh, self.strategy)

    @cached_property
    def leaves(self) -> dict[str, str]:
        """Placeholder of the exported graph -> tensor, for those that the step reads."""
        found = self.traced.scope.values
        every = ((n, found.get(n)) for n in self.traced.scope.nodes if n.op == "placeholder")
        return {n.name: v.tensor.name for n, v in every if isinstance(v, Value) and v.tensor is not None}

    def groups(self, device: str) -> AxisGroups:
        """Process groups over all axes that something is sent along, over all ranks of ``torch.distributed``."""
        program = self.program
        needed = {m.axes for t in program.transfers for m in (*t.forward, *(t.backward or ())) if not m.free}
        needed |= {s.axes for op in program.ops for s in op.sent}
        return axis_groups(self.mesh, needed, device)

    def walk(self, groups: AxisGroups) -> RankWalk:
        return RankWalk(
            program=self.program,
            traced=self.traced,
            groups=groups,
            blocks=(*self.traced.marked, *self.blocks),
            kept=kept_results(self.traced.graph, self.blocks),
        )

    def parallelize(self, module: Module, *, device: torch.device | str | None = None) -> ParallelModule:
        """Shard a module's parameters in place, as the plan stores them, and return its step.

        Use it as ``loss = step(*batch); loss.backward()``. Each parameter becomes an ``nn.Parameter`` on a DTensor
        under its old path.

        module: the model that the plan was compiled from. The weights of rank 0 are used, whatever the other ranks
            have. If they are on the meta device, the result is too.
        device: where the parameters are stored and the step runs; by default, where the module's parameters are.

        Every rank must call it after ``torch.distributed.init_process_group``. Raises PaseError if the ranks or
        parameters are not those of the plan.
        """
        return ParallelModule.of(self, module, device)

    def train_step(
        self,
        module: Module,
        optimizer_class: Callable[..., Optimizer],
        *,
        device: torch.device | str | None = None,
        **settings: object,
    ) -> TorchStep:
        """step(*batch) -> loss, including the optimizer's update.

        Any PyTorch optimizer works; it is called as ``optimizer_class(module.parameters(), **settings)``. module,
        device: see ``parallelize``.
        """
        parallel = self.parallelize(module, device=device)
        trained = [p for p in module.parameters() if p.requires_grad]
        return TorchStep(parallel=parallel, optimizer=optimizer_class(trained, **settings))


@dataclass(kw_only=True)
class ParallelModule:
    """A module with sharded parameters, and its step on this rank. module: the user's own module, changed in place."""

    plan: TorchPlan
    module: Module
    walk: RankWalk
    device: torch.device
    seed: int
    steps: int = 0
    """How often the step ran. Random values depend on this and on ``seed``."""
    _stored: dict[str, Any] = field(default_factory=dict, repr=False)
    """Tensor -> the DTensor in the module."""

    @classmethod
    def of(cls, plan: TorchPlan, module: Module, device: torch.device | str | None) -> ParallelModule:
        import torch

        first = next(module.parameters(), None)
        at = torch.device(device if device is not None else "cpu" if first is None else first.device)
        groups = plan.groups("cpu" if at.type == "meta" else at.type)
        made = cls(plan=plan, module=module, walk=plan.walk(groups), device=at, seed=_agreed_seed(at))
        _Storage(parallel=made).replace()
        return made

    def __call__(self, *batch: Tree) -> Tensor:
        """The loss of a batch, the same on every rank; call ``backward`` on it.

        The tensors of the batch are whole, or this rank's part. For a step in micro-batches, see ``backward``.
        """
        if self.plan.accumulate > 1:
            raise PaseError(
                f"the plan has {self.plan.accumulate} micro-batches: use loss = step.backward(*batch)"
            )
        return self._loss(self._parameters(), self._inputs(batch, 0))

    def backward(self, *batch: Tree) -> Tensor:
        """The detached loss. The gradients of all micro-batches are added to the parameters' ``grad``."""
        k = self.plan.accumulate
        losses: list[Tensor] = []
        held = self._parameters()
        for i in range(k):
            loss = self._loss(held, self._inputs(batch, i)) / k
            loss.backward()
            losses.append(loss.detach())
        return sum(losses[1:], losses[0])

    def _loss(self, parameters: Mapping[str, RankValue], inputs: Mapping[str, RankValue]) -> Tensor:
        body = self.body({**parameters, **inputs})
        self.walk.run(body)
        (name,) = self.plan.traced.program.losses
        value = self._value(name)
        loss = self.walk.output(value, body)
        self._write_back(body)
        self.steps += 1
        return loss.reshape(())

    def body(self, leaves: Mapping[str, RankValue]) -> Body:
        """The initial state of a walk with these parameters and inputs."""
        program = self.plan.traced.program
        buffers = {
            node: self._buffer(path).to(self.device)
            for node, path in program.buffers.items()
            if path not in program.mutated.values()
        }
        return self.walk.body(leaves, buffers, self.device, self.seed + self.steps)

    def _value(self, node: str) -> Value:
        values = self.plan.traced.scope.values
        found = next(v for n, v in values.items() if n.name == node)
        assert isinstance(found, Value)
        return found

    def _buffer(self, path: str) -> Any:
        owner, _, name = path.rpartition(".")
        held = self.module.get_submodule(owner)._buffers
        if name in held:
            return held[name]
        # A tensor that the model has in addition to its buffers. The export lifted it out.
        return self.plan.traced.program.constants[path]

    def _parameters(self) -> dict[str, RankValue]:
        """Parameters in the layouts that the step reads. If a parameter's state is split further, it is gathered."""
        program, out = self.plan.program, {}
        for tensor, stored in self._stored.items():
            r = program.result(tensor)
            local = stored.to_local()
            if r.layout == r.gradient:
                out[tensor] = RankValue(array=local, tensor=tensor, shape=r.shape, layout=r.layout)
                continue
            whole = moved(local.detach(), list(self._gathers(tensor)), r.shape, "sum", self.walk.groups)
            out[tensor] = RankValue(
                array=whole, tensor=tensor, shape=r.shape, layout=r.layout, shadow=local, gradient=r.gradient
            )
        return out

    def _gathers(self, tensor: str) -> Iterator[LocalMove]:
        """The moves from the layout of a parameter's state to the layout in which the step reads it."""
        r, mesh = self.plan.program.result(tensor), self.plan.mesh
        now = r.gradient
        for s in self.plan.program.maker[tensor].sent:
            after = tuple(
                whole if axis in s.axes else state
                for axis, state, whole in zip(mesh.names, now, r.layout, strict=True)
            )
            yield LocalMove(kind="all_gather", axes=s.axes, before=now, after=after)
            now = after

    def _inputs(self, batch: Sequence[Tree], turn: int) -> dict[str, RankValue]:
        """This rank's part of a micro-batch. A micro-batch is every k-th example, so that each rank already has its
        part.
        """
        from torch.utils._pytree import tree_leaves

        k, leaves, program = self.plan.accumulate, self.plan.leaves, self.plan.program
        given, names = tree_leaves(tuple(batch)), list(self.plan.traced.program.inputs)
        if len(given) != len(names):
            raise PaseError(
                f"the plan was compiled for a batch of {len(names)} tensors, but got {len(given)}"
            )
        out = {}
        for x, name in zip(given, names, strict=True):
            if name not in leaves:
                continue
            r = program.result(leaves[name])
            x = x.to(self.device)
            here = local_shape(r.shape, r.layout, self.plan.mesh)
            if k > 1 and x.dim() and x.shape[0] in (k * r.shape[0], k * here[0]):
                x = x[turn::k]
            if tuple(x.shape) == r.shape:
                x = part(x, r.shape, r.layout, self.walk.groups)
            if tuple(x.shape) != here:
                raise PaseError(
                    f"'{name}' has shape {list(x.shape)}; the plan was compiled for "
                    f"{list(r.shape)}, and this rank has {list(here)} of it"
                )
            out[r.tensor] = RankValue(array=x, tensor=r.tensor, shape=r.shape, layout=r.layout)
        return out | self._kept()

    def _kept(self) -> dict[str, RankValue]:
        """Buffers that the step writes, with the values of the last step."""
        program, out = self.plan.traced.program, {}
        for node, path in program.buffers.items():
            if path in program.mutated.values() and node in self.plan.leaves:
                r = self.plan.program.result(self.plan.leaves[node])
                local = self._buffer(path).to_local()
                out[r.tensor] = RankValue(array=local, tensor=r.tensor, shape=r.shape, layout=r.layout)
        return out

    def _write_back(self, body: Body) -> None:
        """Store the next values of buffers."""
        program, leaves = self.plan.traced.program, self.plan.leaves
        tensor = {path: leaves[node] for node, path in program.buffers.items() if node in leaves}
        new = {
            path: self.walk.next_value(tensor[path], self._value(node), body)
            for node, path in program.mutated.items()
        }
        for path, x in new.items():
            self._buffer(path).to_local().copy_(x)
        nodes = {n.name: n for n in program.graph.graph.nodes}
        for node, path in program.counters.items():
            self._buffer(path).copy_(body.constants.of(nodes[node]))


@dataclass(kw_only=True)
class TorchStep:
    """A train step on this rank: step(*batch) -> loss."""

    parallel: ParallelModule
    optimizer: Optimizer

    @property
    def module(self) -> Module:
        """The user's module, with DTensors as parameters."""
        return self.parallel.module

    def __call__(self, *batch: Tree) -> Tensor:
        """Make one update. Returns the loss before it, the same on every rank. batch: see ``ParallelModule``."""
        self.optimizer.zero_grad()
        loss = self.parallel.backward(*batch)
        self.optimizer.step()
        return loss


def _agreed_seed(device: torch.device) -> int:
    """Rank 0's seed, on all ranks. Random ops must agree across the ranks."""
    import torch
    import torch.distributed as dist

    place = "cpu" if device.type == "meta" else device
    seed = torch.tensor([torch.initial_seed() % 2**31], dtype=torch.int64, device=place)
    dist.broadcast(seed, 0)
    return int(seed.item())


@dataclass(frozen=True, kw_only=True)
class _Storage:
    """How a module's tensors become DTensors. meshes: the meshes with another order of axes than the plan's."""

    parallel: ParallelModule
    meshes: dict[tuple[str, ...], DeviceMesh] = field(default_factory=dict)

    def replace(self) -> None:
        import torch
        from torch import nn

        p = self.parallel
        program, leaves = p.plan.traced.program, p.plan.leaves
        tensor = {path: leaves[n] for n, path in program.parameters.items() if n in leaves}
        made: dict[int, Parameter] = {}
        old: Tensor
        for path, old in list(p.module.named_parameters(remove_duplicate=False)):
            if id(old) not in made:
                self._check(path, old, tensor.get(path))
                new = self._distributed(old, tensor.get(path), gradient=True)
                made[id(old)] = nn.Parameter(new, requires_grad=old.requires_grad)
                if path in tensor:
                    p._stored[tensor[path]] = made[id(old)]
            self._owner(path)._parameters[path.rpartition(".")[2]] = made[id(old)]
        if missing := sorted(set(tensor.values()) - set(p._stored)):
            path = next(k for k, v in tensor.items() if v == missing[0])
            raise PaseError(f"the module has no parameter '{path}', so it is not the plan's model")
        kept = {path: leaves[n] for n, path in program.buffers.items() if n in leaves}
        for path, old in list(p.module.named_buffers()):
            if path in program.mutated.values():
                self._owner(path)._buffers[path.rpartition(".")[2]] = self._distributed(
                    old, kept[path], gradient=False
                )
            elif isinstance(old, torch.Tensor):
                self._owner(path)._buffers[path.rpartition(".")[2]] = old.to(p.device)

    def _owner(self, path: str) -> Module:
        return self.parallel.module.get_submodule(path.rpartition(".")[0])

    def _check(self, path: str, old: Tensor, tensor: str | None) -> None:
        if tensor is None:
            return
        shape = self.parallel.plan.program.result(tensor).shape
        if tuple(old.shape) != shape:
            raise PaseError(f"'{path}' has shape {list(old.shape)}; the plan was compiled for {list(shape)}")

    def _distributed(self, old: Tensor, tensor: str | None, *, gradient: bool) -> DTensor:
        """A DTensor with rank 0's values. A tensor that the step does not read is whole on every rank."""
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor, Replicate, Shard

        groups, mesh = self.parallel.walk.groups, self.parallel.plan.mesh
        layout: Layout = (None,) * len(mesh.names)
        if tensor is not None:
            r = self.parallel.plan.program.result(tensor)
            layout = r.gradient if gradient else r.layout
        x = old.detach().to(self.parallel.device)
        if x.device.type != "meta":
            dist.broadcast(x, 0)
        local = part(x, tuple(x.shape), layout, groups).contiguous()
        states = dict(zip(mesh.names, layout, strict=True))
        order = self._common or self._order([layout])
        assert order is not None  # one tensor alone is split in some order
        placements = [Shard(s[0]) if isinstance(s := states[a], tuple) else Replicate() for a in order]
        return DTensor.from_local(
            local.clone() if local.data_ptr() == x.data_ptr() else local,
            self._devices(order),
            placements,
            run_check=False,
            shape=x.shape,
            stride=x.contiguous().stride(),
        )

    @cached_property
    def _common(self) -> tuple[str, ...] | None:
        """An axis order in which every stored dim is split major to minor, as DTensor requires; None if there is
        none.
        """
        stored = (r for op in self._kept for r in op.results)
        return self._order([r.gradient for r in stored])

    @property
    def _kept(self) -> list[LocalOp]:
        """Parameters, and buffers that the step writes."""
        program = self.parallel.plan.program
        return [
            op
            for op in program.ops
            if op.op.kind == "parameter" or (op.op.kind == "input" and program.takers.get(op.op.eqn))
        ]

    def _order(self, layouts: Sequence[Layout]) -> tuple[str, ...] | None:
        mesh = self.parallel.plan.mesh
        sorter: TopologicalSorter[str] = TopologicalSorter({a: () for a in mesh.names})
        for layout in layouts:
            rank = 1 + max((s[0] for s in layout if isinstance(s, tuple)), default=-1)
            for axes in placement(layout, rank, mesh) or ():
                for major, minor in itertools.pairwise(axes):
                    sorter.add(minor, major)
        try:
            return _stable(sorter, mesh.names)
        except CycleError:
            return None

    def _devices(self, order: tuple[str, ...]) -> DeviceMesh:
        """PyTorch's mesh in a given order of its axes."""
        import torch
        from torch.distributed.device_mesh import DeviceMesh

        groups, mesh = self.parallel.walk.groups, self.parallel.plan.mesh
        if order == mesh.names:
            return groups.devices
        if order not in self.meshes:
            ranks = torch.arange(mesh.devices).reshape(mesh.sizes)
            ranks = ranks.permute([mesh.names.index(a) for a in order])
            self.meshes[order] = DeviceMesh(groups.devices.device_type, ranks, mesh_dim_names=order)
        return self.meshes[order]


def _stable(sorter: TopologicalSorter[str], names: Sequence[str]) -> tuple[str, ...]:
    """An order from the sorter; the mesh's own order if it is valid."""
    sorter.prepare()
    out: list[str] = []
    ready: set[str] = set()
    while sorter.is_active():
        ready |= set(sorter.get_ready())
        first = min(ready, key=names.index)
        ready.remove(first)
        sorter.done(first)
        out.append(first)
    return tuple(out)


def torch_plan(plan: PlanData) -> TorchPlan:
    """The plan in PyTorch's terms. Raises PaseError if it was loaded without its model, or if that is not a PyTorch
    module.
    """
    plan.check_emitted()
    traced = plan.traced
    if traced is None:
        raise PaseError(
            f"the plan for '{plan.model}' was loaded without its model: call plan.bind(module, *batch)"
        )
    if not isinstance(traced, TracedTorch):
        raise PaseError(
            f"'{plan.model}' was read by the {traced.frontend} frontend, so there is no PyTorch module "
            "to run: use plan.jax for a JAX function, and 'pase emit' for other frameworks"
        )
    return TorchPlan(
        traced=micro(traced, plan.accumulate),
        mesh=plan.mesh,
        strategy=plan.strategy,
        accumulate=plan.accumulate,
        blocks=plan.remat,
    )
