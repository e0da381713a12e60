"""``pase compare``: what people do by hand, and ours, priced alike."""

from __future__ import annotations

from pase.commands.options import (
    CostModelOption,
    Devices,
    DimOption,
    JsonOption,
    MachineOption,
    Model,
    Optimizer,
    Unknown,
    console,
    parse_dims,
    print_json,
    progress,
)

__all__ = ["compare"]


def compare(
    model: Model,
    devices: Devices,
    machine: MachineOption = None,
    cost_model: CostModelOption = "analytic",
    optimizer: Optimizer = "adam",
    unknown: Unknown = "error",
    dim: DimOption = None,
    json: JsonOption = False,
) -> None:
    """Data parallelism, FSDP, one weird trick, Megatron at every degree, and ours, side by side.

    Each is a strategy on the same graph, made as good as its method allows by the same exact search, and priced
    by the same cost model. Predictions, not measurements. Ours is never worse than any of them.

    \b
    Example:
      pase compare zoo:gpt2 --devices 32
    """
    from pase.api import compare as all_plans

    with progress() as say:
        rows = all_plans(
            model, devices=devices, machine=machine, cost_model=cost_model, optimizer=optimizer, unknown=unknown,
            dims=parse_dims(dim), progress=say,
        )  # fmt: skip
    ours = next(plan for name, plan in rows if name == "pase")
    table = [
        {
            "name": name, "mesh": dict(zip(p.mesh.names, p.mesh.sizes, strict=True)),
            "cost_s": p.cost if p.unit == "s" else None, "cost": p.cost, "compute": p.compute,
            "communication": p.communication, "memory_bytes": p.memory.total, "fits": p.fits,
            "comm_bytes": sum(c.nbytes * c.times for c in p.collectives),
        }
        for name, p in rows
    ]  # fmt: skip
    if json:
        print_json(
            {"model": ours.model, "devices": devices, "machine": ours.machine, "unit": ours.unit,
             "strategies": table, "skipped": dict(ours.skipped)}
        )  # fmt: skip
        return
    from rich.table import Table

    from pase.plan.table import bytes_text, cost_text

    out = Table(box=None, header_style="bold", pad_edge=False)
    for column in (
        "strategy",
        "mesh",
        "step",
        "against ours",
        "compute",
        "communication",
        "moves a device",
        "memory",
        "fits",
    ):
        out.add_column(column, justify="left" if column in ("strategy", "mesh", "fits") else "right")
    for (name, p), row in zip(rows, table, strict=True):
        out.add_row(
            name, " ".join(f"{k}={v}" for k, v in zip(p.mesh.names, p.mesh.sizes, strict=True)),
            cost_text(p.cost, p.unit), f"×{p.cost / ours.cost:.3f}" if ours.cost else "", cost_text(p.compute, p.unit),
            cost_text(p.communication, p.unit), bytes_text(float(str(row["comm_bytes"]))), bytes_text(p.memory.total),
            "yes" if p.fits else "NO", style="bold" if name == "pase" else None,
        )  # fmt: skip
    c = console()
    c.print(
        f"{ours.model} on {devices} devices of {ours.machine}, cost model '{ours.cost_model}': predictions",
        highlight=False,
    )
    c.print(out)
    for name, why in ours.skipped.items():
        c.print(f"without {name}: {why}", highlight=False)
