"""Types for the contents of JSON."""

from __future__ import annotations

from typing import Any, TypeAlias, Union

__all__ = ["Json", "JsonObject"]

Json: TypeAlias = Union[bool, int, float, str, "list[Json]", "dict[str, Json]", None]
"""A value, as ``json.loads`` returns it and ``json.dumps`` accepts it. Its meaning is known once it is read into a form
(``codec.convert``)."""
JsonObject: TypeAlias = dict[str, Any]
"""An object, whose fields are looked up by name. Their types are known once it is read into a form."""
