"""``pase machines``: lists the known machines, with the source of each number."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from pase.files.json_values import JsonObject
from pase.files.terminal import console

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table as RichTable

    from pase.machine import Machine

__all__ = ["machines"]

PURPOSE = "Price what you have"

_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _si(value: float, unit: str) -> str:
    for scale, prefix in _PREFIXES:
        if value >= scale:
            return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def _as_json(machine: Machine) -> JsonObject:
    return {**dataclasses.asdict(machine), "digest": machine.digest}


def _table(all_machines: list[Machine]) -> RichTable:
    from rich.table import Table

    from pase.machine import DEFAULT

    table = Table(title="Machines (--machine NAME, or the path of a .toml file)")
    for column in ("name", "device", "memory", "memory bandwidth", "16-bit matmul", "links, innermost first"):
        table.add_column(column, no_wrap=column == "name", overflow="fold")
    for m in all_machines:
        links = []
        for level in m.levels:
            ways = "" if level.ways == 0 else f"×{level.ways} "
            links.append(f"{level.name} {ways}{_si(level.bandwidth_bytes_per_s, 'B/s')}")
        table.add_row(
            m.name + (" (default)" if m.name == DEFAULT else ""),
            m.device.name,
            _si(m.device.memory_bytes, "B"),
            _si(m.device.memory_bandwidth_bytes_per_s, "B/s"),
            _si(max(m.device.peak("bfloat16"), m.device.peak("float16")), "FLOP/s"),
            "; ".join(links),
        )
    return table


def _details(m: Machine) -> Group:
    """Tables of a machine's numbers and of their sources."""
    from rich.console import Group
    from rich.table import Table

    device = m.device
    numbers = Table(title=f"{m.name}: {m.title}", show_header=False)
    numbers.add_row("digest", m.digest)
    numbers.add_row("device", device.name)
    numbers.add_row("memory", _si(device.memory_bytes, "B"))
    numbers.add_row("memory bandwidth", _si(device.memory_bandwidth_bytes_per_s, "B/s"))
    for dtype, peak in device.peak_flops.items():
        numbers.add_row(f"peak {dtype}", _si(peak, "FLOP/s"))
    if device.products is not None:
        for dtype, part in device.products.rate.items():
            slow = device.products.unaligned.get(dtype)
            rows = "" if slow is None else f", {slow:.0%} if rows are no multiple of 16 bytes"
            numbers.add_row(f"products, {dtype}", f"{part:.0%} of the peak{rows}")
        numbers.add_row("products at the power limit", f"{device.products.steady:.0%} of that")
    for kind, part in device.efficiency.items():
        numbers.add_row(f"efficiency, {kind}", f"{part:.0%}")
    numbers.add_row("launch", f"{device.launch_s * 1e6:g} µs")
    if m.host is not None:
        each = f"{m.host.program_s * 1e6:g} µs a program, {m.host.op_s * 1e6:g} µs an op by itself"
        numbers.add_row("the host's launch", each)
    for level in m.levels:
        ways = "any number" if level.ways == 0 else f"{level.ways} ways"
        rate = f"{_si(level.bandwidth_bytes_per_s, 'B/s')} a device and direction × {level.efficiency:.3g}"
        numbers.add_row(
            f"link {level.name}", f"{ways}, {level.topology}, {rate}, {level.latency_s * 1e6:g} µs a step"
        )
    for a in m.algorithms:
        steps = ", ".join(f"{s * 1e6:g}" for s in a.step_s)
        most = f", at most {_si(a.most_bytes_per_s, 'B/s')}" if a.most_bytes_per_s else ""
        between = a.most_between_bytes_per_s
        most += f", at most {_si(between, 'B/s')} to a peer in another node" if between else ""
        few = f", from {a.least_ways} devices on" if a.least_ways > 1 else ""
        numbers.add_row(
            f"{a.algorithm}, {a.protocol}",
            f"{a.launch_s * 1e6:g} µs + {steps} µs a step, {a.bandwidth_fraction:.3g} of the bandwidth"
            f"{most}{few}{', for programs that name it' if a.named else ''}",
        )
    measured = len(device.matmul_tables) + (device.memory_curve is not None) + len(m.collectives)
    numbers.add_row(
        "measured tables", str(measured) if measured else "none: figures of vendors and libraries"
    )
    for key, value in m.provenance.items():
        numbers.add_row(key, value)
    sources = Table(title="Sources")
    sources.add_column("number", no_wrap=True)
    sources.add_column("from", overflow="fold")
    for key, value in sorted(m.sources.items()):
        sources.add_row(key, value)
    return Group(numbers, sources)


def machines(
    name: Annotated[
        str | None,
        typer.Argument(help="The machine to show: a name, or the path of a .toml file.", metavar="NAME"),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")
    ] = False,
) -> None:
    """List the machines that come with pase, or show one of them.

    Without NAME, prints one line for each machine: memory, bandwidth, matmul rate and links. With a NAME or a file,
    prints all numbers of that machine, each with its source.

    Other commands take --machine NAME, or --machine FILE for a machine file that you have edited or that pase calibrate
    has written.

    \b
    Examples:
      pase machines
      pase machines h100x8
    """
    from pase.machine import load, names

    shown = [load(name)] if name else [load(n) for n in names()]
    if as_json:
        found = [_as_json(m) for m in shown]
        print(json.dumps(found[0] if name else {"machines": found}))
        return

    console().print(_details(shown[0]) if name else _table(shown))
