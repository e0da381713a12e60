"""The compilers of machines, for programs that are compiled on a machine without the devices (``pase verify``).

A machine file says what XLA must be told about its device (``CompileTarget``). A new card is one such file.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass

from pase.errors import PaseError
from pase.machine import Machine
from pase.machine.types import CompileTarget

__all__ = ["TargetDevices", "devices_of"]

_CUDA_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
"""There is nothing to tune on. Without tuning, some of Triton's products do not compile (ViT's, JAX 0.10.2)."""

_CUDNN = {"major": 9, "minor": 10, "patch": 0}
"""The version of cuDNN that XLA compiles for; its facts about an H100 name it."""


@dataclass(frozen=True, kw_only=True)
class TargetDevices:
    """Devices to compile for.

    platform: JAX's name of their platform. lowered_for: its name where programs are exported. topology: the name by
    which XLA makes them. config: XLA's description of one of them, if it takes one. environment: variables of the
    process that compiles. packages: the modules that compiling needs, and the packages that have them.
    """

    platform: str
    lowered_for: str
    topology: str = ""
    config: str = ""
    environment: Mapping[str, str]
    packages: Mapping[str, str]

    def check(self, machine: Machine) -> None:
        """Raise PaseError if a package is not installed."""
        import jax

        absent = [p for m, p in self.packages.items() if not _found(m)]
        if absent:
            wanted = " ".join(p.format(jax=jax.__version__) for p in absent)
            raise PaseError(
                f"compiling for {machine.name} on this machine needs XLA's compiler for it, which is not installed",
                where="pase verify",
                fix=f"pip install {wanted}",
            )


def devices_of(machine: Machine, devices: int) -> TargetDevices:
    """The devices of a machine to compile for. Raises PaseError if no compiler is known for it."""
    t = machine.compiler
    if t is None:
        raise PaseError(
            f"the machine '{machine.name}' does not say how to compile for it on another machine",
            where="--target",
            fix="add a table [compiler] to its file (docs/how-to/verify.md), or give another target",
        )
    return {"cuda": _cuda, "tpu": _tpu, "cpu": _cpu}[t.platform](machine, t, devices)


def _cuda(machine: Machine, t: CompileTarget, devices: int) -> TargetDevices:
    """GPUs that compile-only devices of JAX's CUDA plugin stand for: one slice of hosts, as many as are needed.

    A host has as many GPUs as the innermost link joins.
    """
    host = machine.levels[0].ways or devices
    hosts = -(-devices // host)
    return TargetDevices(
        platform="gpu",
        lowered_for="cuda",
        topology=f"1x{hosts}x{min(host, devices)}",
        config=_cuda_config(machine, t),
        environment={"XLA_FLAGS": _flags(_CUDA_FLAGS), "JAX_PLATFORMS": "cpu"},
        packages={
            "jax_plugins.xla_cuda12": "jax-cuda12-pjrt=={jax}",
            "jax_cuda12_plugin": "jax-cuda12-plugin=={jax}",
            "nvidia.cuda_nvcc": "nvidia-cuda-nvcc-cu12",
        }
        if not _found("jax_plugins.xla_cuda13")
        else {},
    )


def _cuda_config(machine: Machine, t: CompileTarget) -> str:
    """XLA's GpuTargetConfigProto in text form. What is the same on every CUDA device since Volta is written out."""
    d = machine.device
    numbers = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_core": t.unit_shared_bytes,
        "threads_per_core_limit": 2048,
        "core_count": d.compute_units,
        "fpus_per_core": t.unit_lanes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": round(d.memory_bandwidth_bytes_per_s),
        "l2_cache_size": t.cache_bytes,
        "clock_rate_ghz": t.clock_hz / 1e9,
        "device_memory_size": d.memory_bytes,
        "shared_memory_per_block_optin": t.block_shared_bytes,
        "registers_per_core_limit": 1 << 16,
        "registers_per_block_limit": 1 << 16,
    }
    major, minor = t.compute_capability
    lines = [*(f"  {k}: {v}" for k, v in numbers.items())]
    lines.append(f"  cuda_compute_capability {{ major: {major} minor: {minor} }}")
    dnn = "dnn_version_info { " + " ".join(f"{k}: {v}" for k, v in _CUDNN.items()) + " }"
    return "\n".join(["gpu_device_info {", *lines, "}", 'platform_name: "CUDA"', dnn, ""])


def _tpu(machine: Machine, t: CompileTarget, devices: int) -> TargetDevices:
    """Chips of a slice that the machine's file lists, which libtpu names by the chips along each dim."""
    if devices not in machine.shapes:
        raise PaseError(
            f"{machine.name} has no slice of {devices} chips",
            where="--target",
            fix=f"compile the plan for one of {', '.join(map(str, sorted(machine.shapes)))} chips",
        )
    extents = sorted(
        w
        for level, w in zip(machine.levels, machine.shapes[devices], strict=True)
        if level.topology == "torus"
    )
    return TargetDevices(
        platform="tpu",
        lowered_for="tpu",
        topology=f"{t.topology}:{'x'.join(map(str, extents))}",
        environment={"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        packages={"libtpu": "libtpu"},
    )


def _cpu(machine: Machine, t: CompileTarget, devices: int) -> TargetDevices:
    """Host devices."""
    return TargetDevices(
        platform="cpu",
        lowered_for="cpu",
        environment={
            "XLA_FLAGS": _flags(f"--xla_force_host_platform_device_count={devices}"),
            "JAX_PLATFORMS": "cpu",
        },
        packages={},
    )


def _flags(own: str) -> str:
    """XLA_FLAGS of the user, and then ours."""
    return f"{os.environ.get('XLA_FLAGS', '')} {own}".strip()


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not there
        return False
