"""Padding of dims for the models of any frontend."""

from __future__ import annotations

from collections.abc import Mapping

from pase.errors import PaseError
from pase.frontends.registry import Traced

__all__ = ["as_padded", "extents_to_pad"]


def as_padded(traced: Traced, sizes: Mapping[int, int]) -> Traced:
    """Returns the model with all dims of some extents padded. sizes: extent -> padded extent; if empty, the model
    itself.

    Raises PaseError if its frontend cannot pad it.
    """
    if not sizes:
        return traced
    _require_jax(traced)
    from pase.frontends.jax.frontend import TracedJax
    from pase.frontends.jax.padding.program import padded

    assert isinstance(traced, TracedJax)
    return padded(traced, sizes)


def extents_to_pad(traced: Traced, devices: int, micro_batches: int = 1) -> Mapping[int, int]:
    """The extents of a model's parameters and inputs that the devices do not divide -> what to pad them to first. A
    batch that is cut into micro-batches is not padded.

    Raises PaseError if its frontend cannot pad it.
    """
    _require_jax(traced)
    from pase.frontends.jax.blocks import batch_size
    from pase.frontends.jax.frontend import TracedJax
    from pase.frontends.jax.padding.program import extents

    assert isinstance(traced, TracedJax)
    found = extents(traced, devices)
    if micro_batches > 1:
        found.pop(batch_size(traced), None)
    return found


def _require_jax(traced: Traced) -> None:
    if traced.frontend != "jax":
        raise PaseError(
            f"'{traced.graph.name}' was read by the {traced.frontend} frontend, but only JAX programs can be padded",
            where="uneven='padded'",
            fix="leave the option out",
        )
