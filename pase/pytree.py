"""What JAX and PyTorch call a pytree, as a type."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Tree"]

Tree: TypeAlias = Any
"""A pytree: containers, registered or not, of leaves. Python's types have no word for it, so it may be anything."""
