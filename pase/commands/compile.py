"""``pase compile``: finds the best strategy for a model, prints it and writes it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pase.commands.options import (
    JsonOption,
    LayoutOutput,
    ModelName,
    StrictOption,
    compile_options,
    print_json,
    progress,
    strictly,
    warn_misfit,
)
from pase.compiler.problem.options import CompileOptions
from pase.errors import PaseError
from pase.files.codec import to_tree
from pase.files.terminal import console

if TYPE_CHECKING:
    from pase.plan.types import PlanData

__all__ = ["compile", "rates", "summary"]

PURPOSE = "Plan"
_OF_PYTORCH = "ddp, fsdp2, torchtitan or tp-plan"
"""The programs for which a PyTorch model can be compiled."""


@compile_options()
def compile(
    model: ModelName,
    options: CompileOptions,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            help="Schedule the communication with this policy (ours, ddp, …) and store the bucket plan in the layout.",
            metavar="POLICY",
        ),
    ] = None,
    output: LayoutOutput = None,
    emit: Annotated[
        Path | None,
        typer.Option(
            "--emit",
            help="With --for: also write the program's own file, as pase emit does.",
            metavar="FILE",
        ),
    ] = None,
    every_layer: Annotated[
        bool, typer.Option("--all", help="Print every layer, not only the costliest in about 40 lines.")
    ] = False,
    json: JsonOption = False,
    strict: StrictOption = False,
) -> None:
    """Find a model's best strategy, print it, write layout.json.

    Finds the best split of every layer of MODEL over the devices. It searches every mesh that fits the machine.

    Prints the step time, memory and split of each layer, next to the step times of data parallelism and expert
    strategies. The same cost model prices all of them; the figures are predictions, not measurements. The output says
    whether the strategy is proven optimal under that model.

    The plan is the cheapest that fits in a device's memory, with micro-batches and recomputation if they are needed. If
    no plan fits, the best plan without a limit is printed, with a warning that says what would fit. With --strict, the
    exit status is then 1.

    To run an expert strategy instead, such as plain FSDP, write its plan with pase compare --take. To write the plan
    for a program other than pase's own, name that program with --for and the file with --emit.

    \b
    Examples:
      pase compile zoo:gpt2 --devices 32
      pase compile zoo:llama3_8b --devices 64 --machine a100x8 -o layout.json
      pase compile model.onnx --devices 32 --dim batch=64 -o layout.json
      pase compile mypackage.train:model --devices 8 --mesh data=4,model=2 --json
      pase compile 'hf:LlamaForCausalLM?batch=32' --devices 32 --for fsdp2 --emit parallelize.py
    """
    from pase.api import Plan
    from pase.backends.registry import emit as write
    from pase.stated.usual import compile_with_usual

    if emit is not None and options.target == "any":
        raise PaseError(
            "a file is written for another program", where=f"--emit {emit}", fix="name the program with --for"
        )
    with progress() as say:
        plan = Plan.of(compile_with_usual(model, None, (), options, say))
        dict(plan.baselines)  # they are priced at their first use, which is here, while progress is shown
    if schedule is not None:
        plan = plan.scheduled(schedule)
    if output is not None:
        plan.save(output)
    written = None if emit is None else write(plan, options.target, emit)
    if json:
        files = {"layout": output and str(output), "written": written}
        print_json(summary(plan) | {k: v for k, v in files.items() if v is not None})
        warn_misfit(plan)
        strictly(plan.sound, strict)
        return
    from pase.plan.table import cost_text, render

    render(plan, console(), every_layer)
    if plan.buckets is not None:
        e = plan.buckets["evaluation"]
        console().print(
            f"bucket plan '{plan.buckets['policy']}': {len(plan.buckets['messages'])} messages, "
            f"{cost_text(e['iteration_s'], 's')} a step, {cost_text(e['exposed_s'], 's')} of it exposed communication",
        )
    if output is not None:
        free = plan.provenance.get("frontend") == "torch" and options.target == "any"
        also = (
            f"; plan.torch runs it. For a program without pase, compile with --for {_OF_PYTORCH}"
            if free
            else ""
        )
        console(err=True).print(f"wrote {output}{also}")
    if written is not None:
        console(err=True).print(written)
    strictly(plan.sound, strict)


def rates(plan: PlanData) -> dict[str, float | None]:
    """The step's interval (80%) and its speed per device, for the JSON output.

    Fields are None if costs are not in seconds, if the machine's kernels were not measured, or if the batch has no
    tokens.
    """
    from pase.plan.error_bar import interval

    bar = interval(plan)
    names = ("mfu", "tflops_per_device", "tokens_per_s_per_device", "examples_per_s_per_device")
    return {
        "step_low_s": None if bar is None else bar.low_s,
        "step_high_s": None if bar is None else bar.high_s,
        **{name: getattr(plan.throughput, name, None) for name in names},
    }


def summary(plan: PlanData) -> dict[str, object]:
    """The object that --json prints."""
    return {
        "model": plan.model,
        "devices": plan.devices,
        "idle": plan.idle,
        "machine": plan.machine,
        "cost_model": plan.cost_model,
        "mesh": plan.mesh.by_name,
        "cost_s": plan.cost if plan.unit == "s" else None,
        "cost": plan.cost,
        "unit": plan.unit,
        "compute": plan.compute,
        "communication": plan.communication,
        "hidden": plan.hidden,
        "exposed": plan.exposed,
        **rates(plan),
        "dtype": None if plan.peak is None else plan.peak[0],
        "peak_tflops_per_device": None if plan.peak is None else plan.peak[1] / 1e12,
        "memory_bytes": plan.memory.total,
        "memory_limit_bytes": plan.memory_limit,
        "fits": plan.fits,
        "misfit": plan.misfit,
        "remarks": [r.to_json() for r in plan.noted],
        "accumulate": plan.accumulate,
        "blocks_computed_again": len(plan.remat),
        "once": plan.once,
        "gathers_again": plan.gathers_again,
        "baselines": dict(plan.baselines),
        "baselines_that_do_not_fit": list(plan.too_large),
        "skipped": dict(plan.skipped),
        "meshes": [{"mesh": list(t.mesh), "cost": t.cost} for t in plan.tried],
        "seconds": dict(plan.seconds),
        "optimal": plan.optimal,
        "bound": plan.bound,
        "nodes": len(plan.nodes),
        **({} if plan.buckets is None else {"bucket_plan": plan.buckets["evaluation"]}),
        "pipeline": None if plan.pipeline is None else to_tree(plan.pipeline),
    }
