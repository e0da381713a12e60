"""A plan that PyTorch runs: ``plan.torch``.

Every rank of ``torch.distributed`` runs the plan's local program (``pase.backends.torch.spmd.interpreter``) on its
shards. Parameters are stored as DTensors, in the layout in which the plan keeps their gradients and optimizer state.
Optimizers, ``clip_grad_norm_`` and ``torch.distributed.checkpoint`` therefore work on them. DTensor itself computes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from pase.backends.torch.check_plans import TorchAgainst, unsharded_copy
from pase.backends.torch.code import groups_of_one, rank_code
from pase.backends.torch.parallel import ParallelModule, agreed_seed
from pase.backends.torch.spmd.interpreter import RankWalk
from pase.backends.torch.spmd.process_groups import AxisGroups, axis_groups
from pase.backends.torch.stepper import TorchStep
from pase.frontends.common.micro_batches import step_sums
from pase.frontends.common.values import Value
from pase.frontends.torch.blocks import micro
from pase.frontends.torch.frontend import TracedTorch
from pase.ir import Graph, named, simplify
from pase.ir.batch_sums import BatchSums
from pase.ir.blocks import Block, Hoisted, accumulated, rematerialised
from pase.ir.recompute import gathering_again
from pase.local.bucket_messages import ProgramSchedule
from pase.local.idle import without_idle_axes
from pase.local.lower import program_of
from pase.local.types import LocalProgram
from pase.local.verify import verify_program
from pase.machine import BUCKET_BYTES, Mesh
from pase.memory.account import Memory
from pase.pytree import Tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from pase.backends.torch.check import Say
    from pase.backends.torch.memory import TorchMemory
    from pase.plan.gradient_check import GradientCheck
    from pase.plan.types import PlanData

__all__ = [
    "ParallelModule",
    "TorchPlan",
    "TorchStep",
    "agreed_seed",
    "bucket_bytes",
    "torch_plan",
    "traced_by_torch",
]


@dataclass(frozen=True, kw_only=True)
class TorchPlan:
    """The plan in PyTorch, as returned by ``plan.torch``."""

    traced: TracedTorch
    """The model on one micro-batch."""
    mesh: Mesh
    strategy: Mapping[str, Mapping[str, tuple[str, ...]]]
    accumulate: int = 1
    """Micro-batches per step. Gradients are summed over them."""
    whole: TracedTorch | None = None
    """The model on the whole batch, if the step has several micro-batches."""
    schedule: ProgramSchedule | None = None
    """Which gradients are sent together."""
    blocks: tuple[Block, ...] = ()
    """Nodes of the exported graph that backward recomputes, in addition to those that the model itself marks."""
    hoisted: Hoisted = "none"
    """Which transfers of parameters a pipeline stage runs once per step."""
    gathers_again: bool = False
    """Whether backward gathers parameters again, instead of keeping them gathered from forward on."""
    optimizer: str = "adam"
    account: Memory | None = None
    """What the plan predicts for the memory of a device."""
    bucket_bytes: float = BUCKET_BYTES
    """The size of the messages in which gradients are sent that ``schedule`` does not mention."""

    @cached_property
    def program(self) -> LocalProgram:
        """The local program: what each device computes and sends."""
        graph = accumulated(self._graph, self.accumulate, self.hoisted)
        made = program_of(gathering_again(graph) if self.gathers_again else graph, self.mesh, self.strategy)
        made = made if self.schedule is None else self.schedule.placed(made)
        verify_program(made)
        return without_idle_axes(made)

    @cached_property
    def _graph(self) -> Graph:
        return named(simplify(rematerialised(self.traced.graph, self.blocks)))

    @cached_property
    def sums(self) -> BatchSums:
        """The values that the micro-batches of a step pass on to each other."""
        if self.accumulate == 1:
            return BatchSums(totals={}, outputs=dict.fromkeys(self._graph.outputs, 0), counting=frozenset())
        assert self.whole is not None
        return step_sums(self.whole, self.accumulate)

    @cached_property
    def leaves(self) -> dict[str, str]:
        """Placeholder of the exported graph -> its tensor, for placeholders that the step reads."""
        found = self.traced.scope.values
        every = ((n, found.get(n)) for n in self.traced.scope.nodes if n.op == "placeholder")
        return {n.name: v.tensor.name for n, v in every if isinstance(v, Value) and v.tensor is not None}

    @property
    def sent_along(self) -> set[tuple[str, ...]]:
        """The sets of mesh axes over which a collective runs."""
        program = self.program
        needed = {m.axes for t in program.transfers for m in (*t.forward, *(t.backward or ())) if not m.free}
        return needed | {s.axes for op in program.ops for s in op.sent}

    @cached_property
    def cut(self) -> frozenset[str]:
        """The inputs that are split into micro-batches."""
        from torch.utils._pytree import tree_leaves

        if self.whole is None:
            return frozenset()
        both = (tree_leaves(t.batch) for t in (self.whole, self.traced))
        sizes = zip(self.traced.program.inputs, *both, strict=True)
        return frozenset(
            name for name, a, b in sizes if getattr(a, "shape", None) != getattr(b, "shape", None)
        )

    def micro_batch(self, batch: Sequence[Tree], turn: int) -> Tree:
        """A micro-batch of a whole batch: every k-th example, starting at example ``turn``."""
        from torch.utils._pytree import tree_flatten, tree_unflatten

        leaves, form = tree_flatten(tuple(batch))
        names = self.traced.program.inputs
        mine = [
            x[turn :: self.accumulate] if n in self.cut else x for n, x in zip(names, leaves, strict=True)
        ]
        return tree_unflatten(mine, form)

    def groups(self, device: str) -> AxisGroups:
        """The process groups that the program needs, over all ranks of ``torch.distributed``."""
        return axis_groups(self.mesh, self.sent_along, device)

    def walk(self, groups: AxisGroups) -> RankWalk:
        return RankWalk(
            program=self.program,
            traced=self.traced,
            groups=groups,
            blocks=(*self.traced.marked, *self.blocks),
            counting=self.sums.counting,
            totals=frozenset(self.sums.totals),
            scaled={t: tuple(float(self.accumulate**p) for p in ps) for t, ps in self.sums.scaled.items()},
            bucket_bytes=self.bucket_bytes,
        )

    def code(self, rank: int = 0) -> str:
        """The program that a rank runs for each micro-batch, as Python code: PyTorch's ops on the rank's parts, with
        the user's layers as comments. Functions ``plan_...`` are the plan's: reshards of a value and, in backward, of
        its gradient, recomputed blocks, and random values. It needs no ranks and no memory for data.

        Raises PaseError if there is no such rank, or if the model has branches that depend on data.
        """
        import torch

        walk = self.walk(groups_of_one(self, rank))
        module, device = torch.nn.Module(), torch.device("cpu")
        return rank_code(ParallelModule(plan=self, module=module, walk=walk, device=device, seed=0), rank)

    def memory(
        self, rank: int = 0, *, optimizer: Callable[[Iterable[Tensor]], Optimizer] | None = None
    ) -> TorchMemory:
        """The peak memory of a rank's step in eager mode, by kind, beside the plan's account. print() shows both.

        The step and the optimizer's update run on fake tensors, with PyTorch's own autograd deciding what is kept. It
        needs no ranks, no GPU and no memory for data. ``pase.backends.torch.memory`` says what it cannot see.

        optimizer: called with the rank's parameters; by default, ``torch.optim``'s optimizer of the plan's name.

        Raises PaseError if there is no such rank, or if the model has branches that depend on data.
        """
        from pase.backends.torch.memory import rank_memory

        return rank_memory(self, rank, optimizer)

    def parallelize(
        self, module: Module, *, device: torch.device | str | None = None, compile: bool | str = False
    ) -> ParallelModule:
        """Shard a module's parameters in place, as the plan stores them, and return its step.

        Use it as ``loss = step(*batch); loss.backward()``. Each parameter becomes an ``nn.Parameter`` that holds a
        DTensor, under the same path.

        module: the model that the plan was compiled from. Rank 0's weights are used on all ranks. If they are on the
            meta device, the result is too.
        device: where the parameters are stored and the step runs; by default, the device of the module's parameters.
            If the module is on the meta device and this is another device, the parameters have no values until you
            load some.
        compile: whether ``step.backward`` runs the forward and backward of a micro-batch as one graph compiled by
            ``torch.compile``. True uses its default backend; a string names another one.

        Every rank must call it after ``torch.distributed.init_process_group``. Raises PaseError if the ranks or
        parameters do not match the plan.
        """
        return ParallelModule.of(self, module, device, compile)

    def train_step(
        self,
        module: Module,
        optimizer_class: Callable[..., Optimizer],
        *,
        device: torch.device | str | None = None,
        compile: bool | str = False,
        check: bool = False,
        **settings: object,
    ) -> TorchStep:
        """Returns ``step(*batch) -> loss``, which includes the optimizer's update.

        Any PyTorch optimizer works; it is called as ``optimizer_class(module.parameters(), **settings)``.

        module, device, compile: see ``parallelize``.
        check: whether the first call first runs ``check`` on its batch, and raises PaseError if a gradient is off.
        """
        parallel = self.parallelize(module, device=device, compile=compile)
        trained = [p for p in module.parameters() if p.requires_grad]
        return TorchStep(parallel=parallel, optimizer=optimizer_class(trained, **settings), check=check)

    def check(
        self,
        module: Module,
        *batch: Tree,
        device: torch.device | str | None = None,
        compile: bool | str = False,
        against: TorchAgainst = "auto",
        seed: int = 0,
        most_lines: int = 50,
        progress: Say | None = None,
    ) -> GradientCheck:
        """Runs ``ParallelModule.check`` on a copy of the module, which stays as it is. Every rank must call it.

        device, compile: see ``parallelize``.
        """
        own = self.parallelize(unsharded_copy(module), device=device, compile=compile)
        return own.check(*batch, against=against, seed=seed, most_lines=most_lines, progress=progress)


def traced_by_torch(plan: PlanData) -> TracedTorch:
    """The traced model. Raises PaseError if the plan was loaded without it, or if it is not a PyTorch module."""
    return plan.traced_as(
        TracedTorch,
        "module, *batch",
        "there is no PyTorch module to run: use plan.jax for a JAX function, and 'pase emit' for other frameworks",
    )


def torch_plan(plan: PlanData) -> TorchPlan:
    """The plan as a ``TorchPlan``. Raises PaseError if it has no PyTorch module, or is pipelined.

    For pipelined plans, see ``pase.backends.torch.pipeline.plan``.
    """
    plan.check_emitted()
    traced = traced_by_torch(plan)
    return TorchPlan(
        traced=micro(traced, plan.accumulate),
        whole=traced if plan.accumulate > 1 else None,
        mesh=plan.mesh,
        strategy=plan.strategy,
        accumulate=plan.accumulate,
        blocks=plan.remat,
        gathers_again=plan.gathers_again,
        schedule=ProgramSchedule.of(plan),
        optimizer=plan.optimizer,
        account=plan.memory,
        bucket_bytes=bucket_bytes(plan),
    )


def bucket_bytes(plan: PlanData) -> float:
    """The bytes of a message, as the machine file has them. 0 says that XLA's compiler for CPUs joins nothing, which
    does not bind PyTorch."""
    return plan.bucket_bytes or BUCKET_BYTES
