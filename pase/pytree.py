"""The type of a pytree, as JAX and PyTorch use it."""

from __future__ import annotations

from typing import Any, TypeAlias

__all__ = ["Tree"]

Tree: TypeAlias = Any
"""A pytree: nested containers of leaves. Python's type system cannot express it, so it is Any."""
