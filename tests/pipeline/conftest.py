"""Fixtures of the tests of pipelines."""

from __future__ import annotations

import jax
import pytest


@pytest.fixture
def double():
    """In float64."""
    with jax.enable_x64(True):
        yield
