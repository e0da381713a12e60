"""``pytest tests/ir --update-golden`` rewrites the golden files. Read the diff before you commit it."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/ir/golden/*.txt again")


@pytest.fixture
def update_golden(request: pytest.FixtureRequest) -> bool:
    # The option exists only if pytest was given tests/ir itself.
    return bool(request.config.getoption("--update-golden", default=False))
