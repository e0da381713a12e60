"""A PyTorch module whose parameters are sharded as a plan says, and its step on this rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from pase.backends.torch.batch import leaves_as_compiled
from pase.backends.torch.buffers import StepBuffers
from pase.backends.torch.check_plans import TorchAgainst, check_parallel
from pase.backends.torch.clip import clipped
from pase.backends.torch.compiled import CompiledStep, compiled
from pase.backends.torch.evaluation import evaluated
from pase.backends.torch.gradients import LocalGradients, added
from pase.backends.torch.program import RecordedPrograms, can_record
from pase.backends.torch.spmd.gathered_again import TakesGathered
from pase.backends.torch.spmd.interpreter import Body, RankWalk
from pase.backends.torch.spmd.values import RankValue
from pase.backends.torch.storage import Storage, lifted_of, shared_out
from pase.errors import PaseError
from pase.frontends.common.values import Value
from pase.frontends.torch.export.functional import refuse_autocast
from pase.local.lower import between
from pase.local.reshard import part, resharded
from pase.local.types import LocalReshardStep
from pase.plan.gradient_lines import CheckLines
from pase.pytree import Tree
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from pase.backends.torch.check import Say
    from pase.backends.torch.plan import TorchPlan
    from pase.plan.gradient_check import GradientCheck

__all__ = ["ParallelModule", "agreed_seed"]


@dataclass(kw_only=True)
class ParallelModule:
    """A module with sharded parameters, and its step on this rank.

    module: the user's own module, changed in place.
    """

    plan: TorchPlan
    module: Module
    walk: RankWalk
    device: torch.device
    seed: int
    steps: int = 0
    """The number of steps that have run. Random values depend on it and on ``seed``."""
    compiler: str | None = None
    """The backend of ``torch.compile`` that ``backward`` uses; None: ops run one by one."""
    gradients: LocalGradients = field(default_factory=LocalGradients, repr=False)
    """What autograd sees of the parameters in ``backward``."""
    _graph: CompiledStep | None = field(default=None, repr=False)
    """The compiled step, once there is one."""
    stored: dict[str, Any] = field(default_factory=dict, repr=False)
    """Tensor -> the DTensor in the module."""
    lifted: dict[str, Tensor] = field(default_factory=dict, repr=False)
    """Path -> a tensor that the model holds and that is neither a parameter nor a buffer."""
    _same_settings: Callable[[], bool] | None = field(default=None, repr=False)
    """Returns whether the module's Python state has the same objects as when it was last compared in full."""

    @classmethod
    def of(
        cls, plan: TorchPlan, module: Module, device: torch.device | str | None, compile: bool | str
    ) -> ParallelModule:
        import torch

        if compile and any(s.kind == "branch" for op in plan.program.ops for s in op.op.scope):
            raise PaseError(
                "the model has branches that depend on data, but a compiled step would always take the same branch",
                where=f"model '{plan.program.name}'",
                fix="use compile=False",
            )

        first = next(module.parameters(), None)
        at = torch.device(device if device is not None else "cpu" if first is None else first.device)
        groups = plan.groups("cpu" if at.type == "meta" else at.type)
        made = cls(
            plan=plan,
            module=module,
            walk=plan.walk(groups),
            device=at,
            seed=agreed_seed(at),
            compiler=("inductor" if compile is True else compile) or None,
            lifted=lifted_of(plan.traced.program, at),
        )
        storage = Storage(parallel=made)
        shared_out(storage, lambda tensor: storage)
        return made

    def __call__(self, *batch: Tree) -> Tensor:
        """The loss of a batch, the same on every rank. Call ``backward`` on it.

        The tensors of the batch may be whole or this rank's parts. A plan with micro-batches needs ``backward``.
        """
        if self.plan.accumulate > 1:
            raise PaseError(
                f"the plan has {self.plan.accumulate} micro-batches",
                where="step(*batch)",
                fix="use loss = step.backward(*batch)",
            )
        refuse_autocast(f"the step of '{self.plan.program.name}' runs")
        if self.compiler is not None:
            raise PaseError(
                "a compiled step runs forward and backward together",
                where="step(*batch)",
                fix="use loss = step.backward(*batch)",
            )
        (body,) = self.bodies(batch, self.buffers)
        loss, new = self._loss(self.parameters(self.local()), body, self.buffers, self._again())
        self.buffers.write_back(new)
        return loss

    def backward(self, *batch: Tree) -> Tensor:
        """Returns the detached loss. Adds the gradients of all micro-batches to the parameters' ``grad``."""
        refuse_autocast(f"the step of '{self.plan.program.name}' runs")
        if self.compiler is not None:
            losses = [self._at_once(body) for body in self.bodies(batch, self.buffers)]
            return sum(losses[1:], losses[0])
        losses = []
        with self.gradients.collected(self.stored) as leaves, self.walk.sending.opened():
            held = self.parameters(leaves)
            buffers = StepBuffers(step=self, copied=self.plan.accumulate > 1)
            for body in self.bodies(batch, buffers):
                again = self._again()
                loss, new = self._loss(held, body, buffers, again)
                loss = loss if self.share == 1.0 else loss * self.share
                with again.backward():
                    loss.backward()
                self.walk.sending.finish()
                buffers.write_back(new)
                losses.append(loss.detach())
        return sum(losses[1:], losses[0])

    def check(
        self,
        *batch: Tree,
        against: TorchAgainst = "auto",
        seed: int = 0,
        most_lines: int = 50,
        progress: Say | None = None,
    ) -> GradientCheck:
        """Check that this step computes the gradient of the model's loss (``docs/how-to/check.md``). Every rank must
        call it.

        Along lines in parameter space that start near the present values, the loss must change by the integral of the
        gradient. In addition, the gradients are compared with those of the unsharded module on rank 0, if it has
        enough memory. Afterwards, parameters, buffers, gradients and random state have their previous values.

        against: what to compare gradients with.
        seed: the seed of the lines.
        most_lines: the maximum number of lines, each of eight steps. Parameters that are not reached are undecided.
        progress: called with a line of text before each part of the work.
        """
        lines = CheckLines(seed=seed, most_lines=most_lines, say=progress)
        return check_parallel(self, batch, against, lines)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` of all gradients. Every rank must call it."""
        return clipped(self.module.parameters(), max_norm, norm_type, lambda x: x)

    def evaluating(self) -> AbstractContextManager[Module]:
        """A context in which the module can be called: ``with step.evaluating() as module: logits = module(x)``.

        The module is in evaluation mode, without gradients, and its parameters are whole on every rank, which takes
        memory for all of them. Each rank evaluates the batch that it passes. Every rank must enter the context.
        Afterwards the module is sharded and in its former mode. Raises PaseError if forward writes a parameter or a
        buffer.
        """
        return evaluated(self.module, self.plan.program.name)

    @property
    def share(self) -> float:
        """The factor of a micro-batch's loss: 1 if the loss is a sum over the batch, 1/k if it is a mean."""
        (power,) = self.plan.sums.outputs.values()
        return float(self.plan.accumulate**-power)

    def bodies(self, batch: Sequence[Tree], buffers: StepBuffers) -> Iterator[Body]:
        """The state of each micro-batch before its walk, with its inputs and the sums over all micro-batches."""
        k, totals, given = self.plan.accumulate, self.walk.totals, self.leaves(batch)
        first, constants = self.seed + self.steps, buffers.constants()
        bodies = (self.walk.body(self._inputs(given, i), constants, self.device, first + i) for i in range(k))
        if not totals:
            yield from bodies
            return
        every = list(bodies)
        shares = [self.walk.count(body) for body in every]
        for t in sorted(totals):
            power = self.plan.sums.totals[t]
            total = sum((s[t] for s in shares[1:]), shares[0][t])
            whole = total * k**-power if power else total
            for body in every:
                body.values[t] = replace(body.values[t], array=whole)
        yield from every

    def _loss(
        self,
        parameters: Mapping[str, RankValue],
        body: Body,
        buffers: StepBuffers,
        again: TakesGathered,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch, and path -> the next value of a buffer that the step writes. again: takes the
        parameters that backward gathers again."""
        body.values.update({**parameters, **buffers.entering()})
        with again.forward():
            loss, *new = self.results(body)
        self.steps += 1
        return loss, dict(zip(buffers.written, new, strict=True))

    def _again(self) -> TakesGathered:
        """What backward gathers again of a micro-batch whose ops run one by one."""
        return self.walk.freed() if can_record(self.walk) else self.walk.again()

    def results(self, body: Body) -> Sequence[Tensor]:
        """The loss of a micro-batch, and the next values of the buffers that the step writes."""
        if can_record(self.walk):
            return self.programs.run(body, self.finished)
        return self.walked(body)

    def walked(self, body: Body) -> Sequence[Tensor]:
        """``results`` of a walk that is not recorded."""
        self.walk.run(body)
        return self.finished(body)

    def finished(self, body: Body) -> Sequence[Tensor]:
        """``results`` from a body after the walk."""
        (name,) = self.plan.traced.program.losses
        loss = self.walk.output(self.value(name), body).reshape(())
        return loss, *self.buffers.leaving(body).values()

    @cached_property
    def programs(self) -> RecordedPrograms:
        """The recorded programs of this rank."""
        return RecordedPrograms(walk=self.walk)

    @property
    def buffers(self) -> StepBuffers:
        return StepBuffers(step=self)

    def _at_once(self, before: Body) -> Tensor:
        """The loss of a micro-batch, times its share of the whole. Adds the gradients to the parameters' ``grad``."""
        import torch

        before.values.update(self.buffers.entering())
        constants, stored = self.buffers.constants(), self.local()
        held_values, sent = before.values, before.kept.made
        given = [
            *stored.values(),
            *(v.array for v in held_values.values()),
            *sent.values(),
            *constants.values(),
        ]
        trained = [t for t, p in self.stored.items() if p.requires_grad]

        def joint(*arrays: Tensor) -> tuple[Tensor, Sequence[Tensor | None], Sequence[Tensor]]:
            mine = iter(arrays)
            held = {t: next(mine).detach().requires_grad_(t in trained) for t in stored}
            read = {t: replace(v, array=next(mine)) for t, v in held_values.items()}
            received = {number: next(mine) for number in sent}
            with self.walk.sending.opened(overwrites=False):
                body = self.walk.body(
                    {**read, **self.parameters(held)},
                    {n: next(mine) for n in constants},
                    self.device,
                    self.seed,
                )
                body.kept.receive(received)
                again = self.walk.again()
                with again.forward():
                    loss, *new = self.results(body)
                loss = loss * self.share
                with again.backward():
                    loss.backward()
                self.walk.sending.finish()
            found = [held[t].grad for t in trained]
            return loss.detach(), found, new

        if self._graph is None:
            assert self.compiler is not None
            self._graph = compiled(joint, given, self.compiler, self.plan.program.name, self.device)
        with torch.no_grad():
            loss, gradients, new = self._graph(given, self.steps)
            for t, g in zip(trained, gradients, strict=True):
                if g is not None:
                    added(self.stored[t], g)
            self.buffers.write_back(dict(zip(self.buffers.written, new, strict=True)))
        self.steps += 1
        return loss

    def value(self, node: str) -> Value:
        """The value that a node of the exported graph was lowered to."""
        values = self.plan.traced.scope.values
        found = next(v for n, v in values.items() if n.name == node)
        assert isinstance(found, Value)
        return found

    def buffer(self, path: str) -> Any:
        """A buffer of the module, a parameter that is treated as a buffer, or a tensor that the export lifted out of
        the model."""
        owner, _, name = path.rpartition(".")
        m = self.module.get_submodule(owner)
        return next(
            (held[name] for held in (m._buffers, m._parameters) if name in held), self.lifted.get(path)
        )

    def local(self) -> dict[str, Tensor]:
        """This rank's part of each parameter, as stored."""
        return {tensor: stored.to_local() for tensor, stored in self.stored.items()}

    def parameters(self, parts: Mapping[str, Tensor]) -> dict[str, RankValue]:
        """Parameters in the layouts that the step reads. A parameter whose state is split further is gathered."""
        program, out = self.plan.program, {}
        for tensor, local in parts.items():
            r = program.result(tensor)
            if r.layout == r.gradient:
                out[tensor] = RankValue(array=local, tensor=tensor, shape=r.shape, layout=r.layout)
                continue
            whole = resharded(local.detach(), list(self._gathers(tensor)), r.shape, "sum", self.walk.groups)
            out[tensor] = RankValue(
                array=whole,
                tensor=tensor,
                shape=r.shape,
                layout=r.layout,
                gradient_carrier=local,
                gradient=r.gradient,
            )
        return out

    def _gathers(self, tensor: str) -> Iterator[LocalReshardStep]:
        """The reshard steps from the layout of a parameter's state to the layout in which the step reads it."""
        r, mesh = self.plan.program.result(tensor), self.plan.mesh
        now = r.gradient
        for s in self.plan.program.maker[tensor].sent:
            after = AxisLayout(
                whole if axis in s.axes else state
                for axis, state, whole in zip(mesh.names, now, r.layout, strict=True)
            )
            yield LocalReshardStep(kind="all_gather", axes=s.axes, before=now, after=after)
            now = after

    def leaves(self, batch: Sequence[Tree]) -> list[Tensor]:
        """The tensors of a batch. Raises PaseError if the batch or the module's Python state differs from those that
        the step was exported with."""
        settings = self.plan.traced.program.settings
        if self._same_settings is None or not self._same_settings():
            settings.check(self.module)
            self._same_settings = settings.same_objects(self.module)
        return leaves_as_compiled(batch, self.plan.traced.batch)

    @cached_property
    def _examples(self) -> tuple[AxisLayout, tuple[int, ...]]:
        """How the plan splits the examples over the ranks, as a layout of inputs, and their number as a shape.

        Examples are the first dim that most inputs have. The input that is split most ways along it decides.
        """
        program, mesh = self.plan.program, self.plan.mesh
        names = [n for n in self.plan.traced.program.inputs if n in self.plan.leaves]
        inputs = [r for n in names if (r := program.result(self.plan.leaves[n])).shape]
        count = max(Counter(r.shape[:1] for r in inputs).items(), key=itemgetter(1), default=((), 0))[0]
        along = [r.layout.within(lambda dim: dim == 0) for r in inputs if r.shape[:1] == count]
        return min(along, key=lambda layout: layout.local_shape(count, mesh), default=AxisLayout()), count

    def _inputs(self, given: Sequence[Tensor], micro_batch: int) -> dict[str, RankValue]:
        """This rank's part of a micro-batch. A micro-batch is every k-th example, so each rank already has its part.

        A rank may be given its own examples of an input that the plan keeps whole or splits in another dim. They are
        gathered then.
        """
        k, leaves, program, mesh = self.plan.accumulate, self.plan.leaves, self.plan.program, self.plan.mesh
        examples, count = self._examples
        out = {}
        for x, name in zip(given, self.plan.traced.program.inputs, strict=True):
            if name not in leaves:
                continue
            r = program.result(leaves[name])
            here = r.layout.local_shape(r.shape, mesh)
            own = examples.local_shape(r.shape, mesh) if r.shape[:1] == count else here
            if name in self.plan.cut and x.shape[0] in (k * r.shape[0], k * here[0], k * own[0]):
                x = x[micro_batch::k]
            if tuple(x.shape) == r.shape:
                x = part(x, r.shape, r.layout, self.walk.groups)
            elif tuple(x.shape) == own != here:
                steps = between(examples, r.layout, mesh)
                x = resharded(x.to(self.device), list(steps), r.shape, "sum", self.walk.groups)
            if tuple(x.shape) != here:
                raise PaseError(
                    f"its shape is {list(x.shape)}, but the plan was compiled for {list(r.shape)}, of which this rank "
                    f"has {list(here)}",
                    where=f"input '{name}'",
                    fix="pass the whole tensor or this rank's part, or compile for this shape",
                )
            out[r.tensor] = RankValue(
                array=x.to(self.device), tensor=r.tensor, shape=r.shape, layout=r.layout
            )
        return out


def agreed_seed(device: torch.device) -> int:
    """Rank 0's seed, on all ranks. Random ops must draw the same values on all ranks."""
    import torch
    import torch.distributed as dist

    place = "cpu" if device.type == "meta" else device
    seed = torch.tensor([torch.initial_seed() % 2**31], dtype=torch.int64, device=place)
    dist.broadcast(seed, 0)
    return int(seed.item())
