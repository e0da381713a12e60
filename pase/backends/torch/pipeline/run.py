"""One rank of a pipelined plan in PyTorch: its stages' parameters, and a step in the order of the schedule's
actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from pase.backends.torch.check_plans import TorchAgainst, check_stages
from pase.backends.torch.clip import clipped
from pase.backends.torch.gradients import added
from pase.backends.torch.parallel import ParallelModule, agreed_seed
from pase.backends.torch.pipeline.p2p import Letter, StageLinks
from pase.backends.torch.spmd.gathered_again import GatheredAgain
from pase.backends.torch.spmd.hoisted import StepParameters
from pase.backends.torch.spmd.interpreter import Body
from pase.backends.torch.spmd.values import RankValue
from pase.backends.torch.storage import Storage, lifted_of, shared_out
from pase.errors import PaseError
from pase.frontends.torch.export.functional import refuse_autocast
from pase.local.lower import between
from pase.local.reshard import resharded
from pase.pipeline.types import Kind
from pase.plan.gradient_lines import CheckLines
from pase.pytree import Tree
from pase.tables.axis_layout import AxisLayout

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

    from pase.backends.torch.check import Say
    from pase.backends.torch.pipeline.plan import TorchPipeline
    from pase.plan.gradient_check import GradientCheck

__all__ = ["PipelinedModule", "entered_first", "weight_groups"]


@dataclass(kw_only=True)
class PipelinedModule:
    """This rank's stages of a module, and their step.

    module: the user's own module, of which this rank keeps its part.
    stages: number -> a stage of this rank, which walks its own nodes and stores its own parameters.
    """

    plan: TorchPipeline
    module: Module
    links: StageLinks
    stages: Mapping[int, ParallelModule]

    @classmethod
    def of(cls, plan: TorchPipeline, module: Module, device: torch.device | str | None) -> PipelinedModule:
        import torch

        first = next(module.parameters(), None)
        at = torch.device(device if device is not None else "cpu" if first is None else first.device)
        if at.type == "meta":
            raise PaseError(
                "the stages of a pipeline do not run on the meta device",
                where="device",
                fix="give parallelize the device to run on, and load a checkpoint afterwards",
            )
        groups = plan.groups(at.type)
        links = StageLinks.of(plan, groups, at)
        seed, lifted = agreed_seed(at), lifted_of(plan.traced.program, at)
        every = {}
        for k, stage in enumerate(plan.stages):
            split = plan.split(k)
            walk = replace(split.walk(groups), only=stage.nodes)
            if not walk.totals & stage.reads:  # nothing in the stage reads them
                walk = replace(walk, totals=frozenset())
            every[k] = ParallelModule(
                plan=split, module=module, walk=walk, device=at, seed=seed, lifted=lifted
            )
        storages = {k: Storage(parallel=p) for k, p in every.items()}
        for order in sorted(
            {o for s in storages.values() for o in s.orders}
        ):  # all ranks must create the same meshes
            devices = groups.ordered(order)
            for s in storages.values():
                s.meshes[order] = devices
        mine = {k: p for k, p in every.items() if plan.schedule.rank_of[k] == links.rank}

        def holder(tensor: str | None) -> Storage | None:
            owner = None if tensor is None else plan.stage_of_parameter.get(tensor)
            return storages[0] if owner is None else storages[owner] if owner in mine else None

        shared_out(storages[0], holder)
        return cls(plan=plan, module=module, links=links, stages=mine)

    def __call__(self, *batch: Tree) -> Tensor:
        raise PaseError(
            "a pipeline runs forward and backward together",
            where="step(*batch)",
            fix="use loss = step.backward(*batch)",
        )

    def backward(self, *batch: Tree) -> Tensor:
        """Returns the detached loss, which is the same on every rank. Adds the gradients of all micro-batches to the
        ``grad`` of this rank's parameters."""
        refuse_autocast(f"the step of '{self.plan.traced.graph.name}' runs")
        self.links.begin()
        step = _StagesStep(of=self, batch=batch)
        for action in self.plan.schedule.orders[self.links.rank]:
            if action.kind == Kind.FORWARD:
                step.forward(action.stage, action.micro)
            elif action.kind == Kind.WEIGHT:
                step.weights(action.stage, action.micro)
            else:
                step.backward(action.stage, action.micro, apart=action.kind == Kind.INPUT)
        step.gradients()
        self.links.end()
        for p in self.stages.values():
            p.steps += self.plan.pipeline.micro_batches
        return self.links.from_last(step.loss)

    def check(
        self,
        *batch: Tree,
        against: TorchAgainst = "auto",
        seed: int = 0,
        most_lines: int = 50,
        progress: Say | None = None,
    ) -> GradientCheck:
        """See ``ParallelModule.check``. There is no unsharded module to compare with."""
        lines = CheckLines(seed=seed, most_lines=most_lines, say=progress)
        return check_stages(self, batch, against, lines)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """``ParallelModule.clip_grad_norm_``, with the norm of the gradients of all stages."""
        return clipped(self.module.parameters(), max_norm, norm_type, self.links.of_all_stages)

    def evaluating(self) -> NoReturn:
        raise PaseError(
            "a rank has the parameters of its own stages only, so the module cannot be called",
            where="step.evaluating()",
            fix="write a checkpoint with torch.distributed.checkpoint, and read it into a module without stages",
        )


@dataclass(kw_only=True)
class _StagesStep:
    """One step of this rank's stages over all micro-batches.

    loss: the sum of the micro-batches' shares of the loss, on the rank of the last stage.
    """

    of: PipelinedModule
    batch: Sequence[Tree]
    loss: Tensor | None = None
    running: dict[tuple[int, int], tuple[Sequence[Tensor], Sequence[Tensor]]] = field(default_factory=dict)
    """(stage, micro-batch) -> (inputs, results) that have a gradient, from its forward to its backward."""
    left: dict[tuple[int, int], Callable[[], object]] = field(default_factory=dict)
    """(stage, micro-batch) -> a function that computes the gradients of weights, if the schedule does that later."""

    again: dict[tuple[int, int], GatheredAgain] = field(default_factory=dict)
    """(stage, micro-batch) -> the parameters that its backward gathers again, as long as it needs them."""

    bodies: Mapping[int, dict[int, Body]] = field(init=False)
    """Stage -> micro-batch -> the state before its walk."""
    held: Mapping[int, StepParameters] = field(init=False)
    """Stage -> its parameters."""

    def __post_init__(self) -> None:
        self.bodies = {k: dict(enumerate(p.bodies(self.batch, p.buffers))) for k, p in self.of.stages.items()}
        self.held = self._gathered()

    def _gathered(self) -> Mapping[int, StepParameters]:
        """Stage -> its parameters. Parameters that another stage stores are sent from there, once per step."""
        plan, links = self.of.plan, self.of.links
        stored = {k: p.local() for k, p in self.of.stages.items()}
        for t, k in plan.borrowed:
            if (owner := plan.stage_of_parameter[t]) in stored:
                links.send(Letter("weight", owner, k, t), [stored[owner][t].detach()])
        out: dict[int, StepParameters] = {}
        for k, p in self.of.stages.items():
            leaves = {t: x.detach().requires_grad_(p.stored[t].requires_grad) for t, x in stored[k].items()}
            values = p.parameters(leaves)
            for t in [t for t, reader in plan.borrowed if reader == k]:
                (x,) = links.receive(Letter("weight", plan.stage_of_parameter[t], k, t))
                leaves[t], values[t] = self._borrowed(t, k, x)
            body = p.walk.body(values, p.buffers.constants(), p.device, p.seed)
            out[k] = StepParameters.of(leaves, body, p.walk)
        return out

    def _borrowed(self, t: str, k: int, x: Tensor) -> tuple[Tensor, RankValue]:
        """A parameter that another stage stores: (the leaf that gets its gradient here, the value that the stage
        reads). x: the parameter in the layout in which it is stored there."""
        plan, r = self.of.plan, self.of.plan.stage_result(k, t)
        stored = plan.stage_result(plan.stage_of_parameter[t], t).gradient
        leaf = self._resharded(k, t, x, stored, r.gradient).clone().requires_grad_(plan.trains(t))
        value = RankValue(array=leaf, tensor=t, shape=r.shape, layout=r.layout)
        if r.layout != r.gradient:
            read = self._resharded(k, t, x, stored, r.layout)
            value = replace(value, array=read, gradient_carrier=leaf, gradient=r.gradient)
        return leaf, value

    def _resharded(self, k: int, t: str, x: Tensor, have: AxisLayout, want: AxisLayout) -> Tensor:
        """Reshard a tensor among the ranks of a stage."""
        p = self.of.stages[k]
        shape = p.plan.program.result(t).shape
        return resharded(x, between(have, want, p.plan.mesh), shape, "sum", p.walk.groups)

    def forward(self, k: int, i: int) -> None:
        """Run a stage's forward on a micro-batch."""
        plan, links, p = self.of.plan, self.of.links, self.of.stages[k]
        stage, body = plan.stages[k], self.bodies[k].pop(i)
        self.held[k].into(body)
        received = links.receive(Letter("there", k - 1, k, i)) if k else ()
        entered = [self._entered(k, t, x) for t, x in zip(stage.enters, received, strict=True)]
        body.values.update({v.tensor: v for v in entered})
        self.again[k, i] = again = p.walk.again()
        back = [v.array for v in entered if v.array.requires_grad]
        if k + 1 == len(plan.stages):
            with again.forward():
                loss = p.results(body)[0] * p.share
            self.loss = loss.detach() + (0 if self.loss is None else self.loss)
            self.running[k, i] = back, [loss]
            return
        with again.forward():
            p.walk.run(body)
        outs = [body.values[t].array for t in stage.leaves]
        letter = Letter("there", k, k + 1, i)
        for t, x, like in zip(stage.leaves, outs, links.blank(letter), strict=True):
            if (x.shape, x.dtype) != (like.shape, like.dtype):
                raise PaseError(
                    f"it is {x.dtype} {list(x.shape)}, but {like.dtype} {list(like.shape)} in the plan",
                    where=f"tensor '{t}' that stage {k} sends",
                    fix="use the model that the plan was compiled from, or compile again",
                )
        links.send(letter, [x.detach() for x in outs])
        self.running[k, i] = back, [x for t, x in zip(stage.leaves, outs, strict=True) if plan.comes_back(t)]

    def _entered(self, k: int, t: str, x: Tensor) -> RankValue:
        """A result of the previous stage, in the layout in which this stage would compute it."""
        plan, r = self.of.plan, self.of.plan.stage_result(k, t)
        array = self._resharded(k, t, x, plan.stage_result(k - 1, t).layout, r.layout).detach()
        return RankValue(
            array=array.requires_grad_(plan.comes_back(t)), tensor=t, shape=r.shape, layout=r.layout
        )

    def backward(self, k: int, i: int, *, apart: bool) -> None:
        """Run a stage's backward on a micro-batch. apart: whether the gradients of weights are computed later."""
        import torch

        plan, links, (entered, outs) = self.of.plan, self.of.links, self.running.pop((k, i))
        if k + 1 == len(plan.stages):
            received = [torch.ones_like(outs[0])]
        else:
            names = [t for t in plan.stages[k].leaves if plan.comes_back(t)]
            received = [
                self._resharded(
                    k, t, g, plan.stage_result(k + 1, t).gradient, plan.stage_result(k, t).gradient
                )
                for t, g in zip(names, links.receive(Letter("back", k + 1, k, i)), strict=True)
            ]
        ends = [(x, g) for x, g in zip(outs, received, strict=True) if x.requires_grad]
        ways, gradients = [x for x, _ in ends], [g for _, g in ends]
        again = self.again[k, i] if apart else self.again.pop((k, i))
        with again.backward():
            if apart:
                self.left[k, i] = entered_first(ways, gradients, entered, list(self.held[k].trained))
            elif ways:
                torch.autograd.backward(ways, gradients)
        if k:
            made = [torch.zeros_like(x) if x.grad is None else x.grad for x in entered]
            links.send(Letter("back", k, k - 1, i), made)

    def weights(self, k: int, i: int) -> None:
        """Compute the gradients of weights that ``backward`` left."""
        with self.again.pop((k, i)).backward(of_weights=True):
            self.left.pop((k, i))()

    def gradients(self) -> None:
        """Add the gradients of all micro-batches to the parameters' ``grad``, on the ranks that store them."""
        plan, links = self.of.plan, self.of.links
        for held in self.held.values():
            held.reduce_gradients()
        shared = [(t, k, plan.stage_of_parameter[t]) for t, k in plan.borrowed if plan.trains(t)]
        for t, k, owner in shared:
            if k in self.held:
                leaf = self.held[k].leaves[t]
                g = leaf.new_zeros(leaf.shape) if leaf.grad is None else leaf.grad
                g = self._resharded(
                    k, t, g, plan.stage_result(k, t).gradient, plan.stage_result(owner, t).gradient
                )
                links.send(Letter("sum", k, owner, t), [g])
        for k, p in self.of.stages.items():
            for t, parameter in p.stored.items():
                if (made := self.held[k].leaves[t].grad) is not None:
                    added(parameter, made)
                    self.held[k].leaves[t].grad = None
        for t, k, owner in shared:
            if owner in self.held:
                (g,) = links.receive(Letter("sum", k, owner, t))
                added(self.of.stages[owner].stored[t], g)


def entered_first(
    outs: Sequence[Tensor],
    gradients: Sequence[Tensor],
    entered: Sequence[Tensor],
    weights: Sequence[Tensor],
) -> Callable[[], object]:
    """The two parts of a stage's backward: add the gradients of the stage's inputs (``entered``) to their ``grad``, and
    return a function that adds the gradients of the weights, which are leaves of autograd.

    Other stages wait only for the first part. The second part is PyTorch's, on groups of weights that are made here:
    PyTorch's own grouping depends on the addresses of objects, and ranks of a stage that group differently would wait
    for each other's collectives. If a weight has a way to the results apart from all inputs, all are computed now.
    """
    import torch

    inputs = [x for x in entered if x.requires_grad]
    groups = weight_groups(outs, inputs, weights) if inputs else None
    if groups is None:
        torch.autograd.backward(outs, gradients)
        return lambda: None
    from torch.distributed.pipelining import _backward as halves

    hooks = [
        node.register_prehook(partial(_kept, group["grads"], i))
        for group in groups
        for i, node in enumerate(group["intermediates"])
    ]
    try:
        found = torch.autograd.grad(outs, inputs, gradients, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    for x, g in zip(inputs, found, strict=True):
        if g is not None:
            x.grad = g if x.grad is None else x.grad + g
    return partial(halves.stage_backward_weight, iter(weights), groups)  # type: ignore[arg-type]


def _kept(kept: list[tuple[Tensor | None, ...]], i: int, gradients: tuple[Tensor | None, ...]) -> None:
    """A hook on a node of autograd: keeps the gradients of its results."""
    kept[i] = gradients


def weight_groups(
    outs: Sequence[Tensor], inputs: Sequence[Tensor], weights: Sequence[Tensor]
) -> list[dict[str, list[Any]]] | None:
    """Weights with the nodes of autograd at which their ways from the results leave those to the inputs. Weights that
    share a node are in one group.

    The order is that of the weights, and of the nodes from the results on, so that it is the same on all ranks. None if
    the results depend on a weight by a way that meets none to the inputs.
    """
    from torch.distributed.pipelining import _backward as halves

    node = halves._get_grad_fn_or_grad_acc
    results = [n for x in outs if (n := node(x)) is not None]
    behind = halves.construct_reverse_graph(results)
    order = {n: i for i, n in enumerate(behind)}
    to_inputs, _ = halves.reverse_closure([n for x in inputs if (n := node(x)) is not None], set(), behind)
    groups: list[tuple[list[Any], set[Any]]] = []
    for w in weights:
        weight = node(w)
        if weight is None or not (weight in order or weight in results):
            continue  # the results do not depend on it
        ways, meets = halves.reverse_closure([weight], to_inputs, behind)
        if not ways.isdisjoint(results):
            return None
        mine = ([weight], set(meets))
        for group in [g for g in groups if g[1] & meets]:
            groups.remove(group)
            mine = (group[0] + mine[0], group[1] | mine[1])
        groups.append(mine)
    out = []
    for found, meets in groups:
        nodes = sorted(meets, key=lambda n: order.get(n, -1))
        out.append({"params": found, "intermediates": nodes, "grads": [()] * len(nodes)})
    return out
