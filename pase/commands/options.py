"""Options that several commands share, and how they report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = [
    "Accumulate",
    "ChoicesTimeLimit",
    "CostModelOption",
    "Devices",
    "DimOption",
    "JsonOption",
    "Layout",
    "LayoutMachine",
    "LayoutModel",
    "MachineOption",
    "MemoryLimit",
    "MeshOption",
    "Model",
    "Optimizer",
    "Overlap",
    "Remat",
    "Unknown",
    "console",
    "parse_bytes",
    "parse_dims",
    "print_json",
    "progress",
]

Model = Annotated[
    str,
    typer.Argument(
        help="zoo:NAME (with settings: 'zoo:gpt2?batch=128&seq=1024'), a model file (.onnx, .pb, a SavedModel's "
        "folder), or package.module:function, where the function returns (loss_fn, params, *batch) or a model of "
        "a framework's own; shapes suffice.",
        metavar="MODEL",
        show_default=False,
    ),
]
Layout = Annotated[
    Path,
    typer.Argument(help="A layout.json that 'pase compile' wrote.", metavar="LAYOUT", show_default=False),
]
LayoutModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="The layout's model, where it is not a zoo model: it is traced anew, to price what else could be.",
    ),
]
LayoutMachine = Annotated[
    str | None, typer.Option("--machine", help="The machine file of the layout, where it is not pase's own.")
]
ChoicesTimeLimit = Annotated[
    float, typer.Option("--time-limit", help="Seconds for the next-best choices of all layers.", min=0.0)
]
Devices = Annotated[
    int, typer.Option("--devices", "-n", help="How many devices to split the model over.", min=1)
]
MeshOption = Annotated[
    str | None,
    typer.Option(
        "--mesh", help="Fix the mesh: 4x8, or with names data=4,model=8. Default: every mesh is searched."
    ),
]
MachineOption = Annotated[
    str | None, typer.Option("--machine", help="A name ('pase machines') or a .toml file. Default: h100x8.")
]
CostModelOption = Annotated[
    str,
    typer.Option("--cost-model", help="analytic: seconds on the machine; paper: PaSE's FLOP-equivalents."),
]
Optimizer = Annotated[
    str,
    typer.Option(
        "--optimizer", help="Whose state is counted and whose update is priced: sgd, momentum, adam, …"
    ),
]
Unknown = Annotated[
    str,
    typer.Option(
        "--unknown", help="At an op without a rule: 'error', or 'replicate' (it is then not split)."
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else on standard output.")
]


DimOption = Annotated[
    list[str] | None,
    typer.Option(
        "--dim", "--trips",
        help="Bind a symbolic size of the model, --dim batch=64, or say how often a while loop turns, "
        "--trips while0=100. May be given several times.",
        metavar="NAME=SIZE",
    ),
]  # fmt: skip

MemoryLimit = Annotated[
    str | None,
    typer.Option(
        "--memory-limit",
        help="What a device may hold: 80GiB, 16e9, or 'machine'. Default: reported, not enforced.",
    ),
]


Accumulate = Annotated[
    int | None,
    typer.Option(
        "--accumulate",
        help="Micro-batches of a step, gradients summed over them. Default: 1, or what the memory limit asks for.",
        min=1,
    ),
]
Overlap = Annotated[
    str,
    typer.Option(
        "--overlap",
        help="'gradients': price of their sums only what backward cannot hide. Default 'none': all.",
    ),
]
Remat = Annotated[
    str,
    typer.Option(
        "--remat",
        help="Compute repeated blocks again in backward: 'all', 'none', or 'auto': as the memory limit asks for.",
    ),
]


def parse_dims(given: list[str] | None) -> dict[str, int]:
    """
    >>> parse_dims(["batch=64", "seq=128"])
    {'batch': 64, 'seq': 128}
    """
    from pase.errors import PaseError

    out: dict[str, int] = {}
    for text in given or ():
        name, equals, size = text.rpartition("=")
        if (
            not equals
            or not name.strip()
            or not (size.strip().isdecimal() and size.isascii())
            or len(size) > 18
        ):
            raise PaseError(f"--dim '{text}': write NAME=SIZE, for example --dim batch=64")
        out[name.strip()] = int(size)
    return out


def parse_bytes(text: str, machine: str | None) -> float:
    """Bytes of '80GiB', '16GB', '16e9', or of the machine's memory for 'machine'.

    >>> parse_bytes("80GiB", None) == 80 * 2**30, parse_bytes("16e9", None)
    (True, 16000000000.0)
    """
    from pase.errors import PaseError

    if text == "machine":
        from pase.machine import DEFAULT, load

        return float(load(machine or DEFAULT).device.memory_bytes)
    scales = {
        "KiB": 2**10,
        "MiB": 2**20,
        "GiB": 2**30,
        "TiB": 2**40,
        "KB": 1e3,
        "MB": 1e6,
        "GB": 1e9,
        "TB": 1e12,
        "B": 1,
    }
    number, scale = text.strip(), 1.0
    for unit, factor in scales.items():
        if number.lower().endswith(unit.lower()):
            number, scale = number[: -len(unit)], float(factor)
            break
    try:
        value = float(number) * scale
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise PaseError(f"--memory-limit '{text}': write 80GiB, 16e9, or machine")
    return value


def console(*, err: bool = False) -> Any:
    """A rich Console on standard output or error; wide enough for the tables where it is not a terminal."""
    from rich.console import Console

    c = Console(stderr=err, soft_wrap=False)
    return c if c.is_terminal else Console(stderr=err, width=160)


@contextmanager
def progress() -> Iterator[Any]:
    """say(text): what goes on, on standard error while it is a terminal; nothing elsewhere."""
    from rich.console import Console

    err = Console(stderr=True)
    if not err.is_terminal:
        yield lambda text: None
        return
    with err.status("") as status:
        yield status.update


def print_json(data: Any) -> None:
    json.dump(data, sys.stdout, indent=1)
    sys.stdout.write("\n")
