"""Fixtures of the tests of reports."""

import pytest

from pase.api import Plan
from tests.questions.reports import gpt2_page, gpt2_plan


@pytest.fixture(scope="session")
def plan() -> Plan:
    return gpt2_plan()


@pytest.fixture(scope="session")
def text() -> str:
    return gpt2_page()
