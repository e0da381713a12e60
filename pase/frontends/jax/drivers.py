"""What JAX reports about drivers. Importing this takes no time, so that commands without a model start at once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_about_drivers"]


@contextmanager
def quiet_about_drivers() -> Iterator[None]:
    """Keeps JAX from reporting that a plugin for a GPU finds no driver."""
    says = logging.getLogger("jax._src.xla_bridge")
    level = says.level
    says.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        says.setLevel(level)
