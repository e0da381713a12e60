"""What several files of this folder use, computed once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.backends.torch import checked


@pytest.fixture(scope="session")
def given() -> tuple[Any, Any, Any]:
    return checked.given()
