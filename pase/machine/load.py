"""Reads machine files: TOML in, ``Machine`` out. Errors name the file, the place in it, and the remedy."""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Literal

from pase.errors import PaseError
from pase.files.codec import AtLeastOne, convert, json_schema, refuse_control
from pase.files.json_values import JsonObject
from pase.machine.groups import GROUPS_SCHEMA, GroupedMachine, GroupsFile, grouped
from pase.machine.tables import check_attention, check_curve, check_matmul
from pase.machine.types import CollectiveCurve, CollectiveKind, Curve, Device, Machine

__all__ = ["DEFAULT", "SCHEMA", "load", "made_groups_schema", "made_schema", "names", "parse", "schema"]

MachineVersion = Literal["pase.machine/1"]
SCHEMA: MachineVersion = "pase.machine/1"
DEFAULT = "h100x8"
# Fractions of the peak. A CPU's convolutions can exceed 1: its peak was measured with thin matmuls, which are slower.
_MOST_EFFICIENT = {"matmul": 1.0, "conv": 8.0, "memory": 1.0, "cast": 1.0, "window": 1.0}


@dataclass(frozen=True, kw_only=True)
class MeasuredForm(Curve):
    """A measured collective: its curve, and the number of devices that it joins at each link level, innermost first."""

    kind: CollectiveKind
    ways: tuple[AtLeastOne, ...]


@dataclass(frozen=True, kw_only=True)
class MachineFile(Machine):
    """A machine, as in its file."""

    schema: MachineVersion
    collectives: tuple[MeasuredForm, ...] = ()  # type: ignore[assignment]
    sources: dict[str, str] = field(default_factory=dict)


def made_schema() -> JsonObject:
    """The JSON Schema of a machine file, derived from ``MachineFile``. The committed file is equal to it."""
    return json_schema(MachineFile, "pase.machine/1: devices joined by link levels", closed=True)


def made_groups_schema() -> JsonObject:
    """The JSON Schema of a machine file of groups, derived from ``GroupsFile``. The committed file is equal to it."""
    return json_schema(
        GroupsFile, f"{GROUPS_SCHEMA}: groups of equal devices, and the link between", closed=True
    )


@cache
def schema() -> JsonObject:
    """The published JSON Schema of a machine file, for editors and for programs that write such files."""
    text = resources.files("pase.machine").joinpath("machine.schema.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def parse(text: str, where: str, folder: Path | None = None) -> Machine:
    """Reads the text of a machine file. Raises PaseError, with ``where`` as the file's name.

    folder: the folder to which the paths of groups are relative.
    """
    machine = _of_one_kind(text, where)
    if machine is not None:
        return machine
    if folder is None:
        raise PaseError(
            f"it is a machine of groups ('{GROUPS_SCHEMA}'), which must be in a file of its own",
            where=where,
            fix="load it by the path of its file",
        )
    return _grouped(tomllib.loads(text), where, folder)


@lru_cache(maxsize=256)
def _of_one_kind(text: str, where: str) -> Machine | None:
    """The machine of a file that names no other files; None if it is a machine of groups. It is checked once: commands
    load the same few files for each plan that they price, and all files for each device that they look for."""
    refuse_control(text, where)
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as e:
        raise PaseError(f"it is not TOML: {e}", where=where) from e
    except ValueError as e:  # Python refuses integers of thousands of digits
        raise PaseError(f"it is not readable TOML: {str(e).partition(';')[0]}", where=where) from None
    if tree.get("schema") == GROUPS_SCHEMA:
        return None
    if tree.get("schema") != SCHEMA:
        raise PaseError(
            f"schema is {tree.get('schema')!r}, but this version of pase reads '{SCHEMA}' and '{GROUPS_SCHEMA}'",
            where=where,
            fix="use the version of pase that wrote the file, or convert the file",
        )
    form = convert(tree, MachineFile, where, closed=True)
    for problem in _problems(form):
        raise PaseError(f"at {problem}", where=where)
    _check_sources(tree, form.sources, where)
    content = {f.name: getattr(form, f.name) for f in fields(Machine)}
    return Machine(**content | {"collectives": tuple(map(_collective, form.collectives))})


def _check_sources(tree: dict[str, object], sources: dict[str, str], where: str) -> None:
    numbers = _numbers(
        {key: value for key, value in tree.items() if key not in ("sources", "provenance")}, ""
    )
    for problem in _unsourced(list(numbers), sources):
        raise PaseError(problem, where=where)


def _grouped(tree: dict[str, object], where: str, folder: Path) -> GroupedMachine:
    form = convert(tree, GroupsFile, where, closed=True)
    _check_sources(tree, form.sources, where)
    kinds = []
    for i, g in enumerate(form.groups):
        try:
            text, named, _ = _read(folder / g.kind if g.kind.endswith(".toml") or "/" in g.kind else g.kind)
            kinds.append((parse(text, named), g.count))
        except PaseError as e:
            raise PaseError(f"at groups/{i}/kind: {e}", where=where) from e
    return grouped(form.name, kinds, form.between, form.sources, form.title)


def _collective(form: MeasuredForm) -> CollectiveCurve:
    curve = Curve(nbytes=form.nbytes, seconds=form.seconds)
    return CollectiveCurve(kind=form.kind, ways=form.ways, curve=curve)


def _problems(form: MachineFile) -> Iterator[str]:
    """Yields the problems that types cannot express, each as "place: what". Curves must rise, and lists by link level
    must have one number per level."""
    device, levels = form.device, len(form.levels)
    most = _MOST_EFFICIENT | {f"matmul.{dtype}": 1.0 for dtype in device.peak_flops}
    for kind, part in device.efficiency.items():
        if kind not in most:
            yield f"device/efficiency/{kind}: is not known; device/efficiency takes: {', '.join(most)}"
        elif part > most[kind]:
            yield f"device/efficiency/{kind}: must be at most {most[kind]:g}, got {part:g}"
    yield from _product_problems(device)
    if len(device.memory_tile) not in (0, 2):
        yield f"device/memory_tile: must be rows and columns, got {list(device.memory_tile)}"
    curves = [
        *((f"device/matmul_tables/{i}", check_matmul(t)) for i, t in enumerate(device.matmul_tables)),
        *((f"collectives/{i}", check_curve(c)) for i, c in enumerate(form.collectives)),
    ]
    if device.memory_curve is not None:
        curves.append(("device/memory_curve", check_curve(device.memory_curve)))
    if device.attention is not None:
        curves.append(("device/attention", check_attention(device.attention)))
    for i, kernel in enumerate(device.attention_kernels):
        for way in ("forward", "backward") if kernel.backward else ("forward",):
            curve = kernel.curve(backward=way == "backward")
            curves.append((f"device/attention_kernels/{i}/{way}", check_attention(curve)))
    yield from (f"{place}: {problem}" for place, problem in curves if problem is not None)
    for i, level in enumerate(form.levels[:-1]):
        if level.ways == 0:
            yield f"levels/{i}/ways: may be 0 (any number) only at the last level"
    for i, a in enumerate(form.algorithms):
        if len(a.step_s) != levels:
            yield f"algorithms/{i}/step_s: needs one number per link level ({levels}), got {len(a.step_s)}"
    for devices, ways in form.shapes.items():
        if len(ways) != levels or math.prod(ways) != devices:
            yield (
                f"shapes/{devices}: needs one number of ways per link level ({levels}) with product {devices}, "
                f"got {list(ways)}"
            )
    if (t := form.compiler) is not None:
        needs = {
            "cuda": ("clock_hz", "cache_bytes", "unit_lanes", "unit_shared_bytes", "block_shared_bytes"),
            "tpu": ("topology", "clock_hz"),
            "cpu": (),
        }[t.platform]
        yield from (
            f"compiler/{f}: is needed for platform '{t.platform}'" for f in needs if not getattr(t, f)
        )
        if t.platform == "cuda" and len(t.compute_capability) != 2:
            yield f"compiler/compute_capability: must be major and minor, got {list(t.compute_capability)}"
    seen = set()
    for i, c in enumerate(form.collectives):
        if len(c.ways) != levels or max(c.ways) < 2:
            yield (
                f"collectives/{i}/ways: needs one number per link level ({levels}), one of them 2 or more; "
                f"got {list(c.ways)}"
            )
        if (c.kind, c.ways) in seen:
            yield f"collectives/{i}: repeats {c.kind} over ways {list(c.ways)}; keep one of them"
        seen.add((c.kind, c.ways))


def _product_problems(device: Device) -> Iterator[str]:
    """Yields what contradicts the model of a device's product kernels, if it has one."""
    if device.products is None:
        return
    replaced = [f"device/efficiency/{kind}" for kind in device.efficiency if kind.startswith("matmul")]
    replaced += ["device/tiles"] if device.tiles else []
    for place in replaced:
        yield f"{place}: is replaced by device/products; keep one of them"
    if not device.compute_units:
        yield "device/compute_units: must be above 0 with device/products"


def _numbers(tree: object, path: str) -> Iterator[str]:
    """Yields the path of each number in the tree, with its keys joined by dots."""
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _numbers(value, f"{path}.{key}".lstrip("."))
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield path


def unnumbered(path: str) -> str:
    """A path without its list indices. It names a key of all entries of a list at once.

    >>> unnumbered("levels.0.latency_s")
    'levels.latency_s'
    """
    return re.sub(r"\.\d+(?=\.|$)", "", path)


def _unsourced(numbers: list[str], sources: dict[str, str]) -> Iterator[str]:
    """Yields each number without a source (its own, or that of a table above it), and each source without a number."""
    used: set[str] = set()
    for path in numbers:
        parts = path.split(".")
        above = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        found = {*above, *map(unnumbered, above)} & sources.keys()
        if not found:
            yield (
                f'{path} has no source; add it to [sources], e.g. "{path}" = "vendor datasheet, figure" '
                f'(or "assumed: why")'
            )
        used |= found
    for idle in sorted(sources.keys() - used):
        yield f"sources.{idle} is the source of no number in the file"


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()


def names() -> list[str]:
    """The names of the machines that come with the package.

    >>> "h100x8" in names()
    True
    """
    folder = resources.files("pase.machine") / "data"
    return sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml"))


def load(name_or_path: str | Path = DEFAULT) -> Machine:
    """Loads a machine by name ("h100x8", also written h100_x8) or by the path of its TOML file.

    Raises PaseError if there is no such machine, or if the file is not valid (see ``parse``).

    >>> load("H100_x8").device.memory_bytes
    80000000000
    """
    text, where, folder = _read(name_or_path)
    return parse(text, where, folder)


def _read(name_or_path: str | Path) -> tuple[str, str, Path | None]:
    """Returns the text of a machine's file, its name in messages, and its folder (None for a file of the package)."""
    text = str(name_or_path)
    if not isinstance(name_or_path, Path) and not text.endswith(".toml") and "/" not in text:
        known = {_plain(n): n for n in names()}
        if _plain(text) not in known:
            near = [n for plain, n in known.items() if _plain(text) and plain.startswith(_plain(text))]
            near = near or difflib.get_close_matches(text, names(), n=1)
            hint = f" (did you mean {' or '.join(repr(n) for n in near)}?)" if near else ""
            raise PaseError(
                f"there is no machine named '{text}'{hint}",
                fix=f"use one of {', '.join(names())}, or give the path of a .toml file",
            )
        name = known[_plain(text)]
        file = resources.files("pase.machine") / "data" / f"{name}.toml"
        return file.read_text(encoding="utf-8"), f"machine {name}", None
    try:
        content = Path(name_or_path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise PaseError(f"cannot read this machine file: {e}", where=text) from e
    return content, text, Path(name_or_path).parent
