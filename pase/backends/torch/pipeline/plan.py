"""A pipelined plan that PyTorch runs: each rank runs its stages in the order of the schedule's list of actions.

A stage is a part of the exported graph of a micro-batch (``stages``). It is walked like a plan without stages
(``pase.backends.torch.spmd.interpreter``): on the mesh of the ranks that have the stage, by the local program of the
stage's own strategy. Each rank sends activations and their gradients to the rank with the same place in the
neighbouring stage's mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Never

from pase.backends.torch.check_plans import TorchAgainst, unsharded_copy
from pase.backends.torch.pipeline.run import PipelinedModule
from pase.backends.torch.pipeline.stages import TorchStage, stages_of
from pase.backends.torch.plan import TorchPlan, bucket_bytes, traced_by_torch
from pase.backends.torch.spmd.process_groups import AxisGroups, axis_groups
from pase.backends.torch.spmd.values import steps_from
from pase.backends.torch.stepper import TorchStep
from pase.errors import PaseError
from pase.frontends.torch.blocks import micro
from pase.frontends.torch.frontend import TracedTorch
from pase.local.lower import between
from pase.local.types import LocalReshardStep, LocalResult
from pase.pipeline.types import Schedule
from pase.plan.pipeline import PipelinePlan
from pase.pytree import Tree
from pase.tables.axis_layout import AxisLayout
from pase.tables.layouts import concrete_size

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from pase.backends.torch.check import Say
    from pase.plan.gradient_check import GradientCheck
    from pase.plan.types import PlanData

__all__ = ["TorchPipeline", "torch_pipeline"]


@dataclass(frozen=True, kw_only=True)
class TorchPipeline:
    """A pipelined plan in PyTorch, as returned by ``plan.torch``."""

    pipeline: PipelinePlan
    splits: tuple[TorchPlan, ...]
    """The model on one micro-batch, under each of the pipeline's strategies, on the mesh of one stage."""

    @property
    def traced(self) -> TracedTorch:
        return self.splits[0].traced

    @cached_property
    def schedule(self) -> Schedule:
        return self.pipeline.actions()

    @cached_property
    def stages(self) -> tuple[TorchStage, ...]:
        program = self.splits[0].program
        return stages_of(self.traced, program, self.pipeline, [self._returned])

    @property
    def _returned(self) -> str:
        """The tensor that the loss is a view of."""
        outputs, (loss,) = self.splits[0].program.outputs, self.traced.program.losses
        found = next(v for n, v in self.traced.scope.values.items() if n.name == loss)
        return next(t for t, _ in steps_from(found) if t in outputs)

    def split(self, stage: int) -> TorchPlan:
        """The plan that a stage runs by."""
        return self.splits[self.pipeline.stages[stage].strategy]

    def stage_result(self, stage: int, tensor: str) -> LocalResult:
        """A tensor as the stage's own program computes it."""
        return self.split(stage).program.result(tensor)

    @cached_property
    def stage_of_parameter(self) -> dict[str, int]:
        """Parameter -> the stage that stores it, which is the first one that reads it. Other stages that read it get it
        from there, and send their gradients there."""
        parameters = {op.results[0].tensor for op in self.splits[0].program.ops if op.op.kind == "parameter"}
        found: dict[str, int] = {}
        for k, stage in enumerate(self.stages):
            for t in sorted(stage.reads & parameters):
                found.setdefault(t, k)
        return found

    def trains(self, tensor: str) -> bool:
        """Whether a parameter gets a gradient."""
        return self.traced.graph.tensors[tensor].path not in self.traced.program.frozen

    def comes_back(self, tensor: str) -> bool:
        """Whether the gradient of an activation is sent to the previous stage."""
        return self.traced.graph.tensors[tensor].needs_grad

    @cached_property
    def borrowed(self) -> tuple[tuple[str, int], ...]:
        """(parameter, stage) for each stage that reads a parameter that another stage stores."""
        every = (
            (t, k)
            for k, stage in enumerate(self.stages)
            for t in sorted(stage.reads & set(self.stage_of_parameter))
        )
        return tuple((t, k) for t, k in every if self.stage_of_parameter[t] != k)

    def exchanged(self, k: int) -> Iterator[tuple[LocalReshardStep, int]]:
        """A stage's reshard steps from other stages' layouts to its own, and how often each runs in a step."""
        many = self.pipeline.micro_batches
        for t in self.stages[k].enters:
            yield from self._between(
                t, self.stage_result(k - 1, t).layout, self.stage_result(k, t).layout, many
            )
        for t in filter(self.comes_back, self.stages[k].leaves):
            yield from self._between(
                t, self.stage_result(k + 1, t).gradient, self.stage_result(k, t).gradient, many
            )
        for t in (t for t, reader in self.borrowed if reader == k):
            here, stored = self.stage_result(k, t), self.stage_result(self.stage_of_parameter[t], t).gradient
            for layout in dict.fromkeys((here.gradient, here.layout)):
                yield from self._between(t, stored, layout, 1)
            if self.trains(t):
                yield from self._between(t, here.gradient, stored, 1)

    def _between(
        self, t: str, have: AxisLayout, want: AxisLayout, times: int
    ) -> Iterator[tuple[LocalReshardStep, int]]:
        nbytes = concrete_size(self.traced.graph.tensors[t].nbytes, t)
        yield from ((m, times) for m in between(have, want, self.splits[0].mesh, nbytes) if not m.free)

    def groups(self, device: str) -> AxisGroups:
        """Process groups for all collectives of all stages."""
        needed = {axes for split in self.splits for axes in split.sent_along}
        needed |= {m.axes for k in range(len(self.stages)) for m, _ in self.exchanged(k)}
        return axis_groups(self.splits[0].mesh, needed, device, self.pipeline.degree)

    def code(self, rank: int = 0) -> Never:
        """Raises PaseError: a rank in stages runs several programs."""
        raise PaseError(
            "a rank in stages runs several programs",
            where="plan.torch.code",
            fix="compile with pipeline='none' to read a rank's program",
        )

    def memory(
        self, rank: int = 0, *, optimizer: Callable[[Iterable[Tensor]], Optimizer] | None = None
    ) -> Never:
        """Raises PaseError: steps in stages are not followed on fake tensors."""
        raise PaseError(
            "steps in stages are not followed on fake tensors",
            where="plan.torch.memory",
            fix="read plan.memory, the plan's own account, or compile with pipeline='none'",
        )

    def parallelize(
        self, module: Module, *, device: torch.device | str | None = None, compile: bool | str = False
    ) -> PipelinedModule:
        """Keep this rank's stages of the module, shard their parameters as the plan stores them, and return the step:
        ``loss = step.backward(*batch)``.

        The module is changed in place; what this rank does not have becomes None. Every rank must pass the same batch,
        or its own part of it. Stages are not compiled.

        module, device: see ``TorchPlan.parallelize``.
        """
        if compile:
            raise PaseError(
                "the stages of a pipeline cannot be compiled yet", where="compile", fix="use compile=False"
            )
        return PipelinedModule.of(self, module, device)

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
        """Returns ``step(*batch) -> loss``, which includes the optimizer's update of this rank's parameters. See
        ``TorchPlan.train_step``."""
        parallel = self.parallelize(module, device=device, compile=compile)
        trained = [p for p in module.parameters() if p.requires_grad]
        return TorchStep(parallel=parallel, optimizer=optimizer_class(trained, **settings), check=check)

    def check(
        self,
        module: Module,
        *batch: Tree,
        device: torch.device | str | None = None,
        against: TorchAgainst = "auto",
        seed: int = 0,
        most_lines: int = 50,
        progress: Say | None = None,
    ) -> GradientCheck:
        """See ``TorchPlan.check``. There is no unsharded module to compare with."""
        own = self.parallelize(unsharded_copy(module), device=device)
        return own.check(*batch, against=against, seed=seed, most_lines=most_lines, progress=progress)


def torch_pipeline(plan: PlanData) -> TorchPipeline:
    """A pipelined plan as a ``TorchPipeline``. Raises PaseError if its stages cannot be run."""
    p = plan.pipeline
    assert p is not None
    traced = traced_by_torch(plan)
    name = traced.graph.name
    if p.replicas or p.groups:
        raise PaseError(
            "the plan has ranks on unequal groups of devices, which plan.torch does not run yet",
            where=f"model '{name}'",
            fix="compile for stages on equal groups of devices",
        )
    part = micro(traced, p.micro_batches)
    if written := (*part.program.mutated.values(), *part.program.counters.values()):
        raise PaseError(
            f"the model writes the buffer '{written[0]}', which stages cannot do yet",
            where=f"model '{name}'",
            fix="compile with pipeline='none'",
        )
    weights = {s.strategy: s.weights for s in p.stages}
    splits = tuple(
        TorchPlan(
            traced=part,
            whole=traced if p.micro_batches > 1 else None,
            mesh=plan.mesh,
            strategy=strategy,
            accumulate=p.micro_batches,
            blocks=p.recomputed_blocks(i, plan.remat),
            hoisted="all" if weights.get(i) == "hoisted" else "none",
            gathers_again=weights.get(i) == "each",
            bucket_bytes=bucket_bytes(plan),
        )
        for i, strategy in enumerate(p.strategies)
    )
    return TorchPipeline(pipeline=p, splits=splits)
