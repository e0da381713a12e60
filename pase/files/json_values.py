"""What JSON holds, as Python has it."""

from __future__ import annotations

from typing import Any, TypeAlias, Union

__all__ = ["Json", "JsonObject"]

Json: TypeAlias = Union[bool, int, float, str, "list[Json]", "dict[str, Json]", None]
"""A value, as ``json.loads`` reads it and ``json.dumps`` takes it. What it means is known once it is read into a form
(``codec.convert``)."""
JsonObject: TypeAlias = dict[str, Any]
"""An object, whose fields are looked up by name: what they are is known once it is read into a form."""
