"""The platform of devices that are here, and of those that are not."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh

from pase.backends.jax.ops.platforms import platform_of


def test_a_mesh_without_devices_may_name_their_platform():
    assert platform_of(jax.make_mesh((2,), ("a",), devices=jax.devices()[:2])) == "cpu"
    device = AbstractDevice(device_kind="cuda", num_cores=None, platform="gpu")
    assert platform_of(AbstractMesh((2,), ("a",), abstract_device=device)) == "gpu"
    assert platform_of(AbstractMesh((2,), ("a",))) == jax.default_backend()
