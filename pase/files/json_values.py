"""What JSON holds, as Python has it."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["JsonObject"]

JsonObject: TypeAlias = dict[str, Any]
"""An object, as ``json.loads`` reads it and ``json.dumps`` takes it. What its fields are is known once it is read into
a form (``codec.convert``)."""
