"""Dispatch modes are entered by one thread at a time."""

from __future__ import annotations

import ast
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import pase
from pase.frontends.torch.modes import DISPATCH_MODES, no_stale_mode

PACKAGE = Path(pase.__file__).parent


def test_every_mode_is_entered_by_one_thread_at_a_time():
    """In the source: a ``with`` statement of a mode has the lock, or is inside of one that has it."""

    def names(node: ast.AST) -> set[str]:
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}

    entered = 0
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        if "FakeTensorMode(" not in text:
            continue
        withs = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.With)]
        for w in withs:
            if any("FakeTensorMode" in names(item) for item in w.items):
                entered += 1
                assert any("DISPATCH_MODES" in names(item) for item in w.items), f"{file}:{w.lineno}"
    assert entered >= 4


@pytest.mark.torch
@pytest.mark.parametrize("what", ["export", "record"])
def test_a_thread_waits_for_the_modes_of_another(what: str) -> None:
    import torch

    plan = pase.compile(torch.nn.Linear(4, 4), torch.ones(4, 4), devices=2, loss=lambda m, x: m(x).sum())
    do: dict[str, Callable[[], object]] = {
        "export": lambda: pase.compile(torch.nn.Linear(4, 4), torch.ones(4, 4), devices=2),
        "record": plan.torch.code,
    }
    thread = threading.Thread(target=do[what])
    with DISPATCH_MODES:
        thread.start()
        thread.join(1.0)
        assert thread.is_alive()
    thread.join()


@pytest.mark.torch
def test_a_global_that_threads_left_on_is_off_again_in_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from torch.utils import _python_dispatch as state

    for name in vars(state):
        if name.startswith("_is_in_"):
            monkeypatch.setattr(state, name, True)
    with no_stale_mode():
        assert not state.is_in_any_mode_without_ignore_compile_internals()
    with torch.utils._python_dispatch.TorchDispatchMode(), no_stale_mode():
        assert state.is_in_any_mode_without_ignore_compile_internals()
