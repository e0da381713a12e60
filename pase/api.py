"""The public functions compile, compare, price and load, and the class Plan."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pase.compiler.problem.options import CompileOptions, takes_options
from pase.compiler.resolve import attached, resolve
from pase.errors import PaseError
from pase.plan.types import PlanData
from pase.pytree import Tree

if TYPE_CHECKING:
    from optax import GradientTransformation

    from pase.backends.audit.verify import Verified
    from pase.backends.audit.verify_torch import VerifiedTorch
    from pase.backends.jax.plan import JaxPlan
    from pase.backends.jax.spmd.lower import Lowering
    from pase.backends.torch.pipeline.plan import TorchPipeline
    from pase.backends.torch.plan import TorchPlan
    from pase.compiler.problem.problem import Progress
    from pase.machine import Machine
    from pase.replay.types import Timeline
    from pase.schedule.plan import BucketPlan
    from pase.schedule.registry import Options
    from pase.schedule.types import ScheduleProblem
    from pase.stated.price import Priced

__all__ = ["Plan", "compare", "compile", "load", "price", "resolve"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(PlanData):
    """The result of ``pase.compile``, and the content of layout.json. Its costs are predictions, in ``unit``."""

    @classmethod
    def of(cls, data: PlanData) -> Plan:
        """Make a Plan from its data."""
        return cls(**{f.name: getattr(data, f.name) for f in fields(PlanData)})

    def __str__(self) -> str:
        from pase.plan.table import as_text

        return as_text(self)

    def __repr__(self) -> str:
        from pase.plan.table import in_a_line

        return in_a_line(self)

    def _repr_html_(self) -> str:
        from pase.plan.table import as_html

        return as_html(self)

    def save(self, path: str | Path) -> None:
        """Write layout.json. An interrupted write leaves no partial file."""
        from pase.plan.layout import save

        save(self, path)

    def diff(self, other: PlanData) -> list[str]:
        """List the differences, one line each. The list is empty when both plans have the same layouts."""
        from pase.plan.layout import diff

        return diff(self, other)

    def bind(
        self,
        fn: Tree,
        params: Tree,
        *batch: Tree,
        mode: Literal["train", "inference", "step"] = "train",
        carry: Mapping[int, Tree] | None = None,
        dims: Mapping[str, int] | None = None,
        chances: Mapping[str, Sequence[float]] | None = None,
        loss: Callable[..., Tree] | None = None,
    ) -> Plan:
        """Attach the model to a loaded plan: ``plan.bind(loss_fn, params, *batch)``, or a PyTorch module and its batch.

        The model is traced again, so pass the mode, carry, dims, chances and loss that it was compiled with. Raises
        PaseError if it is not the model of the plan.
        """
        from pase.frontends import registry

        traced = registry.trace(
            fn,
            params,
            *batch,
            name=self.model,
            mode=mode,
            carry=carry,
            dims=dims,
            chances=chances,
            loss=loss,
        )
        return attached(self, traced)

    @cached_property
    def bucket_plan(self) -> BucketPlan | None:
        """Which collectives of a step share a message, and in which order and on which link messages are sent.

        This is the bucket plan that ``scheduled`` chose or that the layout has. Otherwise it is made with the policy
        "ours" and plain updates. None if nothing is sent.
        """
        return None if self._schedule is None else self._schedule[1]

    @cached_property
    def bucket_problem(self) -> ScheduleProblem | None:
        """The problem that ``bucket_plan`` solves: the step's blocks of compute, the tensors to send, and the links."""
        return None if self._schedule is None else self._schedule[0]

    @cached_property
    def timeline(self) -> Timeline | None:
        """The predicted step as a timeline that `pase replay` can read. None if nothing is sent.

        It follows the bucket plan. For a pipelined plan, it shows the stages on their ranks.
        """
        from pase.plan.step_timeline import step_timeline

        return step_timeline(self, None if self.pipeline is not None else self._schedule)

    @cached_property
    def _schedule(self) -> tuple[ScheduleProblem, BucketPlan] | None:
        from pase.plan.buckets import schedule_of

        return schedule_of(self)

    def scheduled(self, policy: str = "ours", options: Options | None = None) -> Plan:
        """Return this plan with the bucket plan of a policy, for ``save`` and ``bucket_plan``.

        If nothing is sent, the plan is returned unchanged. options: for example whether delayed updates are allowed;
        see `pase.schedule.Options`.
        """
        from pase.plan.buckets import with_buckets

        return with_buckets(self, policy=policy, options=options)

    @cached_property
    def jax(self) -> JaxPlan[Tree, Tree]:
        """The plan in JAX: shardings, the constrained loss and a train step. A pipelined plan has a step that runs its
        stages.

        A loaded plan of a zoo model finds its model by itself; other plans need ``plan.bind(fn, params, batch)`` first.
        """
        from pase.backends.jax.pipeline.of_plan import jax_plan

        if self.traced is None and self.model.startswith("zoo:"):
            return attached(self, resolve(self.model)).jax
        self._warn_of_waits(
            "use lowering='annotated' and let XLA decompose them (--xla_gpu_threshold_for_windowed_einsum_mib=0 "
            "--xla_gpu_multi_streamed_windowed_einsum=true; on TPU --xla_tpu_decompose_all_gather_einsum=true "
            "--xla_tpu_decompose_einsum_reduce_scatter=true)"
        )
        return jax_plan(self)

    @cached_property
    def torch(self) -> TorchPlan | TorchPipeline:
        """The plan in PyTorch, for a torch.nn.Module.

        It runs on the ranks of ``torch.distributed``. A pipelined plan runs its stages on them.
        """
        from pase.backends.torch.pipeline.plan import torch_pipeline
        from pase.backends.torch.plan import torch_plan

        self._warn_of_waits("run the strategy in a program that decomposes them, such as torchtitan")
        return torch_plan(self) if self.pipeline is None else torch_pipeline(self)

    def verify(
        self,
        target: str | Path | None = None,
        *,
        lowering: Lowering = "auto",
        optimizer: GradientTransformation | None = None,
        rank: int = 0,
        timeout_s: float = 3600.0,
        progress: Callable[[str], None] | None = None,
    ) -> Verified | VerifiedTorch:
        """Compile the step with the target's own compiler, on any machine, and compare it with the prediction. The step
        of a PyTorch model runs op by op on fake tensors instead, as that of one rank.

        No device is needed (docs/how-to/verify.md). print() of the result shows both side by side.

        target: a machine by name or by the path of its file, by default the plan's; "cpu" for host devices. lowering:
            as for ``plan.jax.train_step``. optimizer: by default optax's optimizer of the plan's name. rank: of a
            PyTorch model. timeout_s: how long the compiler may take. progress: called with a line of text while it
            works.

        Raises PaseError if the plan has no JAX or PyTorch model or has stages, or if the compiler is missing or fails.
        Raises Infeasible if the compiler itself says that the step does not fit.
        """
        from pase.backends.audit.verify import verify
        from pase.backends.audit.verify_torch import verify_torch
        from pase.compiler.meshes.retarget import priced_on
        from pase.frontends.torch.frontend import TracedTorch

        if self.traced is None and self.model.startswith("zoo:"):
            return attached(self, resolve(self.model)).verify(
                target, lowering=lowering, optimizer=optimizer, timeout_s=timeout_s, progress=progress
            )
        priced, model = priced_on(self, "cpu_host" if target == "cpu" else target)
        if isinstance(self.traced, TracedTorch):
            if lowering != "auto" or optimizer is not None:
                raise PaseError(
                    "a PyTorch step has no lowering, and its optimizer is the plan's",
                    where=f"the plan for '{self.model}'",
                    fix="leave lowering and optimizer out",
                )
            return verify_torch(priced, model.machine, rank)
        if rank:
            raise PaseError(
                f"there is no step of rank {rank} alone: all devices run one program",
                where=f"the plan for '{self.model}'",
                fix="leave rank out",
            )
        return verify(
            priced, model, lowering=lowering, optimizer=optimizer, timeout_s=timeout_s, progress=progress
        )

    def _warn_of_waits(self, instead: str) -> None:
        if self.provenance.get("decompose") == "products":
            warnings.warn(
                "the plan's price assumes that gathers and scatters overlap the products next to them "
                f"(decompose='products'), but this program waits for them: {instead}",
                stacklevel=3,
            )


@takes_options
def compile(
    model: Tree, params: Tree = None, *batch: Tree, options: CompileOptions, progress: Progress | None = None
) -> Plan:
    """Find the best split of every layer over ``devices``, over their meshes, and predict its time and memory.

    Meshes have at most ``max_axes`` axes, and one of several that differ only in the order of axes over equal links is
    searched; ``meshes="all"`` proves the answer over every mesh.

    model: "zoo:NAME?batch=…", "package.module:function" (which returns loss_fn, params, *batch), a JAX
        callable ``loss_fn(params, *batch) -> scalar`` followed by its example arguments (shapes are enough), a
        torch.nn.Module followed by an example batch, "hf:CLASS?setting=…" or "hf:./config.json?batch=…" for a model of
        transformers, or anything
        that another frontend reads: "model.onnx", an onnx.ModelProto, …
    params, batch: JAX arrays and shapes. Those that have a NamedSharding over several devices keep it, and the search
        decides the rest (docs/how-to/programs.md, "Arrays that already have a sharding").
    {options}
    progress: a function that is called with a line of text at each step of the compilation. If None, a line is printed
        to standard error after ten seconds and then every minute.

    Raises PaseError for bad input. Raises Infeasible if no strategy exists, or if none fits a memory limit that is
    given as a size. Warns if none fits the machine's memory, which is the default limit.
    """
    from pase.plan.table import misfit_text
    from pase.stated.usual import compile_with_usual

    with _progress(progress) as say:
        plan = Plan.of(compile_with_usual(model, params, batch, options, say))
    if plan.misfit is not None:
        warnings.warn(f"the plan for '{plan.model}': {misfit_text(plan)}", stacklevel=3)
    return plan


@contextmanager
def _progress(asked: Progress | None) -> Iterator[Progress]:
    """The user's function, or one that prints a line after ten seconds and then every minute."""
    if asked is not None:
        yield asked
        return
    from pase.files.progress import seldom

    with seldom(lambda line: print(f"pase: {line}", file=sys.stderr, flush=True)) as say:
        yield say


class Comparison(list["tuple[str, Plan]"]):
    """A list of (name, plan): the baselines and "pase", cheapest first."""

    def __str__(self) -> str:
        """The rows as a table."""
        rows = list(self._rows())
        wide = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))] if rows else []
        lines = ("  ".join(c.ljust(w) for c, w in zip(r, wide, strict=True)).rstrip() for r in rows)
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        from pase.pages.parts import in_notebook

        names = ["strategy", "step>", "against the best>", "a device holds>", "mesh"]
        rows = (tuple(escape(cell) for cell in row) for row in self._rows())
        return in_notebook(self._title(), names, rows)

    def _title(self) -> str:
        return (
            f"{self[0][1].model} on {self[0][1].devices} × {self[0][1].machine}"
            if self
            else "nothing compared"
        )

    def _rows(self) -> Iterator[tuple[str, ...]]:
        """Name, step, the step as a multiple of the least, memory and mesh of each strategy."""
        from pase.plan.table import bytes_text, cost_text

        least = min((p.cost for _, p in self), default=0.0)
        for name, p in self:
            yield (
                name.replace("_", " "),
                cost_text(p.cost, p.unit),
                f"×{p.cost / least:.3f}" if least else "",
                bytes_text(p.memory.total) + ("" if p.fits else ", does not fit"),
                "×".join(map(str, p.mesh.sizes)),
            )


@takes_options
def compare(
    model: Tree, params: Tree = None, *batch: Tree, options: CompileOptions, progress: Progress | None = None
) -> Comparison:
    """Return the plan of every baseline that applies and of pase ("pase"), priced in the same way, cheapest first.

    model, params, batch: as for ``compile``.
    {options}
    progress: a function that is called with a line of text at each step of the compilation. If None, a line is printed
        to standard error after ten seconds and then every minute.
    """
    from pase.compiler.compilation import compare_model

    with _progress(progress) as say:
        plans = compare_model(model, params, batch, options, say)
    return Comparison((name, Plan.of(plan)) for name, plan in plans)


def price(
    model: Tree,
    params: Tree = None,
    *batch: Tree,
    devices: int,
    strategy: str,
    executor: str = "compiled",
    machine: str | Path | Machine | None = None,
    unknown: Literal["error", "replicate"] = "error",
    dims: Mapping[str, int] | None = None,
) -> Priced:
    """Price a given strategy without a search: seconds by cause, memory on the fullest rank, and collectives.

    model, params, batch: as for ``compile``. The model is a JAX function or a PyTorch module with a loop over layers or
        with at least three equal layers in a row.
    devices: the number of devices.
    strategy: for example ``"fsdp=32,tp=8,sp,remat=full"``. ``pase price --help`` lists the terms.
    executor: how the program runs, one of ``pase.stated.program.PROGRAMS``.
    machine, unknown, dims: as for ``compile``.

    Raises PaseError for bad input. Raises Infeasible, with the reason, if the model cannot be split in this way.
    """
    from pase.compiler.problem.problem import SplitProblem
    from pase.compiler.resolve import traced_model
    from pase.stated.model import price_model
    from pase.stated.program import PROGRAMS
    from pase.stated.strategy import parse

    program = PROGRAMS[executor]
    stated = parse(strategy, devices)
    asked = CompileOptions(devices=devices, unknown=unknown, dims=dims)
    traced, _ = traced_model(model, params, batch, asked)
    problem = SplitProblem.of(traced.graph, devices, machine, "analytic", "adam")
    return price_model(problem, traced, stated, program)


def load(path: str | Path) -> Plan:
    """Read a layout.json. Raises PaseError if it is corrupt, truncated, or of another version."""
    from pase.plan.layout import load as load_layout

    return Plan.of(load_layout(path))
