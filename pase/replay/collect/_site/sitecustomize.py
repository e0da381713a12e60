"""Traces a program that imports JAX or PyTorch. ``pase profile`` puts this file on PYTHONPATH.

It also runs the user's own sitecustomize, if there is one.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls autostart when the import of a framework has finished. It removes itself before the import begins."""

    def __init__(self, name):  # type: ignore[no-untyped-def]
        self.name = name

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):  # type: ignore[no-untyped-def]
            run(module)
            start = getattr(
                importlib.import_module("pase.replay.collect.autostart"), f"autostart_{self.name}"
            )
            start(os.environ["PASE_PROFILE"], float(os.environ.get("PASE_PROFILE_SECONDS") or 0))

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _users_own():  # type: ignore[no-untyped-def]
    """Runs the sitecustomize that this one hides, if there is one."""
    rest = [p for p in sys.path if os.path.abspath(p or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get("PASE_PROFILE"):
    sys.meta_path.insert(0, _AfterImport("jax"))
    sys.meta_path.insert(0, _AfterImport("torch"))
_users_own()
