"""The platform of the devices that a program is made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh
    from jax.sharding import Mesh as JaxMesh

__all__ = ["platform_of"]


def platform_of(mesh: JaxMesh | AbstractMesh) -> str:
    """JAX's name of the platform: "cpu", "gpu" or "tpu".

    A mesh of devices that are not here, or inside of a region that is manual over some axes, has no devices. It may
    name their platform; otherwise, the platform is the one that JAX compiles for.
    """
    import jax

    if not isinstance(mesh, jax.sharding.AbstractMesh):
        return str(mesh.devices.flat[0].platform)
    said = mesh.abstract_device
    return jax.default_backend() if said is None or said.platform is None else said.platform
