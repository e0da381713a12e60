"""Puts a plan's predictions beside what the target's own compiler makes of its step (``pase verify``)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pase.backends.audit.ahead import CompiledAhead, compiled_ahead
from pase.backends.jax.spmd.lower import Lowering
from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.files.quantities import bytes_text
from pase.hlo.collectives import HloCollective
from pase.hlo.cycles import cycles
from pase.hlo.kernels import roofline_s
from pase.hlo.schedule import scheduled
from pase.machine import CostModel, Mesh
from pase.plan.types import PlanData

if TYPE_CHECKING:
    from optax import GradientTransformation
    from rich.table import Table as RichTable

__all__ = ["Verified", "verify"]

_ROOFLINE = (
    "each kernel at the machine's rates for large work, collectives by the cost model, in the compiler's order; "
    "nothing was run"
)
_CYCLES = (
    "the compiler's own cycles, and collectives that it does not overlap by the cost model; nothing was run"
)


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A step as the target's compiler made it, and as the plan predicts it.

    peak_bytes: what the compiled step needs at once on one device. usable_bytes: what a device has for it.
    collectives: kind -> bytes of a step on one device (the larger local buffer × the number of times).
    overlapped: kind -> the share of its bytes that has compute between start and done.
    kernels: kernels of a step on one device, without collectives; None for a TPU, whose program is one.
    step_s: seconds of a step, priced from the compiled program (``how`` says how). waited_s: the part of it in which
        the device only waits for collectives. predicted_step_s: the plan's price; None if it is not in seconds.
    lowering: how the step was lowered. remark: what casts doubt on the figures, or "".
    """

    model: str
    target: str
    devices: int
    lowering: str
    peak_bytes: int
    predicted_peak_bytes: int
    usable_bytes: int
    collectives: Mapping[str, int]
    predicted_collectives: Mapping[str, int]
    overlapped: Mapping[str, float]
    kernels: int | None
    step_s: float
    waited_s: float
    predicted_step_s: float | None
    compile_s: float
    how: str
    remark: str = ""
    text: str = dataclasses.field(default="", repr=False)
    """The compiled program."""

    @property
    def bytes_equal(self) -> bool:
        """Whether the step sends what the plan lists, by kind."""
        return dict(self.collectives) == dict(self.predicted_collectives)

    @property
    def fits(self) -> bool:
        """Whether the compiled step fits into a device."""
        return self.peak_bytes <= self.usable_bytes

    def to_json(self) -> JsonObject:
        """What ``pase verify --json`` prints."""
        own = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "text"}
        return own | {"bytes_equal": self.bytes_equal, "fits": self.fits}

    def __str__(self) -> str:
        from pase.files.terminal import text_of

        return text_of(self.report())

    def report(self) -> list[RichTable | str]:
        """Tables and lines for people."""
        from rich.table import Table

        from pase.plan.table import cost_text

        table = Table(title=f"{self.model} on {self.devices} × {self.target}, lowering: {self.lowering}")
        table.add_column("", no_wrap=True)
        for name in ("predicted", "compiled", "predicted/compiled"):
            table.add_column(name, justify="right")

        def row(name: str, predicted: float | None, compiled: float, text: Callable[[float], str]) -> None:
            ratio = f"{predicted / compiled:.3f}" if predicted is not None and compiled else ""
            table.add_row(name, "" if predicted is None else text(predicted), text(compiled), ratio)

        row("peak memory of a device", self.predicted_peak_bytes, self.peak_bytes, bytes_text)
        for kind in dict.fromkeys((*self.predicted_collectives, *self.collectives)):
            sent = self.collectives.get(kind, 0)
            row(f"{kind} of a step", self.predicted_collectives.get(kind, 0), sent, bytes_text)
        row("step", self.predicted_step_s, self.step_s, lambda s: cost_text(s, "s"))
        shares = ", ".join(f"{kind} {share:.0%}" for kind, share in self.overlapped.items())
        lines: list[RichTable | str] = [
            table,
            f"{'fits' if self.fits else 'DOES NOT FIT'}: {bytes_text(self.peak_bytes)} of "
            f"{bytes_text(self.usable_bytes)}; bytes sent are "
            f"{'those of the plan' if self.bytes_equal else 'NOT those of the plan'}",
            f"compute between start and done: {shares or 'nothing is sent'}; a step waits "
            f"{cost_text(self.waited_s, 's')}",
        ]
        if self.kernels is not None:
            lines.append(f"{self.kernels} kernels a step; compiled in {self.compile_s:.0f} s")
        lines.append(f"time: {self.how}")
        return lines + ([f"note: {self.remark}"] if self.remark else [])


def verify(
    plan: PlanData,
    model: CostModel,
    *,
    lowering: Lowering = "auto",
    optimizer: GradientTransformation | None = None,
    timeout_s: float = 3600.0,
    progress: Callable[[str], None] | None = None,
) -> Verified:
    """Compile the plan's step for the machine of the cost model, and compare.

    plan: priced on that machine, with its model attached. The other arguments are those of ``compiled_ahead``, which
    also says what it raises.
    """
    if plan.traced is None:
        raise PaseError(
            "the plan was loaded without its model",
            where=f"the plan for '{plan.model}'",
            fix="attach it with plan.bind(loss_fn, params, *batch)",
        )
    machine = model.machine
    found = compiled_ahead(
        plan, machine, lowering=lowering, optimizer=optimizer, timeout_s=timeout_s, progress=progress
    )
    timed = _cycles(found, plan, model) if machine.compiler and machine.compiler.platform == "tpu" else None
    return _compared(plan, model, found, timed or _scheduled(found, plan, model))


@dataclass(frozen=True, kw_only=True)
class _Timed:
    """What was read from a compiled step."""

    collectives: tuple[HloCollective, ...]
    overlapped: Mapping[str, float]
    kernels: int | None
    step_s: float
    waited_s: float
    trips_known: bool
    how: str


def _scheduled(found: CompiledAhead, plan: PlanData, model: CostModel) -> _Timed:
    step = scheduled(
        found.text,
        kernel_s=lambda kernel: roofline_s(kernel, model.machine.device),
        collective_s=lambda c: _collective_s(c, model, plan.mesh),
        mesh=plan.mesh,
    )
    return _Timed(
        collectives=tuple(s.collective for s in step.collectives),
        overlapped={str(kind): share for kind, share in step.overlapped.items()},
        kernels=step.kernels,
        step_s=step.seconds,
        waited_s=step.waited_s,
        trips_known=step.trips_known,
        how=_ROOFLINE,
    )


def _cycles(found: CompiledAhead, plan: PlanData, model: CostModel) -> _Timed:
    read = cycles(found.text, plan.mesh)
    target = model.machine.compiler
    assert target is not None
    waited = sum(c.count * _collective_s(c, model, plan.mesh) for c in read.waiting)
    whole = _by_kind((c.kind, c.bytes * c.count) for c in (*read.waiting, *read.hidden) if c.group_size > 1)
    hidden = _by_kind((c.kind, c.bytes * c.count) for c in read.hidden if c.group_size > 1)
    return _Timed(
        collectives=(*read.waiting, *read.hidden),
        overlapped={k: hidden.get(k, 0) / n for k, n in whole.items() if n},
        kernels=None,
        step_s=read.total / target.clock_hz + waited,
        waited_s=waited,
        trips_known=read.trips_known,
        how=_CYCLES,
    )


def _collective_s(c: HloCollective, model: CostModel, mesh: Mesh) -> float:
    """Seconds of one execution. A collective along no axes of the mesh is priced over all of them."""
    if c.group_size < 2:
        return 0.0
    axes = (1 << len(mesh.sizes)) - 1 if c.axes is None else c.axes
    if c.kind == "broadcast":
        raise PaseError(
            "a program of a plan has no broadcasts", where=f"HLO op '{c.name}'", fix="please report it"
        )
    return float(model.collective(c.kind, mesh, [axes], c.bytes)[0])


def _compared(plan: PlanData, model: CostModel, found: CompiledAhead, timed: _Timed) -> Verified:
    remarks = []
    if not timed.trips_known:
        remarks.append("the turns of a loop are not known: it counts once, in bytes and seconds")
    along_none = sum(c.axes is None and c.group_size > 1 for c in timed.collectives)
    if along_none:
        remarks.append(
            f"{along_none} collectives run along no axes of the mesh, and are priced over all devices"
        )
    return Verified(
        model=plan.model,
        target=model.machine.name,
        devices=plan.devices,
        lowering=found.lowering,
        peak_bytes=found.peak,
        predicted_peak_bytes=plan.memory.total,
        usable_bytes=model.machine.device.usable_bytes,
        collectives=_by_kind((c.kind, c.bytes * c.count) for c in timed.collectives if c.group_size > 1),
        predicted_collectives=_by_kind((c.kind, c.nbytes * c.times) for c in plan.collectives),
        overlapped=timed.overlapped,
        kernels=timed.kernels,
        step_s=timed.step_s,
        waited_s=timed.waited_s,
        predicted_step_s=plan.cost if plan.unit == "s" else None,
        compile_s=found.compile_s,
        how=timed.how,
        remark="; ".join(remarks),
        text=found.text,
    )


def _by_kind(pairs: Iterable[tuple[str, float]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for kind, nbytes in pairs:
        out[kind] = out.get(kind, 0) + round(nbytes)
    return {k: n for k, n in out.items() if n}
