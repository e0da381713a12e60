"""The mesh that a user has set around calls of pase (``jax.set_mesh``, ``use_abstract_mesh``).

A plan has its own mesh. JAX refuses a ``shard_map`` or a sharding over a mesh other than the one in context. If a
context's axes are Explicit (the default of ``jax.make_mesh``), the types of values contain shardings over it. Programs
are therefore traced with Auto axes, and plans run without a mesh in context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TypeVar

from pase.errors import PaseError
from pase.frontends.jax.versions import outside_jit
from pase.pytree import Tree

__all__ = ["in_any_context", "traced_in_context", "untyped", "without_mesh"]

F = TypeVar("F", bound=Callable[..., object])


@contextmanager
def without_mesh() -> Iterator[None]:
    """A context in which no mesh is set."""
    import jax
    from jax.sharding import AbstractMesh

    if _nothing_set():
        yield
        return
    with jax.set_mesh(None) if outside_jit() else jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # type: ignore[arg-type]
        yield


def traced_in_context(trace: F) -> F:
    """Wraps a function that traces a user's function. It traces without a mesh or, if this fails, with the user's mesh.

    Equations keep the mesh under which they were traced, and a plan runs them under its own mesh.
    """

    @wraps(trace)
    def run(*args: Tree, **options: Tree) -> Tree:
        if _nothing_set():
            return trace(*args, **options)
        try:
            with without_mesh():
                return trace(*args, **options)
        except (ValueError, RuntimeError, TypeError, KeyError, NameError):  # JAX has no single error for this
            with _auto_mesh():
                return trace(*args, **options)

    return run  # type: ignore[return-value]


@contextmanager
def _auto_mesh() -> Iterator[None]:
    """A context in which the current mesh has Auto axes: constraints may name its axes, but types have no shardings."""
    import jax
    from jax.sharding import AxisType, Mesh

    around = jax.sharding.get_abstract_mesh()
    explicit = [
        n for n, t in zip(around.axis_names, around.axis_types, strict=True) if t == AxisType.Explicit
    ]
    if not explicit:
        yield
        return
    mesh = jax.sharding.get_mesh() if outside_jit() else None
    if mesh is None or mesh.empty:
        auto = around.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))
        with jax.sharding.use_abstract_mesh(auto):
            yield
        return
    with jax.set_mesh(Mesh(mesh.devices, mesh.axis_names)):
        yield


def untyped(tree: Tree) -> Tree:
    """Turns arrays over a mesh with Explicit axes into arrays over the same mesh with Auto axes. No data moves.

    Raises PaseError for such a value inside a jit of the user, because it cannot be turned there.
    """
    import jax

    return jax.tree.map(_untyped, tree)


def _untyped(x: Tree) -> Tree:
    import jax
    from jax.sharding import AxisType, Mesh, NamedSharding

    if not isinstance(x, jax.Array):
        return x
    if isinstance(x, jax.core.Tracer):
        mesh = getattr(getattr(jax.typeof(x), "sharding", None), "mesh", None)
        if mesh is not None and AxisType.Explicit in mesh.axis_types:
            raise PaseError(
                f"a function of a plan was called inside jax.jit with a value whose type has the mesh "
                f"{dict(mesh.shape)} with Explicit axes",
                fix=f"call it outside jit, or make the mesh with "
                f"axis_types=(jax.sharding.AxisType.Auto,) * {len(mesh.axis_names)}",
            )
        return x
    s = x.sharding
    if not isinstance(s, NamedSharding) or AxisType.Explicit not in s.mesh.axis_types:
        return x
    mesh = Mesh(s.mesh.devices, s.mesh.axis_names)
    return jax.device_put(x, NamedSharding(mesh, s.spec, memory_kind=s.memory_kind))


def in_any_context(fn: Callable[..., Tree]) -> Callable[..., Tree]:
    """Wraps fn so that it can be called under any mesh, with arrays over any mesh."""

    @wraps(fn)
    def run(*args: Tree) -> Tree:
        with without_mesh():
            return fn(*untyped(args))

    return run


def _nothing_set() -> bool:
    import jax

    if not jax.sharding.get_abstract_mesh().empty:
        return False
    return not outside_jit() or jax.sharding.get_mesh().empty
