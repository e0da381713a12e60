"""Compiles a plan's step for devices that are not here.

The step is traced for a mesh of abstract devices and exported (``jax.export``), which needs neither a device nor the
target's compiler. Another process compiles what was exported (``compile_child``).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pase
from pase.backends.audit.targets import TargetDevices, devices_of
from pase.backends.jax.make import one_program_plan
from pase.backends.jax.one_program import OneProgramPlan
from pase.backends.jax.spmd.lower import Lowering
from pase.backends.jax.spmd.values import NotManual
from pase.backends.jax.steps.stepper import Stepper
from pase.errors import PaseError, install_line
from pase.frontends.jax.leaves import arrays, trained
from pase.frontends.jax.versions import assuming_cudnn
from pase.machine import Machine
from pase.plan.types import PlanData
from pase.pytree import Tree

if TYPE_CHECKING:
    from jax import Array
    from optax import GradientTransformation

__all__ = ["CompiledAhead", "compiled_ahead"]

_POLL_S = 0.5
_SAID = 2000
"""Characters of the compiler's output that an error quotes."""


@dataclass(frozen=True, kw_only=True)
class CompiledAhead:
    """A step compiled for a target. Sizes are bytes on one device.

    text: the compiled program. lowering: how the step was lowered; never "auto". peak: what the compiler says the step
    needs at once, if it says so, otherwise what its arguments, results and temporaries take.
    """

    text: str
    lowering: Lowering
    compile_s: float
    peak: int
    arguments: int
    temporaries: int


@dataclass(frozen=True, kw_only=True)
class _Exported:
    """An exported step. donated: how many of its first arguments it may overwrite."""

    data: bytes
    donated: int
    lowering: Lowering


def compiled_ahead(
    plan: PlanData,
    machine: Machine,
    *,
    lowering: Lowering = "auto",
    optimizer: GradientTransformation | None = None,
    timeout_s: float = 3600.0,
    progress: Callable[[str], None] | None = None,
) -> CompiledAhead:
    """Compile the plan's step for the machine.

    optimizer: of a training step, by default optax's optimizer of the plan's name. timeout_s: how long the compiler may
    take. progress: called with a line of text while the compiler works.

    Raises PaseError if the target has no compiler here, if the plan is not one program (pipelines), and with the
    compiler's own words if it refuses the program, crashes or takes too long.
    """
    say = progress or (lambda _: None)
    if plan.pipeline is not None:
        raise PaseError(
            "a pipelined plan consists of many programs, which are not compiled ahead of time",
            where=f"the plan for '{plan.model}'",
            fix="verify a plan without stages (pipeline='none')",
        )
    devices = devices_of(machine, plan.devices)
    devices.check(machine)
    say(f"tracing the step for {plan.devices} × {machine.name}")
    exported = _exported(one_program_plan(plan), plan, devices, lowering, optimizer)
    with tempfile.TemporaryDirectory(prefix="pase-verify-") as name:
        folder = Path(name)
        job = {
            "platform": devices.platform,
            "topology": devices.topology,
            "config": devices.config,
            "devices": plan.devices,
            "sizes": list(plan.mesh.sizes),
            "names": list(plan.mesh.names),
            "donated": exported.donated,
        }
        (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
        (folder / "step.bin").write_bytes(exported.data)
        _run(folder, devices, f"{plan.devices} × {machine.name}", timeout_s, say)
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        text = (folder / "compiled.txt").read_text(encoding="utf-8")
    whole = result["arguments"] + result["outputs"] - result["aliased"] + result["temporaries"]
    return CompiledAhead(
        text=text,
        lowering=exported.lowering,
        compile_s=result["compile_s"],
        peak=result["peak"] if devices.platform == "tpu" else whole,
        arguments=result["arguments"],
        temporaries=result["temporaries"],
    )


def _exported(
    jp: OneProgramPlan,
    plan: PlanData,
    devices: TargetDevices,
    lowering: Lowering,
    optimizer: GradientTransformation | None,
) -> _Exported:
    from jax.sharding import AbstractDevice, AbstractMesh

    device = AbstractDevice(device_kind=devices.lowered_for, num_cores=None, platform=devices.platform)
    mesh: Tree = AbstractMesh(plan.mesh.sizes, plan.mesh.names, abstract_device=device)
    *first, last = jp._lowerings(lowering, mesh)
    with assuming_cudnn():
        for way in first:
            try:
                return _exported_as(jp, plan, mesh, devices.lowered_for, way, optimizer)
            except NotManual as e:
                warnings.warn(e.left, stacklevel=4)
        return _exported_as(jp, plan, mesh, devices.lowered_for, last, optimizer)


def _exported_as(
    jp: OneProgramPlan,
    plan: PlanData,
    mesh: Tree,
    platform: str,
    way: Lowering,
    optimizer: GradientTransformation | None,
) -> _Exported:
    import jax
    from jax import export

    shapes = jp._shapes()
    if jp.traced.mode == "train":
        chosen = _optimizer(plan.optimizer) if optimizer is None else optimizer
        step = jp.train_step(chosen, mesh, lowering=way)
        shapes = shapes[0], jax.eval_shape(chosen.init, trained(shapes[0])), *shapes[1:]
    else:
        step = jp.step(mesh, lowering=way)
    if not isinstance(step, Stepper):
        raise PaseError(
            "its bucket plan applies gradients in later steps, so its step is several programs",
            where=f"the plan for '{plan.model}'",
            fix="verify the plan without delayed updates",
        )
    given = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), arrays(shapes), step.in_shardings
    )
    leaves, tree = jax.tree.flatten(given)
    positions = jax.tree.unflatten(tree, range(len(leaves)))
    donated = [i for k in step.donate for i in jax.tree.leaves(positions[k])]
    order = [*donated, *(i for i in range(len(leaves)) if i not in set(donated))]

    def flat(*ordered: Array) -> tuple[Tree, ...]:
        by_place = dict(zip(order, ordered, strict=True))
        return tuple(
            jax.tree.leaves(step.run(*jax.tree.unflatten(tree, [by_place[i] for i in range(len(leaves))])))
        )

    jitted = jax.jit(
        flat,
        out_shardings=_for_each(jax.eval_shape(step.run, *given), step.out_shardings),
        donate_argnums=tuple(range(len(donated))),
    )
    made = export.export(jitted, platforms=[platform], disabled_checks=_kernels())(
        *(leaves[i] for i in order)
    )
    try:
        data = bytes(made.serialize())
    except ImportError as e:
        raise PaseError(
            "exporting a step needs the package flatbuffers", where="pase verify", fix=install_line("jax")
        ) from e
    return _Exported(data=data, donated=len(donated), lowering=way)


def _for_each(results: Tree, stored: Tree) -> tuple[Tree, ...]:
    """The sharding of each array in the results; None if XLA chooses. stored: a prefix of their tree.

    A None in the results is no array: an optimizer has no state for what it does not train.
    """
    import jax

    chosen_by_xla = object()
    marked = jax.tree.map(lambda s: chosen_by_xla if s is None else s, stored, is_leaf=lambda s: s is None)
    every = jax.tree.leaves(jax.tree.broadcast(marked, results))
    return tuple(None if s is chosen_by_xla else s for s in every)


def _kernels() -> list[Tree]:
    """Kernels of libraries whose form JAX does not promise to keep. The step is compiled at once, by the same JAX."""
    from jax.export import DisabledSafetyCheck

    cudnn = ("Softmax", "ScaleBiasSoftmax")
    names = (*(f"__cudnn$fmha{n}{way}" for n in cudnn for way in ("", "Backward")), "tpu_custom_call")
    return [DisabledSafetyCheck.custom_call(n) for n in names]


def _optimizer(name: str) -> GradientTransformation:
    """optax's optimizer with the state that the plan counts."""
    import optax

    made = {
        "sgd": lambda: optax.sgd(1e-3),
        "momentum": lambda: optax.sgd(1e-3, momentum=0.9),
        "adam": lambda: optax.adam(1e-4),
        "adamw": lambda: optax.adamw(1e-4),
        "lion": lambda: optax.lion(1e-4),
        "adafactor": lambda: optax.adafactor(1e-3),
    }
    if name not in made:
        raise PaseError(
            f"optax has no optimizer of the name '{name}'",
            where="the plan's optimizer",
            fix="give one: plan.verify(optimizer=…)",
        )
    return made[name]()


def _run(
    folder: Path, devices: TargetDevices, target: str, timeout_s: float, say: Callable[[str], None]
) -> None:
    """Run the compiler in a process of its own until it has written its result."""
    root = str(Path(pase.__file__).parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **devices.environment, "PYTHONPATH": os.pathsep.join(paths)}
    log = folder / "log.txt"
    command = [sys.executable, "-m", "pase.backends.audit.compile_child", str(folder)]
    with log.open("wb") as out:
        child = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            deadline = time.monotonic() + timeout_s
            while child.poll() is None:
                if time.monotonic() > deadline:
                    raise PaseError(
                        f"the compiler did not finish within {timeout_s:g} s",
                        where=target,
                        fix="allow it more time (--timeout), or verify a smaller model",
                    )
                say(f"compiling for {target}")
                try:
                    child.wait(_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if (folder / "result.json").exists():
        return
    if (folder / "error.json").exists():
        error = json.loads((folder / "error.json").read_text(encoding="utf-8"))
        raise PaseError(
            f"the compiler refuses the program: {error['type']}: {error['message'][:_SAID]}",
            where=target,
            fix="try the other lowering (--lowering), or report this with the message",
        )
    said = log.read_text(encoding="utf-8", errors="replace")[-_SAID:].strip()
    status = child.returncode
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    raise PaseError(
        f"the compiler {how}: {said or 'it printed nothing'}",
        where=target,
        fix="if it was killed, this machine has too little memory to compile the program; otherwise report the message",
    )
