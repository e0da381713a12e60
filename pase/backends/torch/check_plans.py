"""Runs ``plan.torch.check`` for parallel modules, and the unsharded module with which gradients are compared."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from pase.backends.jax.check_reference import unsharded_bytes
from pase.backends.torch.check import TorchAgainst, TorchSteps, check_module, rounded_differently, wide
from pase.backends.torch.check_state import CheckedModule
from pase.errors import PaseError
from pase.files.quantities import bytes_text
from pase.frontends.torch.doubts import random_ops
from pase.frontends.torch.export.module import step_of
from pase.frontends.torch.lower import source_of
from pase.plan.gradient_check import GradientCheck, GradientDifference, GradientReference
from pase.plan.gradient_lines import CheckLines
from pase.pytree import Tree

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module, Parameter

    from pase.backends.torch.parallel import ParallelModule
    from pase.backends.torch.pipeline.run import PipelinedModule

__all__ = ["TorchAgainst", "check_parallel", "check_stages", "unsharded_copy"]


def unsharded_copy(module: Module) -> Module:
    """A copy of a module. Raises PaseError if the module is already sharded."""
    for path, p in module.named_parameters():
        if hasattr(p, "placements"):
            raise PaseError(
                "the parameter is already sharded",
                where=f"module.{path}",
                fix="call check(*batch) on the step that parallelize returned, or on train_step's 'parallel'",
            )
    return copy.deepcopy(module)


def check_parallel(
    p: ParallelModule,
    batch: tuple[Tree, ...],
    against: TorchAgainst,
    lines: CheckLines,
) -> GradientCheck:
    """Check a module that is not pipelined, and restore its state."""
    mine = {path: x for path, x in p.module.named_parameters() if x.requires_grad}
    run = CheckedModule(
        backward=p.backward,
        module=p.module,
        parts=(p,),
        batch=batch,
        names=tuple(mine),
        mine=dict(enumerate(mine.values())),
    )
    reference = partial(_reference, p, run, against)
    devices = p.plan.mesh.devices
    return check_module(run, p.plan.traced, devices, p.compiler, reference, lines)


def check_stages(
    p: PipelinedModule,
    batch: tuple[Tree, ...],
    against: TorchAgainst,
    lines: CheckLines,
) -> GradientCheck:
    """Check a pipelined module, and restore its state."""
    if against == "unsharded":
        raise PaseError(
            "the stages of a pipeline are on different ranks, so no rank has the unsharded module",
            where="against",
            fix="use against='none' or 'auto'",
        )
    program = p.plan.traced.program
    names = tuple(path for path in program.order if path not in program.frozen)
    here = dict(p.module.named_parameters())
    run = CheckedModule(
        backward=p.backward,
        module=p.module,
        parts=tuple(p.stages.values()),
        batch=batch,
        names=names,
        mine={i: here[path] for i, path in enumerate(names) if path in here},
    )
    why = "not asked for" if against == "none" else "the stages of a pipeline are on different ranks"
    devices = p.plan.pipeline.degree * p.plan.splits[0].mesh.devices
    return check_module(run, p.plan.traced, devices, None, lambda steps: why, lines)


def _reference(
    p: ParallelModule, run: CheckedModule, against: TorchAgainst, steps: TorchSteps
) -> GradientReference | str:
    """The gradients of the unsharded module at the lines' first point. Rank 0 computes them, and every rank gets the
    result. Returns a text if there is none, which says why."""
    import torch.distributed as dist

    if against == "none":
        return "not asked for"
    if draws := next(random_ops(p.plan.traced), None):
        return (
            f"the model draws random values ({draws.target} at {source_of(draws).place or 'an unknown line'}), and the "
            f"unsharded module would draw others"
        )
    if outside := [path for path in p.buffers.written if path in p.lifted]:
        return f"the step writes '{outside[0]}', which is not a buffer of the module"
    if steps.on_any_rank(_in_parts(p, run)):
        return "each rank was given its part of the batch, but the unsharded module needs the whole batch"
    first = dist.get_rank() == 0
    if why := _sent_by_first(_too_large(p) if first else None, p.device):
        return str(why)
    steps.step(steps.start)
    state = [_whole_of(p.buffer(path)) for path in p.buffers.written]
    steps.held.before_step()
    whole = _whole_tensors(p.module, keep=first)
    runs, error = _unsharded(p, run, whole, steps.coarsest) if first else (None, None)
    if said := _sent_by_first(None if error is None else f"{type(error).__name__}: {error}", p.device):
        raise PaseError(
            f"the unsharded module could not be run on rank 0: {said}",
            where="check",
            fix="use against='none'",
        ) from error
    differences = []
    for k, (path, x, mine) in enumerate(zip(run.names, run.mine.values(), steps.gradients, strict=True)):
        whole_gradient = _whole(mine, x)  # a collective, so every rank takes part
        if runs is not None:
            right, rounded = (r.gradients[k] for r in runs)
            differences.append(_difference(path, whole_gradient, right, rounded))
    if runs is None:
        return _sent_by_first(None, p.device)  # type: ignore[return-value]
    there, too = (r.loss for r in runs)
    made = GradientReference(
        kind="the unsharded module",
        exact=True,
        loss=steps.loss,
        loss_reference=there,
        loss_allowed=16 * abs(too - there) + 32 * steps.loss_eps * abs(there),
        differences=tuple(differences),
        state=tuple(
            _difference(path, mine, *(r.state[path] for r in runs))
            for path, mine in zip(p.buffers.written, state, strict=True)
        ),
    )
    return _sent_by_first(made, p.device)  # type: ignore[return-value]


def _sent_by_first(value: object, device: torch.device) -> object:
    """Rank 0's value, on every rank."""
    import torch.distributed as dist

    held = [value]
    dist.broadcast_object_list(held, 0, device=device)
    return held[0]


def _in_parts(p: ParallelModule, run: CheckedModule) -> bool:
    """Whether this rank was given only its part of the batch."""
    from torch.utils._pytree import tree_leaves

    wanted = tree_leaves((p.plan.whole or p.plan.traced).batch)
    both = zip(tree_leaves(run.batch), wanted, strict=True)
    return any(getattr(x, "shape", None) != getattr(y, "shape", None) for x, y in both)


def _too_large(p: ParallelModule) -> str | None:
    """Why the unsharded module does not fit on this rank's device; None if it does."""
    import torch

    needed = unsharded_bytes(p.plan.whole or p.plan.traced)
    if p.device.type == "cuda":
        free = float(torch.cuda.mem_get_info(p.device)[0])
    else:
        free = float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    if needed <= free:
        return None
    return f"the unsharded module takes {bytes_text(needed)}, but rank 0 has {bytes_text(free)} free"


def _whole(part: Tensor, like: Parameter) -> Tensor:
    """The whole of a tensor that has a parameter's layout. Every rank must call it."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part.contiguous(),
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    ).full_tensor()


def _whole_tensors(module: Module, *, keep: bool) -> dict[int, Tensor]:
    """id of a sharded tensor of the module -> the whole tensor. Every rank must call it.

    keep: whether to return the tensors on this rank.
    """
    from torch import nn

    out: dict[int, Tensor] = {}
    for x in (*module.parameters(), *module.buffers()):
        if not hasattr(x, "placements"):
            continue
        whole = _whole_of(x)
        if keep:
            out[id(x)] = nn.Parameter(whole, x.requires_grad) if isinstance(x, nn.Parameter) else whole
    return out


def _whole_of(x: Tensor) -> Tensor:
    """A whole copy of a tensor. Every rank must call it."""
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


@dataclass(frozen=True, kw_only=True)
class _UnshardedStep:
    """A loss, the gradients of the trained parameters, and the buffers after the step."""

    loss: float
    gradients: Sequence[Tensor]
    state: Mapping[str, Tensor]


def _unsharded(
    p: ParallelModule, run: CheckedModule, whole: dict[int, Tensor], coarsest: float
) -> tuple[list[_UnshardedStep] | None, Exception | None]:
    """Two runs of the unsharded module, the second with all numbers rounded differently; or the exception that it
    raised, which this rank must first send to the waiting ranks."""
    try:
        alone = copy.deepcopy(p.module, dict(whole))
        return [_run(p, run, alone, k) for k in (None, coarsest)], None
    except Exception as e:
        return None, e


def _run(p: ParallelModule, run: CheckedModule, module: Module, coarsest: float | None) -> _UnshardedStep:
    """One run of the unsharded module.

    coarsest: if given, all numbers are rounded differently, by at least this spacing.
    """
    import torch
    from torch.utils._pytree import tree_map_only

    batch = tree_map_only(torch.Tensor, lambda x: x.detach().to(p.device), run.batch)
    written = [*module.buffers(), *(x for x in module.parameters() if not x.requires_grad)]
    before = [(x, x.clone()) for x in written]
    trained = dict(module.named_parameters())
    if coarsest is not None:
        with torch.no_grad():
            for k, path in enumerate(run.names):
                trained[path].copy_(rounded_differently(trained[path], k, coarsest))
        batch = tree_map_only(torch.Tensor, lambda x: rounded_differently(x, len(trained), coarsest), batch)
    traced, k = p.plan.whole or p.plan.traced, p.plan.accumulate
    loss = step_of(module, traced.loss)(*batch)
    gradients = torch.autograd.grad(loss, [trained[path] for path in run.names], materialize_grads=True)
    if k > 1:  # the micro-batches of a step write the buffers one after the other
        _put_back(before)
        with torch.no_grad():
            for i in range(k):
                step_of(module, traced.loss)(*p.plan.micro_batch(batch, i))
    held = {**trained, **dict(module.named_buffers())}
    state = {path: held[path].detach().clone() for path in p.buffers.written}
    _put_back(before)
    return _UnshardedStep(loss=float(loss.detach()), gradients=gradients, state=state)


def _put_back(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    import torch

    with torch.no_grad():
        for x, was in pairs:
            x.copy_(was)


def _difference(name: str, mine: Tensor, right: Tensor, rounded: Tensor) -> GradientDifference:
    import torch

    if not (right.is_floating_point() or right.is_complex()):
        mine, right, rounded = (x.double() for x in (mine, right, rounded))
    off, largest, noise = (
        float(wide(x).abs().max()) if x.numel() else 0.0 for x in (mine - right, right, rounded - right)
    )
    return GradientDifference(
        name=name, difference=off, largest=largest, noise=noise, eps=float(torch.finfo(right.dtype).eps)
    )
