"""Writes a machine as the text of its file: ``pase calibrate`` writes it and ``load`` reads it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from pase.errors import PaseError
from pase.files.json_values import JsonObject
from pase.machine.groups import GroupedMachine
from pase.machine.load import SCHEMA, MeasuredForm, parse, unnumbered
from pase.machine.types import CollectiveCurve, Machine

__all__ = ["dumps"]


def _tree(value: object, path: str, sources: Mapping[str, str]) -> Any:
    """Turns dataclasses into dicts, without the fields that have their default value and no source of their own."""
    if isinstance(value, CollectiveCurve):  # in the file, its curve is in the same table
        value = MeasuredForm(kind=value.kind, ways=value.ways, **vars(value.curve))
    if dataclasses.is_dataclass(value):
        out = {}
        for f in dataclasses.fields(value):
            here, at = getattr(value, f.name), f"{path}.{f.name}".lstrip(".")
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            if here != default or {at, unnumbered(at)} & sources.keys():
                out[f.name] = _tree(here, at, sources)
        return out
    if isinstance(value, dict):
        return {str(k): _tree(v, f"{path}.{k}", sources) for k, v in value.items()}
    return (
        [_tree(v, f"{path}.{i}", sources) for i, v in enumerate(value)] if isinstance(value, tuple) else value
    )


def _scalar(value: object) -> str:
    # JSON's strings, numbers, true and lists are valid TOML, except DEL. Every digit of a float is kept.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if key.replace("_", "").isalnum() and key.isascii() else _scalar(key)


def _write(table: JsonObject, path: str, lines: list[str]) -> None:
    tables = {k: v for k, v in table.items() if isinstance(v, dict)}
    arrays = {k: v for k, v in table.items() if isinstance(v, list) and v and isinstance(v[0], dict)}
    lines += [f"{_key(k)} = {_scalar(v)}" for k, v in table.items() if k not in tables and k not in arrays]
    for key, sub in tables.items():
        below = f"{path}.{_key(key)}" if path else _key(key)
        lines += ["", f"[{below}]"]
        _write(sub, below, lines)
    for key, entries in arrays.items():
        below = f"{path}.{_key(key)}" if path else _key(key)
        for entry in entries:
            lines += ["", f"[[{below}]]"]
            _write(entry, below, lines)


def dumps(machine: Machine) -> str:
    """Returns TOML text from which ``parse`` reads the same machine. Raises PaseError if ``parse`` would refuse it.

    >>> from pase.machine.load import load
    >>> parse(dumps(load("h100x8")), "again") == load("h100x8")
    True
    """
    if isinstance(machine, GroupedMachine):
        raise PaseError(
            "it consists of groups, and its file names the files of their kinds",
            where=f"machine '{machine.name}'",
            fix="copy its file instead",
        )
    lines: list[str] = []
    _write({"schema": SCHEMA, **_tree(machine, "", machine.sources)}, "", lines)
    text = "\n".join(lines) + "\n"
    parse(text, f"machine {machine.name}")
    return text
