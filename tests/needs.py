"""What a test may need that a machine with the default extras may lack, and how to run the tests that need it.

A test says so by a mark of the need's name (``@pytest.mark.torch``); ``conftest.py`` skips it where the thing is
missing, and lists at the end of a run what was skipped and how to run it. Under CI a test that is skipped for any other
reason fails the run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from bench.cases import SHARED

__all__ = ["NEEDS", "SHARED", "Need"]


@dataclass(frozen=True, kw_only=True)
class Need:
    """Something that not every machine has."""

    what: str
    how: str
    """The command that runs the tests that need it, where it is."""
    missing: Callable[..., str | None]
    """Why a test that is marked so (with the mark's arguments) cannot run here; None where it can."""
    asked: bool = False
    """Whether such tests run only where the mark is asked for (``-m``)."""

    @property
    def reason(self) -> str:
        return f"needs {self.what}: {self.how}"


def _installed(*names: str) -> str | None:
    absent = [n for n in names if importlib.util.find_spec(n) is None]
    return f"{', '.join(absent)} not installed" if absent else None


def _data(path: str = ".") -> str | None:
    return None if (SHARED / path).exists() else f"no {SHARED / path}"


def _network_laboratory() -> str | None:
    from bench.netlab import net

    return net.unavailable()


NEEDS = {
    "torch": Need(
        what="PyTorch, too large to be installed by default",
        how="make test-all",
        missing=lambda: _installed("torch", "onnxscript", "transformers"),
    ),
    "minutes": Need(
        what="minutes: it starts a program, as people do",
        how="make test-all",
        missing=lambda: None,
        asked=True,
    ),
    "corpus": Need(
        what="the libraries whose programs bench/programs holds",
        how="make test-corpus",
        missing=_installed,
    ),
    "root": Need(
        what="root and iproute2, for networks of namespaces",
        how="make test-root",
        missing=_network_laboratory,
    ),
    "data": Need(
        what="recorded data that is not in the repository",
        how="make test-data PASE_DATA=FOLDER",
        missing=_data,
    ),
}
"""Mark -> need."""
