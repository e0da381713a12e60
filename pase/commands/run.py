"""``pase run``: runs one training step of a layout on this machine and compares it with the unsharded step."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pase.commands.options import (
    JsonOption,
    LayoutFile,
    StrictOption,
    print_json,
    progress,
    strictly,
    warn_misfit,
)
from pase.files.json_values import JsonObject
from pase.files.terminal import console
from pase.pytree import Tree

if TYPE_CHECKING:
    from pase.frontends.jax.frontend import TracedJax
    from pase.frontends.registry import Traced
    from pase.frontends.torch.frontend import TracedTorch
    from pase.plan.gradient_check import GradientCheck
    from pase.plan.types import PlanData
    from pase.zoo import ZooModel

__all__ = ["Runnable", "run"]

PURPOSE = "Run and hand over"
USES_DEVICES = True

TOLERANCE = 1e-4
"""The largest allowed difference, relative to the largest element of all gradients (or parameters).

float32 sums in another order differ by about 1e-7 times the square root of their length. A wrong layout makes
differences that are larger by orders of magnitude.
"""


@dataclass(frozen=True, kw_only=True)
class Runnable:
    """A loss function, and ``init(seed)``: its (params, *batch) as arrays."""

    name: str
    loss_fn: Callable[..., Tree]
    init: Callable[[int], tuple[Tree, ...]]
    shapes: tuple[Tree, ...]
    made_up: bool = False
    """Whether the values are random although the model is the user's, who gave shapes alone."""

    @classmethod
    def of_zoo(cls, name: str, model: ZooModel) -> Runnable:
        return cls(name=name, loss_fn=model.loss_fn, init=model.init, shapes=(model.params, *model.inputs))

    def trace(self) -> TracedJax:
        from pase.frontends.jax.frontend import trace

        return trace(self.loss_fn, *self.shapes, name=self.name)


def runnable(
    model: str, *, reduced: bool, layers: int | None = None, program: tuple[Tree, ...] | None = None
) -> Runnable:
    """The model of this name: a zoo model, or the JAX program that package.module:function returns.

    reduced: a zoo model in its reduced size, with ``layers`` layers if they are given and the model has such a setting.
    program: what the function returned, if it was called before.
    """
    from pase import zoo
    from pase.errors import PaseError

    if not model.startswith("zoo:"):
        return _own(model, reduced, program)
    name = model.removeprefix("zoo:")
    found = zoo.get(name)
    if found.task != "train":
        raise PaseError(
            "pase run can run training steps only, and this is a plan for inference",
            where=f"model '{model}'",
            fix="use plan.jax.prefill, plan.jax.decode or plan.jax.apply (docs/how-to/inference.md)",
        )
    if reduced:
        found = zoo.reduced(name.partition("?")[0])
        if layers is not None and "layers" in found.settings:
            found = zoo.reduced(name.partition("?")[0], layers=layers)
    return Runnable.of_zoo(model, found)


def _own(model: str, reduced: bool, program: tuple[Tree, ...] | None) -> Runnable:
    from pase.compiler.resolve import own_program
    from pase.errors import PaseError
    from pase.frontends import registry
    from pase.frontends.jax.arguments import filled

    if reduced:
        raise PaseError(
            "pase knows a reduced size of zoo models only",
            where=f"model '{model}'",
            fix="write a function that makes your model smaller, with the same names of layers (two layers, a few "
            "examples), and name it: pase run LAYOUT --model package.module:function --devices 8",
        )
    if not _is_own(model):
        _refuse(model)
    loss_fn, *given = own_program(model) if program is None else program
    frontend = registry.frontend_of(loss_fn)
    if frontend is None or not frontend.programs:
        _refuse(model)
    import jax

    only_shapes = any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(given))
    return Runnable(
        name=model,
        loss_fn=loss_fn,
        init=lambda seed: filled(given, seed),
        shapes=tuple(given),
        made_up=only_shapes,
    )


def _is_own(model: str) -> bool:
    """Whether it is the name of a user's function."""
    return ":" in model and not model.startswith(("zoo:", "hf:"))


def _refuse(model: str) -> None:
    from pase.errors import PaseError

    raise PaseError(
        "pase run runs zoo models, and what your own functions return: (loss_fn, params, *batch) of JAX, or "
        "(module, *batch) or (module, *batch, loss) of PyTorch",
        where=f"model '{model}'",
        fix="name such a function by --model package.module:function",
    )


def run(
    layout: LayoutFile,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            "-n",
            help="Number of devices to use on this machine. Default: that of the layout.",
            min=1,
        ),
    ] = None,
    reduced: Annotated[
        bool, typer.Option("--reduced", help="Use the reduced size of the zoo model, split in the same way.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="package.module:function of a smaller model whose layers have the same names, which is split in the "
            "same way; or of the model itself, if it was compiled in Python. It may return a JAX program or a PyTorch "
            "module.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", help="Random seed of the parameters and the batch.", min=0)
    ] = 0,
    json: JsonOption = False,
    strict: StrictOption = False,
) -> None:
    """Run one training step of a layout here, and check it.

    On a machine without accelerators, the devices are JAX host devices. The model is a zoo model, or your own function
    that returns (loss_fn, params, *batch); arrays are used as they are, and shapes get random values. Of a PyTorch
    module, the function returns (module, *batch) or (module, *batch, loss); its ranks are processes on the CPU (Gloo),
    and what is checked is the loss and every gradient.

    The command compares the loss, every gradient and every updated parameter with those of the unsharded step. It also
    compares the bytes that the compiled program sends with the predicted bytes, except for a pipelined plan, which
    consists of many programs. Last, it checks the gradient: along lines through these parameters, the loss must change
    by the integral of the gradient.

    Prints both losses, the largest difference, and the bytes of each kind of collective. The exit status is 1 if the
    steps do not agree.

    \b
    Examples:
      pase run layout.json --reduced --devices 8
      pase run layout.json --model mypackage.train:two_layers --devices 8
    """
    from pase.api import load
    from pase.compiler.resolve import own_program
    from pase.errors import Infeasible

    plan = load(layout)
    warn_misfit(plan)
    devices = devices or plan.devices
    named = model or plan.model
    _host_devices(devices)
    with progress() as say:
        say("tracing")
        program = own_program(named) if _is_own(named) and not reduced else None
        if program is not None and (module := _torch_module(named, program)) is not None:
            result, found = _in_torch(plan, module, devices, seed, say)
        else:
            chunks = plan.pipeline.chunks if plan.pipeline is not None else None
            small = runnable(named, reduced=reduced, layers=chunks and 2 * chunks, program=program)
            placed, dropped = _placed(plan, small.trace(), devices)
            _check_memory(placed, reduced, plan.model)
            result = step_against_unsharded(placed, small, seed, say)
            result |= {"random_values": small.made_up, "dropped_splits": dropped}
            found = gradient_check(placed, small, seed, say)
    result |= {
        "check": found.as_json(),
        "model": named,
        "reduced": reduced,
        "devices": devices,
        "remarks": [r.to_json() for r in plan.noted],
    }
    if json:
        print_json(result)
    else:
        _print(result)
        console().print(str(found), highlight=False)
    if not result["agrees"] or found.verdict == "off":
        raise Infeasible(
            "the sharded step differs from the unsharded step by more than rounding, or its gradient is wrong",
            where=str(layout),
            fix="please report it",
        )
    strictly(plan.sound, strict)


def _host_devices(devices: int) -> None:
    """Request enough host devices before JAX starts. Accelerators are used if there are enough of them."""
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={devices}".strip()
    import jax

    if len(jax.devices()) < devices:
        jax.config.update("jax_platforms", "cpu")


def _torch_module(model: str, program: tuple[Tree, ...]) -> TracedTorch | None:
    """The training step of a PyTorch module. None if the program is of another framework.

    program: what the user's function returned.
    """
    from pase.frontends import registry

    target, *given = program
    frontend = registry.frontend_of(target)
    if frontend is None or not frontend.modules:
        return None
    from pase.frontends.torch.frontend import TracedTorch

    traced = registry.trace(target, *given, name=model)
    assert isinstance(traced, TracedTorch)
    return traced


def _in_torch(
    plan: PlanData, traced: TracedTorch, devices: int, seed: int, say: Callable[[str], None]
) -> tuple[JsonObject, GradientCheck]:
    """Checks the step on ranks of this machine. Returns (what ``_print`` prints of it, the check)."""
    from pase.backends.torch.local_ranks import on_local_ranks
    from pase.errors import Infeasible
    from pase.files.quantities import bytes_text
    from pase.plan.layout import save

    placed, dropped = _placed(plan, traced, devices)
    name = traced.graph.name
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Each rank makes the whole module, and a copy of it that it splits.
    whole = sum(tensor.nbytes for tensor in traced.module.parameters())
    if (needed := (placed.memory.total + 2 * whole) * devices) > here:
        raise Infeasible(
            f"{devices} ranks need {bytes_text(needed)} together, and there are {bytes_text(here)}",
            where="this machine",
            fix="name a function that makes a smaller model: --model package.module:function",
        )
    say(f"the step on {devices} ranks of PyTorch, and the unsharded module")
    with tempfile.TemporaryDirectory() as folder:
        layout = Path(folder) / "layout.json"
        save(replace(placed, model=name), layout)
        found = on_local_ranks(devices, _checked_rank, layout, name, seed)
    ranks = {} if placed.pipeline is None else {"stage": placed.pipeline.degree}
    result = {"mesh": ranks | placed.mesh.by_name, "loss": found.loss, "agrees": found.verdict != "off"}
    return {**result, "random_values": False, "dropped_splits": dropped}, found


def _checked_rank(layout: Path, model: str, seed: int) -> GradientCheck:
    """``plan.torch.check`` on a rank, of the module that the user's function makes there. Every rank has its seed."""
    import random

    import numpy as np
    import torch

    from pase.api import load
    from pase.compiler.resolve import own_program

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    module, *given = own_program(model)
    plan = load(layout).bind(module, *given)
    last_is_loss = callable(given[-1]) and not isinstance(given[-1], torch.Tensor)
    return plan.torch.check(module, *(given[:-1] if last_is_loss else given), seed=seed)


def _placed(plan: PlanData, traced: Traced, devices: int) -> tuple[PlanData, tuple[str, ...]]:
    """(the plan for this model and the available devices, the ops that it could not split as the layout does)."""
    from pase.compiler.meshes.baselines import complete
    from pase.compiler.meshes.plans import plan_of
    from pase.compiler.problem.problem import SplitProblem
    from pase.compiler.problem.variants import Variant, recomputed
    from pase.compiler.resolve import attached
    from pase.compiler.stages.transfer import staged_elsewhere
    from pase.errors import PaseError
    from pase.frontends.blocks import block_ways
    from pase.plan.transfer import shrunk_mesh, transferred

    if devices == plan.devices:
        try:
            return attached(plan, traced), ()
        except PaseError:  # the model has another size
            pass
    if plan.pipeline is not None:
        return staged_elsewhere(plan, traced, devices)
    problem = SplitProblem.of(traced.graph, devices, plan.machine, plan.cost_model, plan.optimizer)
    if plan.accumulate > 1 or plan.remat:
        how = {b.recompute for b in plan.remat}
        blocks = recomputed(traced, next(w for w in ("light", "attention", "all") if w in how)) if how else ()
        micro = math.gcd(plan.accumulate, block_ways(traced).batch_size(traced))
        problem = problem.varied(traced, Variant(accumulate=micro, blocks=blocks, hoisted=plan.once))
    mesh = shrunk_mesh(plan.mesh, devices)
    pinned, dropped = transferred(plan, problem.graph, mesh)
    configs = complete(problem, pinned, mesh)
    return plan_of(problem, configs, mesh, plan.model, traced), tuple(dropped)


def _check_memory(plan: PlanData, reduced: bool, model: str) -> None:
    """Raise Infeasible if the step, or the unsharded step, needs more memory than there is here."""
    import jax

    from pase.backends.jax.check_reference import unsharded_bytes
    from pase.calibrate.here import memory_of_device
    from pase.errors import Infeasible
    from pase.files.quantities import bytes_text

    device, host = jax.devices()[0], jax.default_backend() == "cpu"
    share, _ = memory_of_device(device, plan.devices)
    smaller = "run fewer layers with " + (
        "--reduced"
        if model.startswith("zoo:")
        else "--model package.module:function, which makes a smaller model"
    )
    alone = unsharded_bytes(plan.traced) if plan.traced is not None else 0.0
    for what, needed, there in (
        (
            f"the step needs {bytes_text(plan.memory.total)} on each of {plan.devices} devices",
            plan.memory.total,
            share,
        ),
        (f"the unsharded step needs {bytes_text(alone)}", alone, share * (plan.devices if host else 1)),
    ):
        if needed > there:
            raise Infeasible(
                f"{what}, and there are {bytes_text(there)}",
                where="this machine",
                fix=smaller if not reduced else "use a machine with more memory",
            )


def step_against_unsharded(
    plan: PlanData, model: Runnable, seed: int, say: Callable[[str], None] = lambda _: None
) -> JsonObject:
    """Run one Adam step with and without sharding.

    Returns both losses, the largest differences, and the predicted and compiled bytes.
    """
    import jax
    import numpy as np
    import optax

    from pase.backends.audit.xla import compare, sharded_step, unsharded_step

    params, *batch = model.init(seed)
    optimizer = optax.adam(1e-3)
    say("the unsharded step")
    whole = unsharded_step(model.loss_fn, optimizer, params, *batch)
    say(f"compiling for {plan.devices} devices, and the sharded step")
    began = time.perf_counter()
    split = sharded_step(plan, optimizer, params, *batch)
    seconds = time.perf_counter() - began
    off = whole.differences(split)
    # Adam divides by the size of the gradient. If a gradient is only rounding noise, so is its sign, and the updates
    # may differ by twice the learning rate. The test is therefore on gradients; for parameters, the bound is loose.
    del off["parameters"]
    moved = max(
        float(np.abs(np.asarray(x) - np.asarray(y)).max())
        for x, y in zip(jax.tree.leaves(whole.parameters), jax.tree.leaves(split.parameters), strict=True)
    )
    ranks = {} if plan.pipeline is None else {"stage": plan.pipeline.degree}
    return {
        "mesh": ranks | plan.mesh.by_name,
        "loss": whole.loss,
        "loss_sharded": split.loss,
        "difference": off,
        "parameter_difference": moved,
        "agrees": all(v <= TOLERANCE for v in off.values()) and moved <= 2.1e-3,
        "collectives": [
            {
                "kind": r.kind,
                "predicted_bytes": r.predicted,
                "predicted_on_cpu": r.on_cpu,
                "compiled_bytes": r.compiled,
            }
            for r in (
                [] if split.compiled is None else compare(plan, split.compiled, split.lowering)
            )  # a pipelined plan is many programs, so there is nothing to compare
        ],
        "seconds": {"compile_and_step": seconds},
    }


def gradient_check(
    plan: PlanData, model: Runnable, seed: int, say: Callable[[str], None] = lambda _: None
) -> GradientCheck:
    """``plan.jax.check`` of the model's step."""
    from pase.backends.jax.pipeline.of_plan import jax_plan

    return jax_plan(plan).check(*model.init(seed), seed=seed, progress=say)


def _print(r: JsonObject) -> None:
    from pase.files.quantities import bytes_text
    from pase.machine import Mesh
    from pase.plan.answer import mesh_text
    from pase.plan.columns import columns

    out = console()
    size = "reduced size, " if r["reduced"] else ""
    mesh = mesh_text(Mesh(names=tuple(r["mesh"]), sizes=tuple(r["mesh"].values())))
    out.print(f"{r['model']} · {size}{r['devices']} devices here · mesh {mesh}")
    if r["random_values"]:
        out.print("where the model gives shapes, values are random; integers are 0 or 1")
    if r["dropped_splits"]:
        out.print(
            f"not split here, because this size does not divide: {', '.join(r['dropped_splits'])}",
        )
    if (d := r.get("difference")) is None:  # of a PyTorch module; the check that follows has its figures
        return
    out.print(
        f"loss {r['loss_sharded']:.6f} sharded, {r['loss']:.6f} unsharded · gradients differ by at most "
        f"{d['gradients']:.1e} of the largest · "
        + ("they agree" if r["agrees"] else "THEY DO NOT AGREE")
        + f" (allowed {TOLERANCE:.0e})",
    )
    formed = ("predicted", "as XLA's CPU backend forms it", "in the compiled program")
    table = columns("collective", *formed, left=("collective",))
    for c in r["collectives"]:
        if c["predicted_bytes"] or c["compiled_bytes"]:
            table.add_row(
                c["kind"],
                *(bytes_text(c[k]) for k in ("predicted_bytes", "predicted_on_cpu", "compiled_bytes")),
            )
    if r["collectives"]:
        out.print(table)
